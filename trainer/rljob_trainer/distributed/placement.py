"""Which nodes ranks and engines run on: a pure choice over Ray's node table, then one placement group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rljob_api.contract import Layout
from rljob_trainer.distributed.engine_layout import count_engine_actors_per_node
from rljob_trainer.errors import TransientError

RESOURCE_DEADLINE_SECONDS: Final = 50.0
PLACEMENT_DEADLINE_SECONDS: Final = 60.0
CPUS_PER_RANK: Final = 1.0
"""Of the bundle. Trainer and engine of a rank take turns, so each gets half; reward workers take none."""
CPUS_PER_ENGINE: Final = CPUS_PER_RANK / 2
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
    if layout.engine_gpus_per_node:
        needed_cpus += count_engine_actors_per_node(layout) * CPUS_PER_ENGINE
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


@dataclass(frozen=True)
class Bundle:
    """What one actor (or a rank and its co-located engine) needs of a node."""

    node: NodeResources
    resources: dict[str, float]


def plan_bundles(nodes: Sequence[NodeResources], layout: Layout) -> list[Bundle]:
    """One bundle per rank, node by node; then one per separate engine actor with its share of GPUs, node by node."""
    rank = {"CPU": CPUS_PER_RANK} | ({"GPU": 1.0} if layout.gpus_per_node else {})
    bundles = [Bundle(node, rank) for node in nodes for _ in range(layout.ranks_per_node)]
    if layout.engine_gpus_per_node:
        num_actors = count_engine_actors_per_node(layout)
        engine = {"CPU": CPUS_PER_ENGINE, "GPU": float(layout.engine_gpus_per_node // num_actors)}
        bundles += [Bundle(node, engine) for node in nodes for _ in range(num_actors)]
    return bundles


def reserve_bundles(bundles: Sequence[Bundle]) -> PlacementGroup:
    """Each pinned to its node.

    Raises:
        TransientError: Ray cannot reserve them in time (something else holds the resources).
    """
    group = placement_group(
        [dict(bundle.resources) for bundle in bundles],
        strategy="PACK",
        bundle_label_selector=[{NODE_ID_LABEL: bundle.node.node_id} for bundle in bundles],
    )
    if not group.wait(PLACEMENT_DEADLINE_SECONDS):
        remove_placement_group(group)
        available = ray.available_resources()
        wanted = {name: sum(bundle.resources.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
        addresses = dict.fromkeys(bundle.node.address for bundle in bundles)
        raise TransientError(
            f"Ray did not reserve {len(bundles)} bundles with {wanted['CPU']:g} CPUs and {wanted['GPU']:g} GPUs in all "
            f"on {', '.join(addresses)} within {PLACEMENT_DEADLINE_SECONDS:.0f} s; free now: "
            f"{available.get('CPU', 0):g} CPUs, {available.get('GPU', 0):g} GPUs"
        )
    return group
