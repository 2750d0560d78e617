"""GPU time, and the part of it whose steps were not lost."""

from __future__ import annotations

import pytest
from plan_world import World, make_spec


def wait_for_failure(world: World) -> None:
    """A crash may first wait for the dead pod that explains it."""
    for _ in range(120):
        world.wait(1)
        if world.status.failures:
            return
    raise AssertionError("no failure within 120 s")


def test_time_of_steps_after_the_checkpoint_is_lost():
    world = World()
    world.run(step=60, checkpoint_step=40)
    world.end_trainer(1, reason="TrainerCrashed")
    wait_for_failure(world)
    goodput = world.status.goodput
    assert goodput is not None
    assert goodput.gpu_seconds > 0
    assert goodput.useful_gpu_seconds == pytest.approx(goodput.gpu_seconds * 40 / 60)


def test_an_attempt_that_never_reported_kept_nothing():
    """The progress and the checkpoint in the status are then still those of the attempt before it."""
    world = World(spec=make_spec(failurePolicy={"startupTimeoutSeconds": 300}))
    world.run(step=60, checkpoint_step=40)
    world.end_trainer(1, reason="TrainerCrashed")
    wait_for_failure(world)
    before = world.status.goodput
    assert before is not None
    world.is_trainer_up = False
    world.wait(400)
    assert [failure.reason for failure in world.status.failures] == ["TrainerCrashed", "StartupTimeout"]
    after = world.status.goodput
    assert after is not None
    assert after.gpu_seconds >= before.gpu_seconds + 2 * 290
    assert after.useful_gpu_seconds == before.useful_gpu_seconds


def test_a_final_report_counts_where_it_is_the_first_one_seen():
    """An attempt that ends between two looks: its only report is the result line."""
    world = World()
    world.reconcile()
    world.step_environment()
    world.reconcile()
    world.current.has_reported = False
    world.wait(60)
    world.current.checkpoint_step = 15
    world.end_trainer(1, step=20, reason="TrainerCrashed")
    wait_for_failure(world)
    goodput = world.status.goodput
    assert goodput is not None
    assert goodput.useful_gpu_seconds == pytest.approx(goodput.gpu_seconds * 15 / 20)
