"""Rules about environment variables: which are the operator's, which are known to break a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.v1alpha1.cluster import EnvVar
from rljob_api.v1alpha1.rollout import Engine, Placement

OWNED_ENV: Final[dict[str, str]] = {
    "RAY_AUTH_MODE": "the operator gives every cluster its own token",
    "RAY_AUTH_TOKEN": "the operator gives every cluster its own token",
    "RAY_AUTH_TOKEN_PATH": "the operator gives every cluster its own token",
    "RAY_ADDRESS": "KubeRay sets the address of the head",
    "RAY_JOB_STOP_WAIT_TIME_S": "use spec.cluster.terminationGracePeriodSeconds",
    "POD_IP": "the operator sets it from the pod's status",
    "MASTER_ADDR": "the trainer takes it from rank 0",
    "MASTER_PORT": "the trainer takes it from rank 0",
    "RANK": "the trainer numbers the ranks",
    "LOCAL_RANK": "the trainer numbers the ranks",
    "WORLD_SIZE": "it is spec.cluster.nodes x ranksPerNode",
    "CUDA_VISIBLE_DEVICES": "Ray assigns the GPUs",
    "LD_PRELOAD": "the engine's memory saver needs it for itself",
    "PYTHONHASHSEED": "use spec.training.seed",
}
"""Refused: name -> why, or what to use instead."""
OWNED_ENV_PREFIX: Final = "RLJOB_"

ALLOCATOR_ENV: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""All spellings torch reads; the alias escapes checks that know only one (TRL PR #5794)."""
EXACT_INTERFACE_ENV: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Names of interfaces, comma separated; `^`, `=` and prefixes are NCCL's grammar."""
STRIPPED_ENV: Final = tuple(
    f"{prefix}_{switch}_TP_MEMORY_INBALANCE_CHECK" for prefix in ("SGL", "SGLANG") for switch in ("DISABLE", "ENABLE")
)
"""Every spelling of SGLang's memory check: 0.5.7-0.5.16 copy the old value un-negated over the new one, so that
`SGL_DISABLE_...=True` switches the check on. The operator sets the one that works for the engine's version."""

_SECRET_NAME: Final = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)S?$")
_VALUE_SOURCES: Final = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef", "fileKeyRef")


def _list_variables(context: RuleContext) -> list[tuple[str, EnvVar]]:
    spec = context.spec
    lists = [("spec.cluster.env", spec.cluster.env)]
    if spec.trainer is not None:
        lists.append(("spec.trainer.env", spec.trainer.env))
    return [(f"{path}[{index}]", variable) for path, env in lists for index, variable in enumerate(env)]


def check_env_shape(context: RuleContext) -> Iterable[Finding]:
    """One value or one source; no name twice in a list."""
    seen: set[tuple[str, str]] = set()
    for path, variable in _list_variables(context):
        key = (path.partition("[")[0], variable.name)
        if key in seen:
            yield make_error(f"{path}.name", f"{variable.name} is there twice; keep one", FindingReason.CONFLICT)
        seen.add(key)
        if variable.value is not None and variable.value_from is not None:
            yield make_error(path, f"{variable.name} has value and valueFrom; keep one", FindingReason.CONFLICT)
        if variable.value_from is not None and (
            len(variable.value_from) != 1 or next(iter(variable.value_from)) not in _VALUE_SOURCES
        ):
            yield make_error(
                f"{path}.valueFrom",
                f"has {', '.join(variable.value_from) or 'nothing'}; exactly one of {', '.join(_VALUE_SOURCES)} is "
                "required; for example secretKeyRef: {name: hf-token, key: token}",
            )


def check_owned_env(context: RuleContext) -> Iterable[Finding]:
    """Variables that decide who talks to whom; another value breaks the job or opens the cluster."""
    for path, variable in _list_variables(context):
        if variable.name in OWNED_ENV:
            why = OWNED_ENV[variable.name]
            yield make_error(
                f"{path}.name", f"{variable.name} belongs to the operator: {why}; remove it", FindingReason.RESERVED
            )
        elif variable.name.startswith(OWNED_ENV_PREFIX):
            yield make_error(
                f"{path}.name",
                f"{variable.name}: names that begin with {OWNED_ENV_PREFIX} belong to the operator; for example "
                f"MY_{variable.name.removeprefix(OWNED_ENV_PREFIX)}",
                FindingReason.RESERVED,
            )


def check_interface_env(context: RuleContext) -> Iterable[Finding]:
    """Gloo takes `^lo` for the name of an interface: "Unable to find address for: ^lo" (aws-do-eks PRs #50, #51)."""
    for path, variable in _list_variables(context):
        if variable.name in EXACT_INTERFACE_ENV and variable.value and re.search(r"[\^=\s]", variable.value):
            yield make_error(
                f"{path}.value",
                f"{variable.value!r}: {variable.name} takes exact names only, ^ and = are NCCL's grammar; for example "
                "eth0, or remove it: the interface is found from the route to the head",
            )


def check_allocator_env(context: RuleContext) -> Iterable[Finding]:
    """Expandable segments and the sleep mode of co-located engines exclude each other (vllm PR #11743); separate
    engines get weights by CUDA-IPC handles, which such memory does not have."""
    rollout = context.spec.rollout
    if rollout.engine is Engine.NATIVE:
        return
    if rollout.placement is Placement.SEPARATE:
        harm = f"keeps the trainer from handing weights to a separate {rollout.engine}"
    else:
        harm = f"keeps a co-located {rollout.engine} from releasing its memory"
    for path, variable in _list_variables(context):
        value = (variable.value or "").replace(" ", "").lower()
        if variable.name in ALLOCATOR_ENV and "expandable_segments:true" in value:
            yield make_error(
                f"{path}.value",
                f"{variable.value!r}: expandable_segments:True {harm}; remove it, or set expandable_segments:False",
                FindingReason.CONFLICT,
            )


def check_stripped_env(context: RuleContext) -> Iterable[Finding]:
    """The memory check of SGLang is switched by version; a copied value does the opposite in some."""
    for path, variable in _list_variables(context):
        if variable.name in STRIPPED_ENV:
            yield make_warning(
                f"{path}.name",
                f"{variable.name} is stripped: its meaning depends on the SGLang version, and the operator sets the "
                "spelling that works; remove it",
                FindingReason.RESERVED,
            )


def check_device_env(context: RuleContext) -> Iterable[Finding]:
    """Two visibility variables of AMD GPUs are applied one after the other (ray #53737)."""
    names = {variable.name: path for path, variable in _list_variables(context)}
    if {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} <= names.keys():
        yield make_error(
            f"{names['ROCR_VISIBLE_DEVICES']}.name",
            "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES filter the GPUs twice; remove ROCR_VISIBLE_DEVICES",
            FindingReason.CONFLICT,
        )


def check_plain_secrets(context: RuleContext) -> Iterable[Finding]:
    """Everybody who can read the RLJob or its pods reads the value."""
    for path, variable in _list_variables(context):
        if variable.value and _SECRET_NAME.search(variable.name) and variable.name not in OWNED_ENV:
            yield make_warning(
                f"{path}.value",
                f"{variable.name} looks like a secret in plain text; use valueFrom with a secretKeyRef (name and key)",
            )


ENVIRONMENT_RULES: Final[tuple[Rule, ...]] = (
    check_env_shape,
    check_owned_env,
    check_interface_env,
    check_allocator_env,
    check_stripped_env,
    check_device_env,
    check_plain_secrets,
)
