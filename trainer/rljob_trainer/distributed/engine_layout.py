"""Which GPUs make up which engine replica: pure functions over places and sizes.

A co-located replica is one tensor parallel group of consecutive ranks (ranks are numbered by node, then GPU); a
separate one has GPUs of its own. Inside one node it is one actor; over several nodes it is one actor per node, of which
the first is asked to generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rljob_api.addresses import format_host_port
from rljob_api.contract import Layout
from rljob_api.v1alpha1.rollout import Engine
from rljob_trainer.distributed.location import ActorLocation
from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.errors import ConfigurationError

FIELD = "spec.rollout.tensorParallelSize"


@dataclass(frozen=True)
class EngineSlot:
    """One engine actor: one node's share of a replica."""

    replica: int
    node_rank: int
    """0 generates; the others lend their GPUs."""
    num_nodes: int
    """Of the replica."""
    node_id: str
    address: str
    """Bare address of the node."""
    ranks: tuple[int, ...]
    """Trainer ranks whose GPUs it uses, in tensor parallel order; empty where it has GPUs of its own."""
    gpu_ids: tuple[str, ...]
    """One per tensor parallel rank; empty on CPUs."""


def check_engine_layout(engine: Engine, layout: Layout) -> None:
    """Refuse, before anything starts, what no placement can satisfy.

    Raises:
        ConfigurationError: with the field, the value and values that work.
    """
    size, per_node = layout.tensor_parallel_size, layout.engine_slots_per_node
    num_slots = layout.num_nodes * per_node
    name = "engine GPUs" if layout.engine_gpus_per_node else "ranks"
    valid = [
        candidate
        for candidate in range(1, num_slots + 1)
        if num_slots % candidate == 0 and (per_node % candidate == 0 or candidate % per_node == 0)
    ]
    if engine is Engine.NATIVE and size > 1:
        raise ConfigurationError(f"{FIELD}: Native engines hold a full copy each, got {size}; use 1, or engine: SGLang")
    if size not in valid:
        raise ConfigurationError(
            f"{FIELD}: {size} does not cut {layout.num_nodes} nodes of {per_node} {name} into engines with the same "
            f"number of {name} on each of their nodes; use one of {', '.join(map(str, valid))}"
        )
    if engine is Engine.VLLM and size > per_node:
        raise ConfigurationError(
            f"{FIELD}: vLLM replicas stay inside one node here, and {size} is more than its {per_node} {name}; use at "
            f"most {per_node}, or engine: SGLang"
        )
    if layout.num_engines * size != num_slots:
        raise ConfigurationError(
            f"layout.numEngines: {layout.num_engines} engines of {size} {name} are not {num_slots} {name}; use "
            f"{num_slots // size}"
        )


def count_engine_actors_per_node(layout: Layout) -> int:
    """Replicas of a node, or its shares of replicas over several nodes."""
    return layout.engine_slots_per_node // min(layout.tensor_parallel_size, layout.engine_slots_per_node)


def choose_engine_bundles(layout: Layout) -> list[int]:
    """Placement group bundle of each engine actor, before the places are known (bundles are node by node).

    A co-located one takes the CPU share of its first rank's bundle; the bundles of separate ones follow the ranks'.
    """
    if layout.engine_gpus_per_node:
        num_actors = layout.num_nodes * count_engine_actors_per_node(layout)
        return list(range(layout.world_size, layout.world_size + num_actors))
    step = min(layout.tensor_parallel_size, layout.ranks_per_node)
    return list(range(0, layout.world_size, step))


def plan_engines(places: Sequence[ActorLocation], tensor_parallel_size: int) -> list[EngineSlot]:
    """The engine actors, replica by replica and node by node.

    Args:
        places: of the ranks, in rank order.
        tensor_parallel_size: ranks of one replica.

    Raises:
        ConfigurationError: a replica would have different numbers of ranks on its nodes, or ranks share a GPU.
    """
    if len(places) % tensor_parallel_size:
        raise ConfigurationError(f"{FIELD}: {tensor_parallel_size} does not divide the {len(places)} ranks")
    slots: list[EngineSlot] = []
    for replica, first in enumerate(range(0, len(places), tensor_parallel_size)):
        by_node: dict[str, list[int]] = {}
        for rank in range(first, first + tensor_parallel_size):
            by_node.setdefault(places[rank].node_id, []).append(rank)
        if len({len(ranks) for ranks in by_node.values()}) > 1:
            shares = ", ".join(f"{len(ranks)} on {places[ranks[0]].address}" for ranks in by_node.values())
            raise ConfigurationError(
                f"{FIELD}: {tensor_parallel_size} gives engine {replica} different numbers of ranks on its nodes "
                f"({shares}); use a size that divides the ranks of a node, or a multiple of them"
            )
        for node_rank, ranks in enumerate(by_node.values()):
            gpu_ids = tuple(gpu for rank in ranks for gpu in places[rank].gpu_ids)
            if gpu_ids and len(set(gpu_ids)) != len(ranks):
                raise ConfigurationError(
                    f"spec.cluster.ranksPerNode: engine {replica} on {places[ranks[0]].address} has GPUs "
                    f"{', '.join(gpu_ids)} for {len(ranks)} ranks; one GPU per rank works"
                )
            slots.append(
                EngineSlot(
                    replica=replica,
                    node_rank=node_rank,
                    num_nodes=len(by_node),
                    node_id=places[ranks[0]].node_id,
                    address=places[ranks[0]].address,
                    ranks=tuple(ranks),
                    gpu_ids=gpu_ids,
                )
            )
    return slots


def plan_separate_engines(places: Sequence[ActorLocation], tensor_parallel_size: int) -> list[tuple[int, EngineSlot]]:
    """The engine actors that have GPUs of their own, replica by replica and node by node.

    Args:
        places: of the engine actors, in any order.
        tensor_parallel_size: GPUs of one replica.

    Returns:
        (index of the actor in `places`, its slot).

    Raises:
        ConfigurationError: Ray gave actors different numbers of GPUs, or two of a replica are on one node.
    """
    order = sorted(range(len(places)), key=lambda index: places[index].sort_key)
    shares = {len(places[index].gpu_ids) for index in order}
    if len(shares) != 1 or tensor_parallel_size % (share := min(shares) or 1):
        listing = "; ".join(places[index].describe("an engine") for index in order)
        raise ConfigurationError(f"{FIELD}: {tensor_parallel_size} GPUs cannot be put together from {listing}")
    num_nodes = tensor_parallel_size // share
    slots: list[tuple[int, EngineSlot]] = []
    for replica, first in enumerate(range(0, len(order), num_nodes)):
        members = order[first : first + num_nodes]
        if len({places[index].node_id for index in members}) != num_nodes:
            listing = "; ".join(places[index].describe("an engine") for index in members)
            raise ConfigurationError(f"{FIELD}: engine {replica} needs {num_nodes} nodes, but has {listing}")
        slots += [
            (
                index,
                EngineSlot(
                    replica=replica,
                    node_rank=node_rank,
                    num_nodes=num_nodes,
                    node_id=places[index].node_id,
                    address=places[index].address,
                    ranks=(),
                    gpu_ids=places[index].gpu_ids,
                ),
            )
            for node_rank, index in enumerate(members)
        ]
    return slots


def specialise_settings(settings: EngineSettings, slot: EngineSlot, head: EngineSlot, port: int) -> EngineSettings:
    """The settings of one engine actor.

    Args:
        settings: common to all.
        slot: of this actor.
        head: of the same replica's first node.
        port: free on the head's node.
    """
    return replace(
        settings,
        num_nodes=slot.num_nodes,
        node_rank=slot.node_rank,
        rendezvous=format_host_port(head.address, port) if slot.num_nodes > 1 else None,
        host=slot.address,
        visible_devices=slot.gpu_ids or None,
    )
