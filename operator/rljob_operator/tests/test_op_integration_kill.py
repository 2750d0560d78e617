"""Kill the operator after each of its effects in turn: never a second RayCluster, never a second training run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.fake_ray import Script
from rljob_operator.testing.world import Killer, World, open_world

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_AT_ONCE = 16
TIMEOUT_SECONDS = 240.0

Scripts = Callable[[int], Script]


@dataclass(frozen=True)
class Life:
    """What a life left behind."""

    points: list[str]
    """Effects of the first operator."""
    was_killed: bool
    uid: str
    status: dict[str, Any]
    accepted: dict[str, int]
    """Training runs by submission id."""
    created_clusters: list[str]

    def __str__(self) -> str:
        return f"killed after {self.points}" if self.was_killed else f"not killed: {self.points}"


async def live(envtest: Envtest, scripts: Scripts, kill_at: tuple[str, int] | None) -> Life:
    """One life with a kill after the n-th effect of a name; a second operator finishes it."""
    async with open_world(envtest) as world:
        world.ray.scripts = scripts
        killer = Killer(kill_at)
        first = world.start_operator(crash_point=killer)
        await world.apply_job()

        async def is_killed_or_over() -> bool:
            return killer.killed.is_set() or (killer.points[-1:] == ["DeleteCluster"] and await _is_over(world))

        what = f"effect {kill_at} or the end of the life"
        await world.wait_until(is_killed_or_over, what, TIMEOUT_SECONDS)
        await first.stop()
        world.operators.remove(first)
        world.start_operator()
        job = await world.wait_for_condition("Succeeded", timeout_seconds=TIMEOUT_SECONDS)
        await world.wait_until(lambda: _is_released(world), "the cluster to be released", TIMEOUT_SECONDS)
        return Life(
            points=killer.points,
            was_killed=killer.killed.is_set(),
            uid=job["metadata"]["uid"],
            status=job["status"],
            accepted=dict(world.ray.accepted),
            created_clusters=envtest.list_created(resource="rayclusters", namespace=world.namespace),
        )


async def live_through_every_kill(envtest: Envtest, scripts: Scripts, *, first: int = 1) -> list[Life]:
    """A life without a kill, then one per effect that it had."""
    whole = await live(envtest, scripts, None)
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def live_once(kill_at: tuple[str, int]) -> Life:
        async with slots:
            return await live(envtest, scripts, kill_at)

    effects = [(point, whole.points[: index + 1].count(point)) for index, point in enumerate(whole.points)]
    async with asyncio.TaskGroup() as group:
        tasks = {kill_at: group.create_task(live_once(kill_at)) for kill_at in effects[first - 1 :]}
    lives = {kill_at: task.result() for kill_at, task in tasks.items()}
    killed_at = {name for (name, _), life in lives.items() if life.was_killed}
    print(f"killed {sum(life.was_killed for life in lives.values())} times, after {sorted(killed_at)}")
    # A life may need fewer progress writes than the first one did; the other kills must all have happened.
    missed = [kill_at for kill_at, life in lives.items() if not life.was_killed and kill_at[0] != "wrote status"]
    assert not missed, [str(life) for life in lives.values()]
    assert {"wrote status", "SubmitTrainer", "deleted RayCluster", "DeleteCluster"} <= killed_at
    return [whole, *lives.values()]


async def test_kill_after_every_effect_of_a_clean_life(envtest: Envtest):
    lives = await live_through_every_kill(envtest, lambda attempt: Script())
    assert {"applied Secret", "applied RayCluster"} <= {life.points[-1] for life in lives}
    for life in lives:
        assert life.created_clusters == ["tiny-1"], life
        assert life.accepted == {f"{life.uid}-1": 1}, life
        assert (life.status["attempt"], life.status["clusterGeneration"]) == (1, 1), life
        assert life.status["retries"]["counted"] == life.status["retries"]["free"] == 0, life


async def test_kill_around_a_retry_in_place(envtest: Envtest):
    """Attempt 1 ends with 75 (transient); wherever the kill falls, there is one cluster and one run per attempt."""
    failing = Script(fail_at_step=3, exit_code=75, reason="TransientError", message="a rank lost its connection")
    lives = await live_through_every_kill(envtest, lambda attempt: failing if attempt == 1 else Script(), first=8)
    for life in lives:
        assert life.created_clusters == ["tiny-1"], life
        assert life.accepted == {f"{life.uid}-1": 1, f"{life.uid}-2": 1}, life
        assert life.status["retries"]["counted"] == 1, life
        assert life.status["attempts"][-1]["resumedFromStep"] == 2, life


async def _is_over(world: World) -> bool:
    return (await world.get_job()).get("status", {}).get("phase") == "Succeeded"


async def _is_released(world: World) -> bool:
    return not await world.list_objects("apis/ray.io/v1/rayclusters") and not await world.list_objects("api/v1/secrets")
