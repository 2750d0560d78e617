"""Rules about nodes, resources and shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.quantity import format_bytes, parse_quantity
from rljob_api.resolve import resolve_resources
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.targets import Target
from rljob_api.v1alpha1.cluster import ContainerResources, Fabric

_ALIAS_OF_RESOURCE: Final = {"cpu": "cpu", "memory": "memory", "ephemeral_storage": "ephemeralStorage"}
_MIN_MEMORY_BYTES: Final = 512 * 1024**2


def check_local_nodes(context: RuleContext) -> Iterable[Finding]:
    """A local run has one machine."""
    nodes = context.spec.cluster.nodes
    if context.target is Target.LOCAL and nodes > 1:
        yield make_error(
            "spec.cluster.nodes",
            f"{nodes} nodes need a cluster; a local run has one: use --set cluster.nodes=1, or kubectl apply",
            FindingReason.CONFLICT,
        )


def check_resources(context: RuleContext) -> Iterable[Finding]:
    """No empty requests; memory with its unit (`memory: 16` is 16 bytes)."""
    cluster = context.spec.cluster
    for section, resources in (
        ("headResources", cluster.head_resources),
        ("workerResources", cluster.worker_resources),
    ):
        yield from _check_amounts(f"spec.cluster.{section}", resources)
    if cluster.shared_memory is not None and parse_quantity(cluster.shared_memory) < 1024**2:
        yield make_error("spec.cluster.sharedMemory", f"{cluster.shared_memory} is less than 1Mi; for example 16Gi")


def _check_amounts(path: str, resources: ContainerResources) -> Iterable[Finding]:
    for name, alias in _ALIAS_OF_RESOURCE.items():
        text = getattr(resources, name)
        if text is None:
            continue
        amount = parse_quantity(text)
        if amount == 0:
            yield make_error(f"{path}.{alias}", f"{text!r} must be more than 0; for example {_example(name)}")
        elif name == "memory" and amount < _MIN_MEMORY_BYTES:
            yield make_error(
                f"{path}.memory",
                f"{text!r} is {int(amount)} bytes, Ray alone needs 512Mi; for example {_example(name)}",
            )


def _example(name: str) -> str:
    return {"cpu": "4", "memory": "16Gi"}.get(name, "50Gi")


def check_memory_backed_volumes(context: RuleContext) -> Iterable[Finding]:
    """Pages of a memory emptyDir count against the container that writes them (kubernetes #76263)."""
    if context.target is Target.LOCAL or context.ranks_per_node == 0:
        return
    cluster = resolve_resources(context.spec.cluster)
    memory = parse_quantity(cluster.worker_resources.memory or "0")
    shared = parse_quantity(cluster.shared_memory or "0")
    parts = [f"/dev/shm {cluster.shared_memory}"]
    for volume in cluster.volumes:
        if volume.empty_dir is not None and volume.empty_dir.medium == "Memory" and volume.empty_dir.size_limit:
            shared += parse_quantity(volume.empty_dir.size_limit)
            parts.append(f"{volume.mount_path} {volume.empty_dir.size_limit}")
    if memory == 0 or shared * 2 <= memory:
        return
    limit = format_bytes(memory / 2)
    message = (
        f"memory-backed volumes ({', '.join(parts)}) can fill {float(shared / memory):.0%} of a worker's "
        f"{cluster.worker_resources.memory} memory, which they count against"
    )
    if shared >= memory:
        yield make_error(
            "spec.cluster.sharedMemory", f"{message}; keep their sum under {limit}", FindingReason.CONFLICT
        )
    else:
        yield make_warning("spec.cluster.sharedMemory", f"{message}; a sum of {limit} or less leaves room for the rest")


def check_fabric(context: RuleContext) -> Iterable[Finding]:
    """One node has no interconnect."""
    network, nodes = context.spec.network, context.spec.cluster.nodes
    if nodes == 1 and network.fabric not in (Fabric.AUTO, Fabric.TCP):
        yield make_warning(
            "spec.network.fabric",
            f"{network.fabric} has no effect with one node; use Auto",
            FindingReason.NO_EFFECT,
        )


CLUSTER_RULES: Final[tuple[Rule, ...]] = (
    check_local_nodes,
    check_resources,
    check_memory_backed_volumes,
    check_fabric,
)
