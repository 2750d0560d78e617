"""The rollout that runs beside the training: order, failures, ends; and how stale a sample may be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tr_local import make_sample

from rljob_trainer import rollout_ahead
from rljob_trainer.dynamic_sampling import CollectedBatch
from rljob_trainer.errors import EngineDied, StopRequested, TrainerError
from rljob_trainer.rollout_ahead import RolloutAhead
from rljob_trainer.step_rollout import StepRollout, check_staleness

SECONDS = 30.0
"""Bounds a test that has gone wrong."""


def make_rollout(step: int) -> StepRollout:
    return StepRollout(CollectedBatch([], []), [], {"step": step}, float(step), 0.0)


def do_nothing() -> None:
    """A poll."""


class Collector:
    """Collects when it is let; events tell what has begun."""

    def __init__(self) -> None:
        self.started = {step: threading.Event() for step in range(5)}
        self.allowed = {step: threading.Event() for step in range(5)}
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.failure: Exception | None = None

    def __call__(self, step: int, poll: Callable[[], None]) -> StepRollout:
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)
        self.started[step].set()
        while not self.allowed[step].wait(0.01):
            poll()
        if self.failure is not None:
            raise self.failure
        return make_rollout(step)


@pytest.fixture
def collector() -> Collector:
    return Collector()


def make_ahead(collector: Any, notes: list[str] | None = None, poll: Callable[[], None] = do_nothing) -> RolloutAhead:
    return RolloutAhead(collector, poll=poll, note=(notes if notes is not None else []).append)


def count_rollout_threads() -> int:
    return sum(thread.name.startswith("rollout-") for thread in threading.enumerate())


def test_the_next_step_is_collected_while_the_driver_does_something_else(collector: Collector) -> None:
    with make_ahead(collector) as ahead:
        collector.allowed[1].set()
        assert ahead.take(1, do_nothing).sampler == {"step": 1}, "the first step has nothing to run beside"
        ahead.start(2)
        # Training goes on here: it would wait in vain for a rollout that does not run beside it.
        assert collector.started[2].wait(SECONDS)
        ahead.raise_if_failed()
        collector.allowed[2].set()
        assert ahead.take(2, do_nothing).sampler == {"step": 2}
    assert collector.steps == [1, 2]
    assert threading.current_thread().name not in collector.threads
    assert count_rollout_threads() == 0


def test_settled_samples_are_kept_for_their_step(collector: Collector) -> None:
    with make_ahead(collector) as ahead:
        ahead.settle(do_nothing)  # nothing is pending
        collector.allowed[3].set()
        ahead.start(3)
        ahead.settle(do_nothing)
        assert collector.steps == [3]
        ahead.settle(do_nothing)
        assert ahead.take(3, do_nothing).epoch == 3.0
    assert collector.steps == [3], "the samples were not collected again"


def test_a_batch_is_for_its_step_alone(collector: Collector) -> None:
    with make_ahead(collector) as ahead:
        ahead.start(2)
        with pytest.raises(AssertionError, match="one rollout at a time"):
            ahead.start(3)
        with pytest.raises(AssertionError, match="step 3 cannot train on the samples of step 2"):
            ahead.take(3, do_nothing)


@pytest.mark.parametrize("wait", ["take", "settle", "raise_if_failed"])
def test_a_failure_keeps_its_type(collector: Collector, wait: str) -> None:
    collector.failure = EngineDied("engine 1 (node 10.0.0.7) is gone")
    with make_ahead(collector) as ahead:
        ahead.start(2)
        ahead.raise_if_failed()
        collector.allowed[2].set()
        assert ahead._pending is not None
        assert ahead._pending.thread is not None
        ahead._pending.thread.join(SECONDS)
        with pytest.raises(EngineDied, match="engine 1"):
            {"take": lambda: ahead.take(2, do_nothing), "settle": lambda: ahead.settle(do_nothing)}.get(
                wait, ahead.raise_if_failed
            )()
    assert count_rollout_threads() == 0


def test_whoever_waits_may_be_stopped(collector: Collector) -> None:
    """A stop is seen by the driver that waits, and by the rollout itself."""
    stop = threading.Event()

    def poll() -> None:
        if stop.is_set():
            raise StopRequested("SIGTERM")

    with make_ahead(collector, poll=poll) as ahead:
        ahead.start(1)
        assert collector.started[1].wait(SECONDS)
        stop.set()
        with pytest.raises(StopRequested, match="SIGTERM"):
            ahead.take(1, poll)
    assert count_rollout_threads() == 0


def test_a_failing_run_leaves_no_rollout_behind(collector: Collector) -> None:
    notes: list[str] = []

    def run() -> None:
        with make_ahead(collector, notes) as ahead:
            ahead.start(2)
            assert collector.started[2].wait(SECONDS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert count_rollout_threads() == 0
    assert notes == []


def test_a_rollout_that_does_not_end_is_named(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_ahead, "END_SECONDS", 0.05)
    notes: list[str] = []
    hanging = threading.Event()

    def hang(step: int, poll: Callable[[], None]) -> StepRollout:
        assert hanging.wait(SECONDS)
        return make_rollout(step)

    with make_ahead(hang, notes) as ahead:
        ahead.start(4)
    assert [("step 4" in note, "did not end" in note) for note in notes] == [(True, True)]
    hanging.set()


@pytest.mark.parametrize(
    ("version", "max_staleness_steps", "is_fine"),
    [(7, 0, True), (6, 0, False), (8, 0, False), (7, 1, True), (6, 1, True), (5, 1, False), (8, 1, False)],
)
def test_samples_are_as_stale_as_allowed_and_no_more(version: int, max_staleness_steps: int, is_fine: bool) -> None:
    samples = [make_sample("a", 0, reward=1.0), make_sample("b", 3, reward=1.0)]
    for sample, weight_version in zip(samples, (7, version), strict=True):
        object.__setattr__(sample, "weight_version", weight_version)
    if is_fine:
        check_staleness(samples, 7, max_staleness_steps)
        return
    with pytest.raises(TrainerError, match=rf"step 7: sample 3 of prompt b .*version {version}; .*maxStalenessSteps"):
        check_staleness(samples, 7, max_staleness_steps)
