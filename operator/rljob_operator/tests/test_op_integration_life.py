"""Whole lives of jobs on a real API server."""

import pytest

from rljob_operator.testing.world import World, find_condition

pytestmark = pytest.mark.integration


async def test_happy_life(world: World):
    world.start_operator()
    await world.apply_job()
    job = await world.wait_for_condition("Succeeded")
    status = job["status"]
    assert status["phase"] == "Succeeded"
    assert status["progress"]["step"] == 4
    assert status["checkpoint"]["step"] == 4
    assert status["attempts"][-1]["outcome"] == "Succeeded"
    assert find_condition(job, "Failed")["status"] == "False"
    print(world.count_operator_writes())
