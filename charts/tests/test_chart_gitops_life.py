"""Verdicts of Argo CD and kstatus on the conditions that the operator really writes, on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from argocd import judge_health
from kstatus import compute_status

from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.envtest_fixtures import envtest  # noqa: F401 - fixture
from rljob_operator.testing.fake_ray import Script
from rljob_operator.testing.world import World, open_world

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def world(envtest: Envtest) -> AsyncIterator[World]:  # noqa: F811
    async with open_world(envtest) as opened:
        yield opened


class Observer:
    """Every distinct pair of verdicts (Argo CD, kstatus) on a job, in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.verdicts: list[tuple[str, str]] = []
        self._task = asyncio.create_task(self._watch())

    def look_at(self, job: dict) -> tuple[str, str]:
        verdict = (judge_health(job)[0], compute_status(job))
        if job.get("status") and self.verdicts[-1:] != [verdict]:
            self.verdicts.append(verdict)
        return verdict

    async def _watch(self) -> None:
        while True:
            self.look_at(await self._world.get_job())
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


PROGRESSING, HEALTHY = ("Progressing", "InProgress"), ("Healthy", "Current")


async def test_a_run_progresses_and_is_healthy_from_running_to_done(world: World) -> None:
    world.start_operator()
    await world.apply_job()
    observer = Observer(world)
    job = await world.wait_for_condition("Succeeded")
    await observer.stop()
    assert observer.look_at(job) == HEALTHY
    assert set(observer.verdicts) <= {PROGRESSING, HEALTHY}
    assert observer.verdicts[0] == PROGRESSING
    assert observer.verdicts[-1] == HEALTHY


async def test_a_refused_job_is_degraded_and_says_why(world: World) -> None:
    world.start_operator()
    await world.apply_job(cluster={"nodes": 2, "gpusPerNode": 0, "ranksPerNode": 1, "gangScheduler": "Volcano"})
    job = await world.wait_for_condition("Failed")
    assert compute_status(job) == "Failed"
    health, message = judge_health(job)
    assert health == "Degraded"
    assert "gangScheduler" in message


async def test_a_retry_is_progress_not_a_failure(world: World) -> None:
    world.ray.scripts = lambda attempt: (
        Script(fail_at_step=3, exit_code=75, reason="TransientError", message="connection lost")
        if attempt == 1
        else Script()
    )
    world.start_operator()
    await world.apply_job()
    observer = Observer(world)
    await world.wait_for_condition("Succeeded", timeout_seconds=90)
    await observer.stop()
    assert ("Degraded", "Failed") not in observer.verdicts
    assert set(observer.verdicts) <= {PROGRESSING, HEALTHY}


async def test_a_suspended_job_is_suspended(world: World) -> None:
    world.ray.scripts = lambda attempt: Script(hangs_at_step=3)
    world.start_operator()
    await world.apply_job()
    await world.wait_for_condition("Running")
    await world.patch_job("tiny", {"suspend": True})
    job = await world.wait_for_condition("Suspended")
    assert compute_status(job) == "Current"
    assert judge_health(job)[0] == "Suspended"
