"""What a user's pod template patch may not do, and what is worth a warning."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.findings import Finding
from rljob_api.names import LABEL_CLUSTER_GENERATION, LABEL_JOB, LABEL_JOB_UID
from rljob_api.rules.environment import OWNED_ENV, OWNED_ENV_PREFIX
from rljob_operator.render.names import RAY_CONTAINER
from rljob_operator.render.types import make_error, make_warning
from rljob_operator.render.volumes import RESERVED_VOLUMES

_TEMPLATE_KEYS: Final = ("metadata", "spec")
_METADATA_KEYS: Final = ("labels", "annotations")
_KUBERAY_LABELS: Final = (
    "ray.io/cluster",
    "ray.io/node-type",
    "ray.io/group",
    "ray.io/identifier",
    "ray.io/is-ray-node",
    "app.kubernetes.io/name",
    "app.kubernetes.io/created-by",
)
"""KubeRay finds its pods and the head Service its head by these."""
_JOB_SCOPED_LABELS: Final = frozenset({"ray.io/cluster", LABEL_JOB, LABEL_JOB_UID, LABEL_CLUSTER_GENERATION})
_OWNED_POD_FIELDS: Final = {
    "restartPolicy": "a restarted Ray container keeps stale shared memory and hides the failure; leave it Never",
    "enableServiceLinks": "service links collide with engine variables (VLLM_PORT, SGLANG_PORT); leave it false",
    "terminationGracePeriodSeconds": "set spec.cluster.terminationGracePeriodSeconds, which the checkpoint hook knows",
}


def check_patch(patch: dict[str, Any], template: dict[str, Any], path: str) -> list[Finding]:
    """Problems of one patch against the template it is merged over."""
    findings = [
        make_error(
            "UnknownField",
            f"{path}.{key}",
            f"a pod template has metadata and spec only; write it as {path}.spec.{key} if it is a field of the pod",
        )
        for key in patch
        if key not in _TEMPLATE_KEYS
    ]
    findings += [
        make_error("InvalidType", f"{path}.{key}", f"{patch[key]!r} is not a mapping")
        for key in _TEMPLATE_KEYS
        if key in patch and not isinstance(patch[key], dict)
    ]
    if findings:
        return findings
    known = {container["name"] for container in template["spec"].get("containers") or []}
    containers = patch.get("spec", {}).get("containers")
    for index, container in enumerate(containers if isinstance(containers, list) else []):
        name = container.get("name") if isinstance(container, dict) else None
        if name is not None and name not in known and not container.get("image"):
            findings.append(
                make_error(
                    "InvalidValue",
                    f"{path}.spec.containers[{index}].name",
                    f"{name!r} is a new container without an image; the Ray container is called {RAY_CONTAINER!r}",
                )
            )
        if name == RAY_CONTAINER:
            findings += _check_reserved_env(container, f"{path}.spec.containers[{index}].env")
    return findings


def _check_reserved_env(container: dict[str, Any], path: str) -> list[Finding]:
    """What `spec.cluster.env` may not set, a template may not either."""
    env = container.get("env")
    findings = []
    for index, entry in enumerate(env if isinstance(env, list) else []):
        name = str(entry.get("name", "")) if isinstance(entry, dict) else ""
        if name in OWNED_ENV or name.startswith(OWNED_ENV_PREFIX):
            why = OWNED_ENV.get(name, f"names that begin with {OWNED_ENV_PREFIX} belong to the operator")
            findings.append(make_error("Reserved", f"{path}[{index}].name", f"{name}: {why}; remove it"))
    return findings


def drop_unusable_metadata(
    patch: dict[str, Any], owned_labels: dict[str, str], path: str
) -> tuple[dict[str, Any], list[Finding]]:
    """The patch without a fixed name (many pods share the template) and without labels others own."""
    metadata = patch.get("metadata")
    if not isinstance(metadata, dict):
        return patch, []
    findings: list[Finding] = []
    kept: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in _METADATA_KEYS:
            kept[key] = value
        else:
            findings.append(
                make_warning(
                    "FieldDropped",
                    f"{path}.metadata.{key}",
                    f"{value!r} is dropped: KubeRay names the pods; labels and annotations are kept",
                )
            )
    labels = kept.get("labels")
    if isinstance(labels, dict):
        kept["labels"] = {}
        for label, value in labels.items():
            if label in owned_labels or label in _KUBERAY_LABELS:
                findings.append(
                    make_warning(
                        "FieldDropped",
                        f"{path}.metadata.labels[{label}]",
                        f"{value!r} is dropped: the operator or KubeRay selects pods by this label",
                    )
                )
            else:
                kept["labels"][label] = value
    return {**patch, "metadata": kept}, findings


def restore_metadata(template: dict[str, Any], base: dict[str, Any], path: str) -> list[Finding]:
    """Put back, in place, what a null in the place of a whole mapping has removed.

    Labels are the operator's; an annotation may be removed, but by its name: an empty `annotations:` would take the
    protection against eviction along.
    """
    findings = []
    for field in _METADATA_KEYS:
        ours, merged = base["metadata"][field], template["metadata"].get(field)
        absent = [key for key in ours if key not in (merged or {})] if field == "labels" or merged is None else []
        if absent:
            template["metadata"][field] = {**ours, **(merged or {})}
            advice = "the operator selects pods by them" if field == "labels" else "name the one that is to be removed"
            message = f"null is dropped, it would remove {', '.join(absent)}: {advice}"
            findings.append(make_warning("FieldDropped", f"{path}.metadata.{field}", message))
    return findings


def restore_volumes(template: dict[str, Any], base: dict[str, Any], path: str) -> list[Finding]:
    """Put back, in place, the operator's volumes and their mounts in the Ray container that a patch has removed.

    Another volume at one of our mount paths is the user's choice (a larger /dev/shm); none at all is a mistake: without
    job.json the trainer does not start, without the storage its checkpoints die with the pod.
    """
    spec, container = template["spec"], template["spec"]["containers"][0]
    base_container = base["spec"]["containers"][0]
    findings = []
    ours = {m["mountPath"]: m for m in base_container["volumeMounts"] if m["name"] in RESERVED_VOLUMES}
    # A mount without a volume, or a volume without a source, is one that a null inside it has emptied.
    mounts = [m for m in container.get("volumeMounts") or [] if m.get("name") or m["mountPath"] not in ours]
    left = {mount["mountPath"] for mount in mounts}
    if absent := [mount for mount_path, mount in ours.items() if mount_path not in left]:
        container["volumeMounts"] = absent + mounts
        names = ", ".join(mount["mountPath"] for mount in absent)
        field = f"{path}.spec.containers[{RAY_CONTAINER}].volumeMounts"
        findings.append(make_warning("FieldDropped", field, f"removes {names}: put back, the trainer needs them"))
    used = {mount.get("name") for mount in container["volumeMounts"]}
    needed = {volume["name"]: volume for volume in base["spec"]["volumes"] if volume["name"] in used}
    volumes = [v for v in spec.get("volumes") or [] if v.keys() - {"name"} or v["name"] not in needed]
    left = {volume["name"] for volume in volumes}
    if absent := [volume for name, volume in needed.items() if name not in left]:
        spec["volumes"] = absent + volumes
        names = ", ".join(volume["name"] for volume in absent)
        message = f"removes {names}: put back, the Ray container mounts them"
        findings.append(make_warning("FieldDropped", f"{path}.spec.volumes", message))
    return findings


def check_merged_template(template: dict[str, Any], base: dict[str, Any], path: str) -> list[Finding]:
    """Problems of the final template compared with ours."""
    spec, base_spec = template["spec"], base["spec"]
    findings: list[Finding] = []
    containers = spec.get("containers") or []
    if not containers or containers[0].get("name") != RAY_CONTAINER:
        return [
            make_error(
                "InvalidValue",
                f"{path}.spec.containers",
                f"the Ray container {RAY_CONTAINER!r} must stay the first; do not delete it",
            )
        ]
    for field, advice in _OWNED_POD_FIELDS.items():
        if spec.get(field) != base_spec[field]:
            findings.append(
                make_warning("TemplateConflict", f"{path}.spec.{field}", f"{spec.get(field)!r} replaces ours: {advice}")
            )
    ray, base_ray = containers[0], base_spec["containers"][0]
    if ray.get("lifecycle") != base_ray.get("lifecycle"):
        findings.append(
            make_warning(
                "TemplateConflict",
                f"{path}.spec.containers[{RAY_CONTAINER}].lifecycle",
                "is passed unchanged and differs from ours: without our preStop hook an evicted pod takes the steps "
                "since the last checkpoint with it",
            )
        )
    if spec.get("hostNetwork"):
        findings.append(
            make_warning(
                "TemplateConflict",
                f"{path}.spec.hostNetwork",
                "Ray's ports are then the node's: every pod of the job needs a node of its own",
            )
        )
    for kind in ("requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"):
        rules = ((spec.get("affinity") or {}).get("podAntiAffinity") or {}).get(kind) or []
        for index, rule in enumerate(rules):
            selector = rule.get("podAffinityTerm", rule).get("labelSelector") or {}
            labels = set(selector.get("matchLabels") or {}) | {
                expression.get("key") for expression in selector.get("matchExpressions") or []
            }
            if labels and not labels & _JOB_SCOPED_LABELS and any(label.startswith("ray.io/") for label in labels):
                findings.append(
                    make_warning(
                        "AntiAffinityNotScopedToJob",
                        f"{path}.spec.affinity.podAntiAffinity.{kind}[{index}]",
                        f"selects the Ray pods of every job in the namespace; add {LABEL_JOB} to the selector",
                    )
                )
    return findings
