"""Which rank gives which engine its weights: a pure function over places.

Weights never leave their node. A co-located tensor parallel rank takes them from the trainer's rank on the same GPU, a
separate one from a rank that writes its copy to the engine's GPU; on CPUs one copy serves all engines of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_trainer.distributed.engine_layout import EngineSlot
from rljob_trainer.distributed.location import ActorLocation


@dataclass(frozen=True, order=True)
class WeightSource:
    """Where one tensor parallel rank of an engine finds each bucket."""

    rank: int
    """Trainer rank that builds it."""
    device_index: int = 0
    """Among the GPUs that the rank sees: 0 is its own, the others are those of engines."""


@dataclass(frozen=True)
class SourcePlan:
    """Sources of all engines, and what ranks must see for them."""

    by_engine: list[list[WeightSource]]
    """Per replica, in tensor parallel order; one for the whole replica on CPUs."""
    engine_gpus: list[tuple[str, ...]]
    """Per rank, the GPUs of engines that it writes to: its devices 1, 2, ..."""


def plan_weight_sources(places: Sequence[ActorLocation], slots: Sequence[EngineSlot]) -> SourcePlan:
    """
    Args:
        places: of the ranks, in rank order.
        slots: of the engine actors, replica by replica and node by node.
    """
    ranks_of_node: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of_node.setdefault(place.node_id, []).append(rank)
    by_engine: list[list[WeightSource]] = []
    engine_gpus: list[list[str]] = [[] for _ in places]
    num_written: dict[str, int] = {}
    for slot in slots:
        if slot.node_rank == 0:
            by_engine.append([])
        sources, ranks = by_engine[-1], ranks_of_node[slot.node_id]
        if not slot.gpu_ids:
            if slot.node_rank == 0:
                sources.append(WeightSource(ranks[0]))
        elif slot.ranks:
            sources += [WeightSource(rank) for rank in slot.ranks]
        else:
            for gpu in slot.gpu_ids:
                # In turns, so that no rank's link carries the copies of all engines.
                rank = ranks[num_written.setdefault(slot.node_id, 0) % len(ranks)]
                num_written[slot.node_id] += 1
                engine_gpus[rank].append(gpu)
                sources.append(WeightSource(rank, len(engine_gpus[rank])))
    return SourcePlan(by_engine, [tuple(gpus) for gpus in engine_gpus])
