"""Rules about volumes and pod templates."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.names import CONFIG_PATH, RESERVED_VOLUME_PREFIX, STORAGE_MOUNT_PATH
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.v1alpha1.cluster import Volume

RESERVED_MOUNT_PATHS: Final = (posixpath.dirname(CONFIG_PATH), STORAGE_MOUNT_PATH, "/dev/shm", "/tmp/ray")
KUBERAY_VOLUME_NAMES: Final = frozenset({"ray-logs", "shared-mem", "log-volume"})
_SOURCES: Final = {
    "claim_name": "claimName",
    "host_path": "hostPath",
    "config_map_name": "configMapName",
    "secret_name": "secretName",
    "empty_dir": "emptyDir",
}
_POD_TEMPLATES: Final = {
    "podTemplate": "pod_template",
    "headPodTemplate": "head_pod_template",
    "workerPodTemplate": "worker_pod_template",
}
_POD_SPEC_KEYS: Final = frozenset(
    {"nodeSelector", "tolerations", "affinity", "containers", "initContainers", "volumes", "securityContext"}
    | {"priorityClassName", "runtimeClassName", "schedulerName", "topologySpreadConstraints", "hostNetwork"}
    | {"imagePullSecrets", "serviceAccountName", "terminationGracePeriodSeconds", "dnsPolicy", "nodeName"}
)


def check_volume_sources(context: RuleContext) -> Iterable[Finding]:
    """Exactly one source per volume; memory has a limit."""
    for index, volume in enumerate(context.spec.cluster.volumes):
        path = f"spec.cluster.volumes[{index}]"
        sources = [alias for name, alias in _SOURCES.items() if getattr(volume, name) is not None]
        if not sources:
            yield make_error(
                path,
                f"{volume.name!r} has no source, exactly one of {', '.join(_SOURCES.values())} is required; for "
                "example claimName: datasets",
                FindingReason.MISSING_FIELD,
            )
        if len(sources) > 1:
            yield make_error(
                path,
                f"{volume.name!r} has {' and '.join(sources)}, which exclude each other; keep {sources[0]}",
                FindingReason.CONFLICT,
            )
        if volume.empty_dir is not None and volume.empty_dir.medium == "Memory" and not volume.empty_dir.size_limit:
            yield make_error(
                f"{path}.emptyDir.sizeLimit",
                "required for medium Memory, whose pages count against the pod's memory; for example 8Gi",
                FindingReason.MISSING_FIELD,
            )


def check_volume_names(context: RuleContext) -> Iterable[Finding]:
    """Names and mount paths are unique and not the operator's."""
    volumes = context.spec.cluster.volumes
    for index, volume in enumerate(volumes):
        path = f"spec.cluster.volumes[{index}]"
        if any(other.name == volume.name for other in volumes[:index]):
            yield make_error(
                f"{path}.name", f"{volume.name!r} is used twice; for example {volume.name}-2", FindingReason.CONFLICT
            )
        if volume.name.startswith(RESERVED_VOLUME_PREFIX) or volume.name in KUBERAY_VOLUME_NAMES:
            yield make_error(
                f"{path}.name", f"{volume.name!r} belongs to the operator; for example data", FindingReason.RESERVED
            )
        yield from _check_mount_path(path, volume, volumes[:index])


def _check_mount_path(path: str, volume: Volume, earlier: list[Volume]) -> Iterable[Finding]:
    mount = posixpath.normpath(volume.mount_path)
    if ".." in volume.mount_path.split("/") or mount == "/" or ":" in mount:
        yield make_error(
            f"{path}.mountPath",
            f"{volume.mount_path!r} must be a directory other than /, without .. and colons; for example /data",
        )
    for reserved in RESERVED_MOUNT_PATHS:
        if mount == reserved or mount.startswith(f"{reserved}/"):
            yield make_error(
                f"{path}.mountPath",
                f"{volume.mount_path!r}: {reserved} belongs to the operator; for example /data",
                FindingReason.RESERVED,
            )
    if any(posixpath.normpath(other.mount_path) == mount for other in earlier):
        yield make_error(
            f"{path}.mountPath",
            f"{volume.mount_path!r} is used twice; for example {mount}-2",
            FindingReason.CONFLICT,
        )
    if volume.sub_path is not None and (volume.sub_path.startswith("/") or ".." in volume.sub_path.split("/")):
        yield make_error(
            f"{path}.subPath", f"{volume.sub_path!r} must be relative and without ..; for example datasets/gsm8k"
        )


def check_pod_templates(context: RuleContext) -> Iterable[Finding]:
    """A merge patch over a PodTemplateSpec: metadata and spec, nothing one level too high (ray #50298)."""
    for alias, name in _POD_TEMPLATES.items():
        template: Mapping[str, Any] = getattr(context.spec.cluster, name)
        path = f"spec.cluster.{alias}"
        for key in template:
            if key in ("metadata", "spec"):
                continue
            hint = f"move it to {path}.spec.{key}" if key in _POD_SPEC_KEYS else "only metadata and spec are known"
            yield make_error(f"{path}.{key}", f"unknown field; {hint}", FindingReason.UNKNOWN_FIELD)
        yield from _check_pod_patch(path, template)


def _check_pod_patch(path: str, template: Mapping[str, Any]) -> Iterable[Finding]:
    for part in ("metadata", "spec"):
        if part in template and not isinstance(template[part], Mapping):
            yield make_error(f"{path}.{part}", "must be a mapping, as in a Pod", FindingReason.INVALID_TYPE)
            return
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    if "name" in metadata:
        yield make_warning(
            f"{path}.metadata.name",
            f"{metadata['name']!r} is left out: one name for several pods admits only one of them; use labels",
            FindingReason.NO_EFFECT,
        )
    if spec.get("hostNetwork") is True:
        yield make_warning(
            f"{path}.spec.hostNetwork",
            "true puts all ports of Ray on the node: two pods of any Ray cluster on one node collide; leave it out, "
            "or keep one pod per node by anti-affinity",
        )
    for kind in ("containers", "initContainers"):
        containers = spec.get(kind, [])
        if not isinstance(containers, list):
            yield make_error(f"{path}.spec.{kind}", "must be a list, as in a Pod", FindingReason.INVALID_TYPE)
            continue
        for index, container in enumerate(containers):
            where = f"{path}.spec.{kind}[{index}]"
            if not isinstance(container, Mapping) or not container.get("name"):
                yield make_error(
                    f"{where}.name",
                    "required, containers are merged by name; the Ray container of head and workers is called ray",
                    FindingReason.MISSING_FIELD,
                )
            else:
                yield from _check_extended_resources(where, container)


def _check_extended_resources(path: str, container: Mapping[str, Any]) -> Iterable[Finding]:
    """Extended resources cannot be overcommitted: the pods would be refused again and again (device plugin #154)."""
    resources = container.get("resources")
    if not isinstance(resources, Mapping):
        return
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    if not isinstance(requests, Mapping) or not isinstance(limits, Mapping):
        yield make_error(f"{path}.resources", "requests and limits must be mappings", FindingReason.INVALID_TYPE)
        return
    for name, amount in requests.items():
        if "/" in name and not str(name).startswith("kubernetes.io/") and str(limits.get(name)) != str(amount):
            yield make_error(
                f"{path}.resources.requests.{name}",
                f"{amount} must equal the limit ({limits.get(name, 'absent')}); use spec.cluster.gpusPerNode for GPUs",
                FindingReason.CONFLICT,
            )


def check_env_sources(context: RuleContext) -> Iterable[Finding]:
    """envFrom entries name one ConfigMap or Secret."""
    for index, entry in enumerate(context.spec.cluster.env_from):
        sources = [key for key in ("configMapRef", "secretRef") if key in entry]
        path = f"spec.cluster.envFrom[{index}]"
        unknown = [key for key in entry if key not in ("configMapRef", "secretRef", "prefix")]
        if len(sources) != 1 or unknown:
            yield make_error(
                path,
                f"has {', '.join(entry) or 'nothing'}; exactly one of configMapRef and secretRef is required (prefix "
                "is optional); for example secretRef: {name: hf-token}",
            )
            continue
        reference = entry[sources[0]]
        if not isinstance(reference, Mapping) or not reference.get("name"):
            yield make_error(f"{path}.{sources[0]}.name", "required; for example hf-token", FindingReason.MISSING_FIELD)


POD_RULES: Final[tuple[Rule, ...]] = (
    check_volume_sources,
    check_volume_names,
    check_pod_templates,
    check_env_sources,
)
