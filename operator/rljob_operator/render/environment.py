"""Environment of the Ray container: our defaults, the user's values, and what a user must not set.

Order matters: `$(POD_IP)` resolves only after POD_IP is defined, so our entries come first and a user's value for the
same name replaces ours in place.
"""

from __future__ import annotations

from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.names import (
    CONFIG_PATH,
    ENV_CONFIG,
    ENV_POD_IP,
    ENV_RAY_AUTH_MODE,
    ENV_RAY_AUTH_TOKEN,
    STORAGE_MOUNT_PATH,
)
from rljob_api.v1alpha1 import EnvVar
from rljob_operator.render.engine_env import build_engine_environment, needs_plain_allocations
from rljob_operator.render.names import AUTH_TOKEN_KEY, ROLE_WORKER
from rljob_operator.render.network import build_socket_environment
from rljob_operator.render.quantity import parse_whole_cpus
from rljob_operator.render.types import RenderOptions, make_error, make_warning

EnvEntry = dict[str, Any]

ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
KUBERAY_OWNED: Final = (
    "RAY_CLUSTER_NAME",
    "RAY_CLUSTER_NAMESPACE",
    "RAY_CLOUD_INSTANCE_ID",
    "RAY_NODE_TYPE_NAME",
    "KUBERAY_GEN_RAY_START_CMD",
    "FQ_RAY_IP",
    "RAY_IP",
    "RAY_PORT",
    "RAY_ADDRESS",
)
"""KubeRay appends these (the last wins in a pod) or takes ours over its own, which breaks workers."""

REFUSED_BY_KUBERAY: Final = {
    "RAY_REDIS_ADDRESS": "KubeRay refuses the cluster: the address would switch on GCS fault tolerance; remove it",
    "REDIS_USERNAME": "KubeRay refuses the cluster: it belongs to GCS fault tolerance; remove it",
    "RAY_enable_autoscaler_v2": "KubeRay refuses the cluster: the job has a fixed size; remove it",
}
"""KubeRay says so in an event only, without any status: the job would wait until its start-up timeout."""


def build_owned_entries(auth_secret_name: str) -> list[EnvEntry]:
    """Entries a user cannot change.

    KubeRay copies the Ray container's `env` (not its `envFrom`) into the wait-gcs-ready init container, so explicit
    entries also authenticate that one, on every KubeRay release; `authOptions` needs 1.5.1. Unset, Ray 2.60 switches
    token mode on by itself wherever it finds a token file.
    """
    return [
        _field_ref(ENV_POD_IP, "status.podIP"),
        _field_ref("POD_IPS", "status.podIPs"),
        _field_ref("POD_NAME", "metadata.name"),
        _field_ref("NODE_NAME", "spec.nodeName"),
        _value(ENV_RAY_AUTH_MODE, "token"),
        {
            "name": ENV_RAY_AUTH_TOKEN,
            "valueFrom": {"secretKeyRef": {"name": auth_secret_name, "key": AUTH_TOKEN_KEY}},
        },
        _value(ENV_CONFIG, CONFIG_PATH),
    ]


def build_environment(
    resolved: ResolvedJob, role: str, auth_secret_name: str, options: RenderOptions
) -> list[EnvEntry]:
    """Our entries and the job's `cluster.env`, before the pod template and before `enforce_environment`."""
    cluster = resolved.spec.cluster
    has_gpus = role == ROLE_WORKER and resolved.layout.gpus_per_node > 0
    engine = build_engine_environment(resolved.engine, resolved.engine_version, resolved.spec.rollout.placement)
    defaults: dict[str, str] = _build_common_defaults(resolved)
    if not has_gpus:
        defaults |= _build_no_gpu_environment(cluster.gpu_resource_name)
    if role == ROLE_WORKER:
        if cluster.worker_resources.cpu is not None:
            cpus_per_rank = parse_whole_cpus(cluster.worker_resources.cpu) // resolved.layout.ranks_per_node
            defaults["OMP_NUM_THREADS"] = str(max(1, cpus_per_rank))
        if has_gpus:
            defaults |= {
                "NCCL_DEBUG": "WARN",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            }
        defaults |= build_socket_environment(resolved, options)
        defaults |= engine.defaults
    # On the head too: what the driver passes on to its actors must not contradict the workers.
    defaults |= engine.owned
    entries = build_owned_entries(auth_secret_name) + [_value(name, value) for name, value in defaults.items()]
    return merge_entries(entries, [to_env_entry(variable) for variable in cluster.env])


def enforce_environment(
    entries: list[EnvEntry], resolved: ResolvedJob, auth_secret_name: str, template_path: str
) -> tuple[list[EnvEntry], list[Finding]]:
    """The final word, after every merge: owned entries restored, harmful ones removed, each named in a finding.

    `template_path` is the field path of entries that did not come from `spec.cluster.env`.
    """
    findings: list[Finding] = []
    owned = {entry["name"]: entry for entry in build_owned_entries(auth_secret_name)}
    engine = build_engine_environment(resolved.engine, resolved.engine_version, resolved.spec.rollout.placement)
    owned |= {name: _value(name, value) for name, value in engine.owned.items()}
    index_of = {variable.name: index for index, variable in enumerate(resolved.spec.cluster.env)}
    removed = dict.fromkeys(KUBERAY_OWNED, "KubeRay sets it")
    removed["RAY_AUTH_TOKEN_PATH"] = "the token comes from the cluster's Secret"
    removed |= dict.fromkeys(
        engine.stripped,
        f"{resolved.engine} {resolved.engine_version} ignores or misreads it; "
        f"the operator sets {', '.join(engine.owned)} instead",
    )
    strips_segments = needs_plain_allocations(resolved.engine)

    kept: list[EnvEntry] = []
    for entry in entries:
        name = entry["name"]
        path = f"spec.cluster.env[{index_of[name]}]" if name in index_of else f"{template_path}[{name}]"
        if name in REFUSED_BY_KUBERAY:
            findings.append(make_error("InvalidValue", f"{path}.name", REFUSED_BY_KUBERAY[name]))
        elif name in removed:
            findings.append(make_warning("EnvironmentIgnored", f"{path}.name", f"removed: {removed[name]}"))
        elif name in owned:
            if entry != owned[name]:
                findings.append(
                    make_warning(
                        "EnvironmentIgnored", f"{path}.name", f"{_describe(entry)} is ignored: the operator owns it"
                    )
                )
            kept.append(owned[name])
        elif name in ALLOCATOR_VARIABLES and strips_segments and _has_expandable_segments(entry.get("value", "")):
            remaining = _strip_expandable_segments(entry["value"])
            findings.append(
                make_warning(
                    "AllocatorConfIncompatible",
                    f"{path}.value",
                    f"{entry['value']!r}: expandable_segments is removed, the memory pool of a co-located engine "
                    "cannot sleep with it, and weights cannot be handed to a separate one; what remains: "
                    f"{remaining!r}",
                )
            )
            if remaining:
                kept.append({**entry, "value": remaining})
        else:
            kept.append(entry)
    # First, as in our own list: whatever is left may refer to $(POD_IP).
    absent = [entry for name, entry in owned.items() if all(other["name"] != name for other in kept)]
    if absent:
        names = ", ".join(entry["name"] for entry in absent)
        findings.append(
            make_warning("EnvironmentIgnored", template_path, f"removes {names}: put back, the operator owns them")
        )
    return absent + kept, findings


def merge_entries(base: list[EnvEntry], overrides: list[EnvEntry]) -> list[EnvEntry]:
    """`overrides` replace entries of the same name in place; new names follow in their order."""
    merged = {entry["name"]: entry for entry in base}
    for entry in overrides:
        merged[entry["name"]] = entry
    return list(merged.values())


def to_env_entry(variable: EnvVar) -> EnvEntry:
    """A pod's env entry."""
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": variable.value_from}
    return _value(variable.name, variable.value or "")


def _build_common_defaults(resolved: ResolvedJob) -> dict[str, str]:
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Air-gapped pods stall on telemetry at start.
        "RAY_USAGE_STATS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        # Ray kills a stopped job's driver after 3 s by default, long before a checkpoint is written.
        "RAY_JOB_STOP_WAIT_TIME_S": str(resolved.spec.cluster.termination_grace_period_seconds),
        "HF_HOME": f"{STORAGE_MOUNT_PATH}/cache/huggingface",
    }
    if resolved.spec.model.source.startswith("/"):
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults


def _build_no_gpu_environment(gpu_resource_name: str) -> dict[str, str]:
    # A CUDA image has NVIDIA_VISIBLE_DEVICES=all baked in: on a GPU node the pod would see every device of the host.
    environment = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}
    if gpu_resource_name.startswith("amd.com/"):
        environment["HIP_VISIBLE_DEVICES"] = ""
    return environment


def _has_expandable_segments(value: str) -> bool:
    return "expandable_segments:true" in value.replace(" ", "").lower()


def _strip_expandable_segments(value: str) -> str:
    options = [option.strip() for option in value.split(",")]
    return ",".join(option for option in options if option and not _has_expandable_segments(option))


def _describe(entry: EnvEntry) -> str:
    return repr(entry["value"]) if "value" in entry else "the value from a reference"


def _value(name: str, value: str) -> EnvEntry:
    return {"name": name, "value": value}


def _field_ref(name: str, field_path: str) -> EnvEntry:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field_path}}}
