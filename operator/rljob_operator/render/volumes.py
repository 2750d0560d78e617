"""Volumes and mounts of head and worker pods: job.json, checkpoints, shared memory, and the job's own volumes."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.names import CONFIG_PATH, STORAGE_MOUNT_PATH
from rljob_api.quantity import format_bytes
from rljob_api.v1alpha1 import CheckpointStorage, Volume
from rljob_operator.render.types import make_error

CONFIG_VOLUME: Final = "rljob-config"
STORAGE_VOLUME: Final = "rljob-storage"
SHARED_MEMORY_VOLUME: Final = "shared-mem"
"""KubeRay's name for it; KubeRay adds its own, of the size of the memory limit, unless /dev/shm is mounted."""
RESERVED_VOLUMES: Final = (CONFIG_VOLUME, STORAGE_VOLUME, SHARED_MEMORY_VOLUME)


def build_volumes(
    resolved: ResolvedJob, config_map_name: str, shared_memory_bytes: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`volumes` of the pod and `volumeMounts` of its Ray container."""
    volumes: list[dict[str, Any]] = [
        {"name": CONFIG_VOLUME, "configMap": {"name": config_map_name}},
        {
            "name": SHARED_MEMORY_VOLUME,
            "emptyDir": {"medium": "Memory", "sizeLimit": format_bytes(shared_memory_bytes)},
        },
    ]
    mounts: list[dict[str, Any]] = [
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_PATH.rpartition("/")[0], "readOnly": True},
        {"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
    ]
    storage_source = _build_storage_source(resolved.spec.checkpoint.storage)
    if storage_source is not None:
        volumes.append({"name": STORAGE_VOLUME, **storage_source})
        mounts.append({"name": STORAGE_VOLUME, "mountPath": STORAGE_MOUNT_PATH})
    for volume in resolved.spec.cluster.volumes:
        if all(existing["name"] != volume.name for existing in volumes):
            volumes.append({"name": volume.name, **_build_source(volume)})
        mounts.append(_build_mount(volume))
    return volumes, mounts


def check_volumes(resolved: ResolvedJob) -> list[Finding]:
    """Refuses jobs without storage and volumes that take one of our names."""
    findings = []
    if _build_storage_source(resolved.spec.checkpoint.storage) is None:
        findings.append(
            make_error(
                "MissingField",
                "spec.checkpoint.storage",
                "pods need a place for checkpoints that outlives them; set claimName or hostPath, "
                "for example claimName: checkpoints",
            )
        )
    for index, volume in enumerate(resolved.spec.cluster.volumes):
        if volume.name in RESERVED_VOLUMES:
            findings.append(
                make_error(
                    "InvalidValue",
                    f"spec.cluster.volumes[{index}].name",
                    f"{volume.name!r} is a volume of the operator; a value that works: user-{volume.name}",
                )
            )
    return findings


def _build_storage_source(storage: CheckpointStorage) -> dict[str, Any] | None:
    if storage.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": storage.claim_name}}
    if storage.host_path is not None:
        # DirectoryOrCreate would make it as root, which the non-root trainer cannot write.
        return {"hostPath": {"path": storage.host_path, "type": "Directory"}}
    return None


def _build_source(volume: Volume) -> dict[str, Any]:
    if volume.claim_name is not None:
        # readOnly belongs to the mount alone: on the source it may make every mount of the claim in the pod read-only,
        # the checkpoints' too.
        return {"persistentVolumeClaim": {"claimName": volume.claim_name}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.config_map_name is not None:
        return {"configMap": {"name": volume.config_map_name}}
    if volume.secret_name is not None:
        return {"secret": {"secretName": volume.secret_name}}
    if volume.empty_dir is not None:
        return {"emptyDir": volume.empty_dir.model_dump(mode="json", exclude_none=True)}
    raise ValueError(f"volume {volume.name!r} has no source; set claimName, hostPath, configMapName, ... on it")


def _build_mount(volume: Volume) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.sub_path is not None:
        mount["subPath"] = volume.sub_path
    if volume.read_only:
        mount["readOnly"] = True
    return mount
