"""The actors of a run: one `TrainWorker` per rank, one `EngineActor` per engine replica and node, in one placement
group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api.contract import ResolvedJob
from rljob_api.presets import compute_max_staleness_steps
from rljob_api.resolve import compute_longest_sequence_tokens
from rljob_trainer.distributed.engine_layout import (
    EngineSlot,
    choose_engine_bundles,
    plan_engines,
    plan_separate_engines,
    specialise_settings,
)
from rljob_trainer.distributed.location import ActorLocation
from rljob_trainer.distributed.placement import (
    CPUS_PER_ENGINE,
    NodeResources,
    plan_bundles,
    reserve_bundles,
    wait_for_nodes,
)
from rljob_trainer.distributed.ray_connection import read_last_log_lines
from rljob_trainer.distributed.waiting import Actor, get_value, wait_for_all
from rljob_trainer.distributed.weight_sources import WeightSource, plan_weight_sources
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
    """One per replica: the actor that is asked to generate and takes weights."""
    weight_sources: list[list[WeightSource]]
    """Per replica, where it takes its weights from, in tensor parallel order."""
    engines_by_node: dict[str, list[Actor]]
    followers: list[Actor]
    """Engine actors of the other nodes of replicas over several nodes: they only lend their GPUs."""
    watches: dict[Any, Actor]
    """Calls that end only when a follower's engine dies."""
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

        def poll_all() -> None:
            poll()
            self.check_followers()

        return wait_for_all(references, timeout_seconds=timeout_seconds, what=f"engines: {method}", poll=poll_all)

    def check_followers(self) -> None:
        """When the engine of another node dies, the first node hangs in a collective: blame the dead one.

        Raises:
            EngineDied: its verdict.
        """
        if self.watches:
            ready, _ = ray.wait(list(self.watches), num_returns=1, timeout=0)
            for reference in ready:
                get_value(reference, self.watches[reference], timeout_seconds=STOP_DEADLINE_SECONDS)

    @property
    def actors(self) -> list[Actor]:
        """All of them."""
        return [*self.ranks, *self.engines, *self.followers]

    def stop(self) -> None:
        """End all actors; what does not stop in time is killed."""
        references = [actor.handle.stop.remote() for actor in self.ranks]
        # In the control group: `generate` or `watch` may still run in the other.
        references += [
            actor.handle.stop.options(concurrency_group=CONTROL_GROUP).remote()
            for actor in [*self.engines, *self.followers]
        ]
        ray.wait(references, num_returns=len(references), timeout=STOP_DEADLINE_SECONDS)
        for actor in self.actors:
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
    bundles = plan_bundles(nodes, layout)
    placement = reserve_bundles(bundles)
    num_threads = _choose_threads(job, nodes)

    def actor_options(bundle: int, *, is_engine: bool) -> dict[str, Any]:
        # Co-located engines use the GPUs of their ranks, told by `visible_devices`; Ray counts each GPU once.
        has_gpus = layout.engine_gpus_per_node > 0 or not is_engine
        return {
            "num_cpus": CPUS_PER_ENGINE,
            "num_gpus": bundles[bundle].resources.get("GPU", 0) if has_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
            "max_restarts": 0,
        }

    worker_class = ray.remote(concurrency_groups={CONTROL_GROUP: 1, CHECKPOINT_GROUP: 1})(TrainWorker)
    engine_class = ray.remote(concurrency_groups={CONTROL_GROUP: 2})(EngineActor)
    # Trainer and engine processes start together: importing torch is most of the time until the first step.
    trainers = [
        Actor(
            worker_class.options(**actor_options(bundle, is_engine=False)).remote(job, num_threads),
            f"trainer {bundle}",
            bundles[bundle].node.node_id,
        )
        for bundle in range(layout.world_size)
    ]
    engine_actors = [
        Actor(
            engine_class.options(**actor_options(bundle, is_engine=True)).remote(job.engine),
            f"engine {index}",
            bundles[bundle].node.node_id,
            True,
        )
        for index, bundle in enumerate(choose_engine_bundles(layout))
    ]
    located: list[ActorLocation] = wait_for_all(
        {actor.handle.locate.remote(): actor for actor in [*trainers, *engine_actors]},
        timeout_seconds=START_DEADLINE_SECONDS,
        what=f"start of trainer and engine processes on {', '.join(node.address for node in nodes)}",
        poll=poll,
    )
    places, engine_places = located[: layout.world_size], located[layout.world_size :]
    order = sorted(range(layout.world_size), key=lambda bundle: places[bundle].sort_key)
    rank_places = [places[bundle] for bundle in order]
    ranks = [
        Actor(trainers[bundle].handle, place.describe(f"rank {rank}"), place.node_id)
        for rank, (bundle, place) in enumerate(zip(order, rank_places, strict=True))
    ]
    if layout.engine_gpus_per_node:
        chosen = plan_separate_engines(engine_places, layout.tensor_parallel_size)
    else:
        shared = plan_engines(rank_places, layout.tensor_parallel_size)
        chosen = list(zip(_find_actors(shared, engine_places), shared, strict=True))
    slots = [slot for _, slot in chosen]
    placed = [_name_engine(slot, engine_actors[index], engine_places[index]) for index, slot in chosen]
    sources = plan_weight_sources(rank_places, slots)
    wait_for_all(
        {
            actor.handle.see_gpus.remote(gpus): actor
            for actor, gpus in zip(ranks, sources.engine_gpus, strict=True)
            if gpus
        },
        timeout_seconds=START_DEADLINE_SECONDS,
        what="opening the engines' GPUs",
        poll=poll,
    )

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
        may_sleep=not layout.engine_gpus_per_node,
    )
    rendezvous = get_value(
        ranks[0].handle.start_store.remote(START_DEADLINE_SECONDS), ranks[0], timeout_seconds=START_DEADLINE_SECONDS
    )
    setup = {
        actor.handle.setup.remote(rank, rendezvous, loss, START_DEADLINE_SECONDS): actor
        for rank, actor in enumerate(ranks)
    }
    if layout.gpus_per_node and not layout.engine_gpus_per_node:
        # Engines size their pools by what is free when they start: the trainer's part has to be in place.
        facts = wait_for_all(setup, timeout_seconds=START_DEADLINE_SECONDS, what="loading the model", poll=poll)
        starts = _start_engines(slots, placed, settings)
        wait_for_all(starts, timeout_seconds=START_DEADLINE_SECONDS, what="starting the engines", poll=poll)
    else:
        starts = _start_engines(slots, placed, settings)
        facts = wait_for_all(
            setup | starts, timeout_seconds=START_DEADLINE_SECONDS, what="loading the model", poll=poll
        )
    engines: list[Actor] = []
    followers: list[Actor] = []
    by_node: dict[str, list[Actor]] = {}
    for slot, actor in zip(slots, placed, strict=True):
        if slot.node_rank == 0:
            engines.append(actor)
            by_node.setdefault(actor.node_id, []).append(actor)
        else:
            followers.append(actor)
    return Cluster(
        ranks=ranks,
        engines=engines,
        weight_sources=sources.by_engine,
        engines_by_node=by_node,
        followers=followers,
        watches={actor.handle.watch.remote(): actor for actor in followers},
        placement=placement,
        num_parameters=facts[0]["num_parameters"],
    )


def _choose_threads(job: ResolvedJob, nodes: Sequence[NodeResources]) -> int:
    """Of a rank or engine. On CPUs a rank and its engine may each use the whole share of the node where they take
    turns, and half of it where the engine runs ahead."""
    if job.layout.gpus_per_node:
        return GPU_THREADS
    num_busy = job.layout.ranks_per_node * (2 if compute_max_staleness_steps(job.spec.rollout) else 1)
    return max(1, int(min(node.num_cpus for node in nodes) // num_busy))


def _find_actors(slots: Sequence[EngineSlot], places: Sequence[ActorLocation]) -> list[int]:
    """For each slot an actor on its node."""
    free: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        free.setdefault(place.node_id, []).append(index)
    return [free[slot.node_id].pop(0) for slot in slots]


def _name_engine(slot: EngineSlot, actor: Actor, place: ActorLocation) -> Actor:
    """With the name people will read."""
    name = f"engine {slot.replica}" + (f" node {slot.node_rank}" if slot.num_nodes > 1 else "")
    return Actor(
        actor.handle,
        replace(place, gpu_ids=slot.gpu_ids).describe(name),
        place.node_id,
        is_engine=True,
        describe_log=functools.partial(read_last_log_lines, place.node_id, place.address, place.pid),
    )


def _start_engines(slots: Sequence[EngineSlot], actors: Sequence[Actor], settings: EngineSettings) -> dict[Any, Actor]:
    """Start all at once: the nodes of a replica wait for each other."""
    heads = {slot.replica: (slot, actor) for slot, actor in zip(slots, actors, strict=True) if slot.node_rank == 0}
    ports = {
        replica: get_value(actor.handle.find_port.remote(slot.address), actor, START_DEADLINE_SECONDS)
        for replica, (slot, actor) in heads.items()
        if slot.num_nodes > 1
    }
    return {
        actor.handle.start.remote(
            specialise_settings(settings, slot, heads[slot.replica][0], ports.get(slot.replica, 0))
        ): actor
        for slot, actor in zip(slots, actors, strict=True)
    }
