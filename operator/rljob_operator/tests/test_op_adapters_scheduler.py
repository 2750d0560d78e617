"""The scheduler: coalescing, no key twice at once, bounded concurrency, back-off, deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.scheduler import Key, Scheduler, compute_backoff_seconds

A, B = Key("ns", "a"), Key("ns", "b")


@asynccontextmanager
async def serve(reconcile: Callable[[Key], Awaitable[float | None]], **options: object) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(reconcile, **options)
    task = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_met():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_wake_ups_of_one_key_coalesce():
    runs: Counter[Key] = Counter()

    async def reconcile(key: Key) -> None:
        runs[key] += 1

    async with serve(reconcile) as scheduler:
        for _ in range(100):
            scheduler.wake(A)
        await until(lambda: runs[A] > 0)
        await asyncio.sleep(0.05)
    assert runs == {A: 1}


async def test_a_wake_up_during_a_run_leads_to_exactly_one_more_run_after_it():
    runs, running, gate = 0, 0, asyncio.Event()

    async def reconcile(key: Key) -> None:
        nonlocal runs, running
        assert running == 0, "one key ran twice at once"
        running += 1
        runs += 1
        await gate.wait()
        running -= 1

    async with serve(reconcile) as scheduler:
        scheduler.wake(A)
        await until(lambda: running == 1)
        for _ in range(10):
            scheduler.wake(A)
        gate.set()
        await until(lambda: runs == 2)
        await asyncio.sleep(0.05)
    assert runs == 2


async def test_at_most_so_many_run_at_once_and_none_is_forgotten():
    running, most, done = 0, 0, set()

    async def reconcile(key: Key) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        done.add(key)

    async with serve(reconcile, concurrency=3) as scheduler:
        keys = {Key("ns", f"job-{n}") for n in range(30)}
        for key in keys:
            scheduler.wake(key)
        await until(lambda: done == keys)
    assert most == 3


async def test_a_stuck_job_does_not_delay_others_and_ends_at_its_deadline():
    failures: list[tuple[Key, BaseException]] = []
    done: list[Key] = []

    async def reconcile(key: Key) -> None:
        if key == A:
            await asyncio.Event().wait()
        done.append(key)

    options = {"run_deadline_seconds": 0.1, "on_failure": lambda key, error: failures.append((key, error))}
    async with serve(reconcile, **options) as scheduler:
        scheduler.wake(A)
        scheduler.wake(B)
        await until(lambda: done == [B] and bool(failures))
    assert failures[0][0] == A
    assert isinstance(failures[0][1], TimeoutError)


async def test_the_answer_is_the_delay_until_the_next_run_and_none_means_silence():
    runs: list[Key] = []

    async def reconcile(key: Key) -> float | None:
        runs.append(key)
        return 0.01 if len(runs) < 3 else None

    async with serve(reconcile) as scheduler:
        scheduler.wake(A)
        await until(lambda: len(runs) == 3)
        await asyncio.sleep(0.05)
        assert len(runs) == 3
        assert scheduler.compute_overdue_seconds() == 0
        assert not scheduler._entries


async def test_an_earlier_wake_up_wins():
    runs: list[Key] = []

    async def reconcile(key: Key) -> None:
        runs.append(key)

    async with serve(reconcile) as scheduler:
        scheduler.wake(A, after_seconds=3600)
        await asyncio.sleep(0.02)
        assert runs == []
        scheduler.wake(A, after_seconds=0.01)
        await until(lambda: runs == [A])


async def test_a_failing_key_backs_off_even_when_its_own_writes_wake_it():
    runs = 0

    async def reconcile(key: Key) -> None:
        nonlocal runs
        runs += 1
        scheduler.wake(key)  # as the echo of a status write does
        raise RuntimeError("API server away")

    async with serve(reconcile) as scheduler:
        scheduler.wake(A)
        await asyncio.sleep(0.3)
    assert runs == 1  # the first back-off is at least 0.4 s


async def test_success_ends_the_back_off():
    outcomes = iter([RuntimeError("once"), None])
    runs = 0

    async def reconcile(key: Key) -> None:
        nonlocal runs
        runs += 1
        error = next(outcomes, None)
        if error is not None:
            raise error

    async with serve(reconcile) as scheduler:
        scheduler.wake(A)
        await until(lambda: runs == 2)
        scheduler.wake(A)
        await until(lambda: runs == 3)


async def test_stopping_cancels_and_awaits_what_runs():
    states: list[str] = []

    async def reconcile(key: Key) -> None:
        try:
            states.append("running")
            await asyncio.Event().wait()
        finally:
            states.append("ended")

    async with serve(reconcile) as scheduler:
        scheduler.wake(A)
        await until(lambda: states == ["running"])
    assert states == ["running", "ended"]


async def test_an_overdue_key_is_seen_while_all_workers_are_busy():
    gate = asyncio.Event()

    async def reconcile(key: Key) -> None:
        await gate.wait()

    async with serve(reconcile, concurrency=1) as scheduler:
        scheduler.wake(A)
        await until(lambda: scheduler.num_running == 1)
        scheduler.wake(B)
        await asyncio.sleep(0.05)
        assert scheduler.num_queued == 1
        assert scheduler.compute_overdue_seconds() > 0
        gate.set()
        await until(lambda: scheduler.num_queued == 0)


@given(st.integers(min_value=1, max_value=10_000))
def test_back_off_grows_to_a_limit(num_failures: int):
    assert compute_backoff_seconds(num_failures) <= compute_backoff_seconds(num_failures + 1) <= 60
    assert compute_backoff_seconds(1) == 0.5
