"""What a user's pod template patch may not do, and what is worth a warning."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.findings import Finding
from rljob_api.names import LABEL_CLUSTER_GENERATION, LABEL_JOB, LABEL_JOB_UID
from rljob_api.rules.environment import OWNED_ENV, OWNED_ENV_PREFIX
from rljob_operator.render.names import RAY_CONTAINER
from rljob_operator.render.types import make_error, make_warning

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
    known = {container["name"] for container in template["spec"]["containers"]}
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
