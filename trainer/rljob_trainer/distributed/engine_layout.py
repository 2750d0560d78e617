"""Which ranks' GPUs make up which engine replica: pure functions over places and sizes.

A replica is one tensor parallel group of consecutive ranks (ranks are numbered by node, then GPU). Inside one node it
is one actor; over several nodes it is one actor per node, of which the first is asked to generate.
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
    """Trainer ranks whose GPUs it uses, in tensor parallel order."""
    gpu_ids: tuple[str, ...]
    """One per rank; empty on CPUs."""


def check_engine_layout(engine: Engine, layout: Layout) -> None:
    """Refuse, before anything starts, what no placement can satisfy.

    Raises:
        ConfigurationError: with the field, the value and values that work.
    """
    size, ranks, world_size = layout.tensor_parallel_size, layout.ranks_per_node, layout.world_size
    valid = [
        candidate
        for candidate in range(1, world_size + 1)
        if world_size % candidate == 0 and (ranks % candidate == 0 or candidate % ranks == 0)
    ]
    if engine is Engine.NATIVE and size > 1:
        raise ConfigurationError(f"{FIELD}: Native engines hold a full copy each, got {size}; use 1, or engine: SGLang")
    if size not in valid:
        raise ConfigurationError(
            f"{FIELD}: {size} does not cut {layout.num_nodes} nodes of {ranks} ranks into engines with the same number "
            f"of ranks on each of their nodes; use one of {', '.join(map(str, valid))}"
        )
    if engine is Engine.VLLM and size > ranks:
        raise ConfigurationError(
            f"{FIELD}: vLLM replicas stay inside one node here, and {size} is more than its {ranks} ranks; use at most "
            f"{ranks}, or engine: SGLang"
        )
    if layout.num_engines * size != world_size:
        raise ConfigurationError(
            f"layout.numEngines: {layout.num_engines} engines of {size} ranks are not {world_size} ranks; use "
            f"{world_size // size}"
        )


def choose_engine_bundles(layout: Layout) -> list[int]:
    """Placement group bundle of each engine actor, before the places are known (bundles are node by node).

    Each takes the CPU share of its first rank's bundle.
    """
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
