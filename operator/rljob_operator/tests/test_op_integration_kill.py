"""Kill the operator after each of its effects in turn: never a second RayCluster, never a second training run."""

from __future__ import annotations

import pytest

from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.fake_ray import Script
from rljob_operator.testing.world import Killer, World, open_world

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

_MAX_POINTS = 60


async def _run_until_killed_then_again(world: World, kill_at: int) -> Killer:
    """One life with a kill after the n-th effect; a second operator finishes it."""
    killer = Killer(kill_at)
    first = world.start_operator(crash_point=killer)
    await world.apply_job()

    async def is_killed_or_over() -> bool:
        job = await world.get_job()
        return killer.killed.is_set() or _is_over(job, world, killer)

    await world.wait_until(is_killed_or_over, f"effect {kill_at} or the end of the life, after {killer.points}", 120)
    await first.stop()
    world.operators.remove(first)
    world.start_operator()
    await world.wait_for_condition("Succeeded", timeout_seconds=120)
    await world.wait_until(lambda: _is_released(world), "the cluster to be released", 60)
    return killer


def _is_over(job: dict, world: World, killer: Killer) -> bool:
    return job.get("status", {}).get("phase") == "Succeeded" and killer.points[-1:] == ["DeleteCluster"]


async def _is_released(world: World) -> bool:
    return not await world.list_objects("apis/ray.io/v1/rayclusters") and not await world.list_objects("api/v1/secrets")


async def test_kill_after_every_effect_of_a_clean_life(envtest: Envtest):
    num_points = 1
    killed_at: list[str] = []
    for kill_at in range(1, _MAX_POINTS):
        async with open_world(envtest) as world:
            killer = await _run_until_killed_then_again(world, kill_at)
            at = f"kill {kill_at} after {killer.points}"
            assert envtest.list_created(resource="rayclusters", namespace=world.namespace) == ["tiny-1"], at
            uid = (await world.get_job())["metadata"]["uid"]
            assert dict(world.ray.accepted) == {f"{uid}-1": 1}, at
            status = (await world.get_job())["status"]
            assert (status["attempt"], status["clusterGeneration"]) == (1, 1), at
            assert status["retries"]["counted"] == status["retries"]["free"] == 0, at
            if not killer.killed.is_set():
                num_points = kill_at
                break
            killed_at.append(killer.points[-1])
    print(f"killed {len(killed_at)} times: {killed_at}")
    # The life has at least: status, 4 applies, action, status, submit, status..., 4 deletions, action.
    assert num_points > 12, killed_at
    assert {"applied RayCluster", "SubmitTrainer", "wrote status", "deleted RayCluster"} <= set(killed_at)


async def test_kill_around_a_retry_in_place(envtest: Envtest):
    """Attempt 1 ends with 75 (transient); wherever the kill falls, there is one cluster and one run per attempt."""
    killed_at: list[str] = []
    for kill_at in range(8, _MAX_POINTS):
        async with open_world(envtest) as world:
            world.ray.scripts = lambda attempt: (
                Script(fail_at_step=3, exit_code=75, reason="TransientError", message="a rank lost its connection")
                if attempt == 1
                else Script()
            )
            killer = await _run_until_killed_then_again(world, kill_at)
            at = f"kill {kill_at} after {killer.points}"
            assert envtest.list_created(resource="rayclusters", namespace=world.namespace) == ["tiny-1"], at
            uid = (await world.get_job())["metadata"]["uid"]
            assert dict(world.ray.accepted) == {f"{uid}-1": 1, f"{uid}-2": 1}, at
            status = (await world.get_job())["status"]
            assert status["retries"]["counted"] == 1, at
            assert status["attempts"][-1]["resumedFromStep"] == 2, at
            if not killer.killed.is_set():
                break
            killed_at.append(killer.points[-1])
    print(f"killed {len(killed_at)} times: {killed_at}")
    assert len(killed_at) > 8, killed_at
