"""CPU, memory, GPUs and shared memory of head and worker pods."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.v1alpha1 import ContainerResources
from rljob_operator.render.names import ROLE_HEAD
from rljob_operator.render.quantity import parse_bytes
from rljob_operator.render.types import make_error

RAY_MIN_OBJECT_STORE_BYTES: Final = 80 * 1024**2
"""Ray refuses an object store below 75 MiB."""
_MAX_HEAD_SHARED_MEMORY_BYTES: Final = 2 * 1024**3


def select_resources(resolved: ResolvedJob, role: str) -> ContainerResources:
    """The spec's resources of the role."""
    cluster = resolved.spec.cluster
    return cluster.head_resources if role == ROLE_HEAD else cluster.worker_resources


def build_resources(resolved: ResolvedJob, role: str) -> dict[str, dict[str, str]]:
    """Requests equal limits: GPUs demand it, and a burstable rank is killed first under memory pressure."""
    resources = select_resources(resolved, role)
    amounts: dict[str, str] = {}
    if resources.cpu is not None:
        amounts["cpu"] = resources.cpu
    if resources.memory is not None:
        amounts["memory"] = resources.memory
    if resources.ephemeral_storage is not None:
        amounts["ephemeral-storage"] = resources.ephemeral_storage
    if role != ROLE_HEAD and resolved.layout.gpus_per_node > 0:
        amounts[resolved.spec.cluster.gpu_resource_name] = str(resolved.layout.gpus_per_node)
    return {"limits": dict(amounts), "requests": dict(amounts)}


def compute_shared_memory_bytes(resolved: ResolvedJob, role: str) -> int:
    """Size of /dev/shm: the spec's for workers; a quarter of the memory, at most 2 GiB, for the head."""
    if role != ROLE_HEAD:
        return parse_bytes(_require(resolved.spec.cluster.shared_memory))
    return min(parse_bytes(_require(resolved.spec.cluster.head_resources.memory)) // 4, _MAX_HEAD_SHARED_MEMORY_BYTES)


def compute_object_store_bytes(shared_memory_bytes: int) -> int:
    """Half of /dev/shm for Ray's object store; NCCL, data loaders and engines need the rest.

    Pinned, since Ray would otherwise take 30 % of the memory and fall back to disk when /dev/shm is smaller.
    """
    return max(shared_memory_bytes // 2, RAY_MIN_OBJECT_STORE_BYTES)


def check_resources(resolved: ResolvedJob) -> list[Finding]:
    """Refuses unresolved resources and a /dev/shm that cannot hold Ray's smallest object store."""
    cluster = resolved.spec.cluster
    required = {
        "spec.cluster.image": (cluster.image, "ghcr.io/rljob/trainer-native:0.1.0"),
        "spec.cluster.rayVersion": (cluster.ray_version, "2.60.0"),
        "spec.cluster.headResources.cpu": (cluster.head_resources.cpu, "2"),
        "spec.cluster.headResources.memory": (cluster.head_resources.memory, "8Gi"),
        "spec.cluster.workerResources.cpu": (cluster.worker_resources.cpu, "12"),
        "spec.cluster.workerResources.memory": (cluster.worker_resources.memory, "128Gi"),
        "spec.cluster.sharedMemory": (cluster.shared_memory, "32Gi"),
    }
    findings = [
        make_error("MissingField", path, f"is not resolved and has no default here; a value that works: {example}")
        for path, (value, example) in required.items()
        if value is None
    ]
    if cluster.head_resources.memory is not None:
        findings += _check_shared_memory(
            "spec.cluster.headResources.memory", compute_shared_memory_bytes(resolved, ROLE_HEAD), "2Gi"
        )
    if cluster.shared_memory is not None:
        findings += _check_shared_memory("spec.cluster.sharedMemory", parse_bytes(cluster.shared_memory), "1Gi")
    return findings


def check_gpu_resources(container: dict[str, Any], gpu_resource_name: str, num_gpus: int, path: str) -> list[Finding]:
    """The pod template may not change the GPUs the layout was computed from (nor split requests and limits)."""
    resources = container.get("resources") or {}
    findings = []
    for kind in ("limits", "requests"):
        amount = (resources.get(kind) or {}).get(gpu_resource_name, 0)
        if str(amount) != str(num_gpus):
            findings.append(
                make_error(
                    "GPUsDisagree",
                    f"{path}.resources.{kind}[{gpu_resource_name}]",
                    f"{amount} does not equal the {num_gpus} GPUs of this pod; set spec.cluster.gpusPerNode "
                    "and leave GPUs out of the template",
                )
            )
    return findings


def _check_shared_memory(path: str, shared_memory_bytes: int, example: str) -> list[Finding]:
    if shared_memory_bytes >= RAY_MIN_OBJECT_STORE_BYTES:
        return []
    return [
        make_error(
            "InvalidValue",
            path,
            f"leaves {shared_memory_bytes // 1024**2} MiB for /dev/shm, Ray's object store alone needs "
            f"{RAY_MIN_OBJECT_STORE_BYTES // 1024**2} MiB; a value that works: {example}",
        )
    ]


def _require(quantity: str | None) -> str:
    if quantity is None:
        raise ValueError("resources are not resolved; check_resources names the field")
    return quantity
