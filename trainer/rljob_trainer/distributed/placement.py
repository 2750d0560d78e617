"""Which nodes the ranks run on: a pure choice over Ray's node table, then one placement group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rljob_api.contract import Layout
from rljob_trainer.errors import TransientError

RESOURCE_DEADLINE_SECONDS: Final = 50.0
PLACEMENT_DEADLINE_SECONDS: Final = 60.0
CPUS_PER_RANK: Final = 1.0
"""Of the bundle. Trainer and engine of a rank take turns, so each gets half; reward workers take none."""
NODE_ID_LABEL: Final = "ray.io/node-id"


@dataclass(frozen=True)
class NodeResources:
    """One alive Ray node."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: float


def read_nodes(table: Sequence[Mapping[str, Any]]) -> list[NodeResources]:
    """Alive nodes of `ray.nodes()`, by address."""
    nodes = [
        NodeResources(
            node_id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            num_cpus=float(entry["Resources"].get("CPU", 0)),
            num_gpus=float(entry["Resources"].get("GPU", 0)),
        )
        for entry in table
        if entry["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.node_id))


def choose_nodes(nodes: Sequence[NodeResources], layout: Layout) -> list[NodeResources] | str:
    """The nodes to use, or what is missing: both numbers, and every node with what it has.

    A head without CPUs and GPUs fits no rank and is left out by itself.
    """
    needed_cpus = layout.ranks_per_node * CPUS_PER_RANK
    fitting = [node for node in nodes if node.num_cpus >= needed_cpus and node.num_gpus >= layout.gpus_per_node]
    if len(fitting) >= layout.num_nodes:
        # Nodes with GPUs are for jobs with GPUs.
        return sorted(fitting, key=lambda node: (node.num_gpus, node.address))[: layout.num_nodes]
    listing = "; ".join(f"{node.address}: {node.num_cpus:g} CPUs, {node.num_gpus:g} GPUs" for node in nodes)
    return (
        f"the job needs {layout.num_nodes} nodes with {layout.gpus_per_node} GPUs and {needed_cpus:g} CPUs each "
        f"({layout.num_nodes * layout.gpus_per_node} GPUs in all); Ray has {len(fitting)} such nodes and "
        f"{sum(node.num_gpus for node in nodes):g} GPUs in all ({listing or 'no nodes'})"
    )


def wait_for_nodes(layout: Layout) -> list[NodeResources]:
    """Poll Ray's node table until the job fits.

    Raises:
        TransientError: it does not within a minute.
    """
    deadline = time.monotonic() + RESOURCE_DEADLINE_SECONDS
    while True:
        chosen = choose_nodes(read_nodes(ray.nodes()), layout)
        if not isinstance(chosen, str):
            return chosen
        if time.monotonic() > deadline:
            raise TransientError(f"after {RESOURCE_DEADLINE_SECONDS:.0f} s {chosen}")
        time.sleep(1.0)


def reserve_ranks(nodes: Sequence[NodeResources], layout: Layout) -> PlacementGroup:
    """One bundle per rank, pinned to the chosen nodes in order.

    Raises:
        TransientError: Ray cannot reserve them in time (something else holds the resources).
    """
    bundle: dict[str, float] = {"CPU": CPUS_PER_RANK}
    if layout.gpus_per_node:
        bundle["GPU"] = layout.gpus_per_node / layout.ranks_per_node
    owners = [node for node in nodes for _ in range(layout.ranks_per_node)]
    group = placement_group(
        [dict(bundle) for _ in owners],
        strategy="PACK",
        bundle_label_selector=[{NODE_ID_LABEL: node.node_id} for node in owners],
    )
    if not group.wait(PLACEMENT_DEADLINE_SECONDS):
        remove_placement_group(group)
        available = ray.available_resources()
        raise TransientError(
            f"Ray did not reserve {len(owners)} bundles of {bundle} on {', '.join(node.address for node in nodes)} "
            "within "
            f"{PLACEMENT_DEADLINE_SECONDS:.0f} s; free now: {available.get('CPU', 0):g} CPUs, "
            f"{available.get('GPU', 0):g} GPUs"
        )
    return group
