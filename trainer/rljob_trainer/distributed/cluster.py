"""The actors of a run: one `TrainWorker` per rank, one `EngineActor` per replica, in one placement group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api.contract import ResolvedJob
from rljob_api.resolve import compute_longest_sequence_tokens
from rljob_trainer.distributed.location import ActorLocation
from rljob_trainer.distributed.placement import CPUS_PER_RANK, reserve_ranks, wait_for_nodes
from rljob_trainer.distributed.ray_connection import read_last_log_lines
from rljob_trainer.distributed.waiting import Actor, get_value, wait_for_all
from rljob_trainer.engines.actor import EngineActor
from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.update import LossSettings
from rljob_trainer.worker import TrainWorker

START_DEADLINE_SECONDS: Final = 600.0
"""Importing torch on a cold, shared file system and loading weights."""
STOP_DEADLINE_SECONDS: Final = 10.0
GPU_THREADS: Final = 8
CONTROL_GROUP: Final = "control"
CHECKPOINT_GROUP: Final = "checkpoint"
"""Of the ranks: waits for files while the rank trains."""


@dataclass(frozen=True)
class Cluster:
    """Running actors; ranks in rank order."""

    ranks: list[Actor]
    engines: list[Actor]
    engines_by_node: dict[str, list[Actor]]
    placement: PlacementGroup
    num_parameters: int

    def call_ranks(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        timeout_seconds: float,
        poll: Callable[[], None] = lambda: None,
        **keywords: Any,
    ) -> list[Any]:
        """Call `method` on every rank, with arguments per rank, and wait for all."""
        per_rank = arguments if arguments is not None else [()] * len(self.ranks)
        references = {
            getattr(actor.handle, method).remote(*values, **keywords): actor
            for actor, values in zip(self.ranks, per_rank, strict=True)
        }
        return wait_for_all(references, timeout_seconds=timeout_seconds, what=f"ranks: {method}", poll=poll)

    def call_engines(
        self,
        method: str,
        *arguments: Any,
        timeout_seconds: float,
        control: bool = False,
        poll: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Call `method` on every engine and wait for all; `control` calls overtake a running `generate`."""
        references = {}
        for actor in self.engines:
            call = getattr(actor.handle, method)
            call = call.options(concurrency_group=CONTROL_GROUP) if control else call
            references[call.remote(*arguments)] = actor
        return wait_for_all(references, timeout_seconds=timeout_seconds, what=f"engines: {method}", poll=poll)

    def leaders(self) -> list[Actor]:
        """The first rank of each node: it hands the weights to that node's engines."""
        seen: dict[str, Actor] = {}
        for actor in self.ranks:
            seen.setdefault(actor.node_id, actor)
        return list(seen.values())

    def stop(self) -> None:
        """End all actors; what does not stop in time is killed."""
        references = [actor.handle.stop.remote() for actor in [*self.ranks, *self.engines]]
        ray.wait(references, num_returns=len(references), timeout=STOP_DEADLINE_SECONDS)
        for actor in [*self.ranks, *self.engines]:
            ray.kill(actor.handle)
        remove_placement_group(self.placement)


def start_cluster(
    job: ResolvedJob, loss: LossSettings, stop_token_ids: tuple[int, ...], poll: Callable[[], None]
) -> Cluster:
    """Reserve, place, meet, load. Every wait has a deadline and names who is late.

    Raises:
        TransientError: missing nodes, a lost rank, or a deadline. ConfigurationError: model or network settings.
    """
    layout = job.layout
    nodes = wait_for_nodes(layout)
    placement = reserve_ranks(nodes, layout)
    num_threads = GPU_THREADS
    if not layout.gpus_per_node:
        # Trainer and engine take turns, so each may use the node's whole share of the rank.
        num_threads = max(1, int(min(node.num_cpus for node in nodes) // layout.ranks_per_node))

    def actor_options(bundle: int) -> dict[str, Any]:
        return {
            "num_cpus": CPUS_PER_RANK / 2,
            "num_gpus": 0.5 if layout.gpus_per_node else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
            "max_restarts": 0,
        }

    worker_class = ray.remote(concurrency_groups={CONTROL_GROUP: 1, CHECKPOINT_GROUP: 1})(TrainWorker)
    engine_class = ray.remote(concurrency_groups={CONTROL_GROUP: 2})(EngineActor)
    owners = [node for node in nodes for _ in range(layout.ranks_per_node)]
    # Trainer and engine processes start together: importing torch is most of the time until the first step.
    trainers = [
        Actor(worker_class.options(**actor_options(bundle)).remote(job, num_threads), f"trainer {bundle}", node.node_id)
        for bundle, node in enumerate(owners)
    ]
    replicas = [
        Actor(engine_class.options(**actor_options(bundle)).remote(job.engine), f"engine {bundle}", node.node_id, True)
        for bundle, node in enumerate(owners)
    ]
    located: list[ActorLocation] = wait_for_all(
        {actor.handle.locate.remote(): actor for actor in [*trainers, *replicas]},
        timeout_seconds=START_DEADLINE_SECONDS,
        what=f"start of trainer and engine processes on {', '.join(node.address for node in nodes)}",
        poll=poll,
    )
    places, engine_places = located[: layout.world_size], located[layout.world_size :]
    bundles = sorted(range(layout.world_size), key=lambda bundle: places[bundle].sort_key)
    ranks = [
        Actor(trainers[bundle].handle, places[bundle].describe(f"rank {rank}"), places[bundle].node_id)
        for rank, bundle in enumerate(bundles)
    ]
    engines = [
        _name_engine(index, replicas[bundle].handle, engine_places[bundle]) for index, bundle in enumerate(bundles)
    ]

    settings = EngineSettings(
        model_source=job.spec.model.source,
        model_revision=job.spec.model.revision,
        dtype=str(job.spec.model.dtype),
        device="cuda" if layout.gpus_per_node else "cpu",
        stop_token_ids=stop_token_ids,
        max_concurrent_samples=job.spec.rollout.max_concurrent_samples,
        max_sequence_tokens=compute_longest_sequence_tokens(job.spec),
        tensor_parallel_size=layout.tensor_parallel_size,
        memory_fraction=job.spec.rollout.memory_fraction,
        engine_args=job.spec.rollout.engine_args,
        num_threads=num_threads,
    )
    rendezvous = get_value(
        ranks[0].handle.start_store.remote(START_DEADLINE_SECONDS), ranks[0], timeout_seconds=START_DEADLINE_SECONDS
    )
    setup = {
        actor.handle.setup.remote(rank, rendezvous, loss, START_DEADLINE_SECONDS): actor
        for rank, actor in enumerate(ranks)
    }
    start = {actor.handle.start.remote(settings): actor for actor in engines}
    facts = wait_for_all(setup | start, timeout_seconds=START_DEADLINE_SECONDS, what="loading the model", poll=poll)
    by_node: dict[str, list[Actor]] = {}
    for engine in engines:
        by_node.setdefault(engine.node_id, []).append(engine)
    return Cluster(ranks, engines, by_node, placement, facts[0]["num_parameters"])


def _name_engine(index: int, handle: Any, place: ActorLocation) -> Actor:
    return Actor(
        handle,
        place.describe(f"engine {index}"),
        place.node_id,
        is_engine=True,
        describe_log=functools.partial(read_last_log_lines, place.node_id, place.address, place.pid),
    )
