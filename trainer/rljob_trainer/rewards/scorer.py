"""Scores one sample with the functions that run in workers; code that may run for ever, or eat all memory, runs in a
process that is killed at its limit.

signal.alarm is not used: it works only in the main thread of the main interpreter and cannot interrupt native code.
RLIMIT_AS is not used either: it counts reserved addresses (torch reserves far more than it uses), and the MemoryError
it raises is swallowed by libraries that then score 0.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pebble

from rljob_trainer.rewards.functions import (
    FunctionPlan,
    describe_exception,
    run_function,
    run_in_process,
    start_scoring_process,
)
from rljob_trainer.rewards.outcome import FailureKind, Score, ScoreFailure, ScoreRequest

PROCESS_START_SECONDS: Final = 120
"""Allowance for starting a scoring process (imports of the user's file and of SymPy included) on a busy machine; it is
not part of a sample's time limit."""
MEMORY_POLL_SECONDS: Final = 0.05
_MEBIBYTE: Final = 2**20

Outcomes = Mapping[str, Score | ScoreFailure]
"""Function name -> what it said; after a failure the functions behind it are not asked."""


class ScoreFailedError(Exception):
    """One function failed on one sample."""

    def __init__(self, failure: ScoreFailure) -> None:
        """Carries the typed failure."""
        super().__init__(failure.message)
        self.failure = failure


class Scorer:
    """Scores samples one after another; one instance per worker, each with its own scoring process.

    Thread-safe: calls from several threads queue up at the scoring process.
    """

    def __init__(self, plans: list[FunctionPlan]) -> None:
        """The scoring process starts at the first sample that needs it."""
        self._plans = [plan for plan in plans if plan.runs_in_worker]
        self._pool: pebble.ProcessPool | None = None
        self._pid: Any = None
        self._lock = threading.Lock()
        self._process_lock = threading.Lock()

    def score(self, request: ScoreRequest) -> Outcomes:
        """What each function says. Never raises for what a function does: failures are part of the result."""
        outcomes: dict[str, Score | ScoreFailure] = {}
        for plan in self._plans:
            try:
                outcomes[plan.name] = self._score_one(plan, request)
            except ScoreFailedError as error:
                outcomes[plan.name] = error.failure
                break
        return outcomes

    def close(self) -> None:
        """Ends the scoring process."""
        with self._lock:
            if self._pool is not None:
                self._pool.stop()
                self._pool.join(PROCESS_START_SECONDS)
                self._pool = None

    def _score_one(self, plan: FunctionPlan, request: ScoreRequest) -> Score:
        if plan.needs_process:
            return self._score_in_process(plan, request)
        try:
            return run_function(plan, request)
        except Exception as error:
            raise ScoreFailedError(describe_exception(plan.name, error)) from error

    def _score_in_process(self, plan: FunctionPlan, request: ScoreRequest) -> Score:
        # One sample at a time: the memory in the process belongs to the sample that is killed for it.
        with self._process_lock:
            return self._watch_process(plan, request)

    def _watch_process(self, plan: FunctionPlan, request: ScoreRequest) -> Score:
        future = self._get_pool().schedule(run_in_process, args=(plan, request), timeout=plan.timeout_seconds)
        deadline = time.monotonic() + plan.timeout_seconds + PROCESS_START_SECONDS
        is_over_memory = False
        try:
            while True:
                wait = deadline - time.monotonic()
                try:
                    outcome = future.result(timeout=wait if plan.memory_bytes is None else MEMORY_POLL_SECONDS)
                    break
                except concurrent.futures.TimeoutError:
                    # Raised by the pool's own time limit (the future is done) or by ours.
                    if future.done() or time.monotonic() >= deadline:
                        raise
                is_over_memory = is_over_memory or self._kill_above(plan.memory_bytes)
        except concurrent.futures.TimeoutError:
            future.cancel()
            message = f"took longer than timeoutSeconds = {plan.timeout_seconds} and was killed"
            raise ScoreFailedError(ScoreFailure(FailureKind.TIMEOUT, plan.name, message)) from None
        except pebble.ProcessExpired as error:
            if is_over_memory and plan.memory_bytes is not None:
                message = f"used more memory than {plan.memory_bytes // _MEBIBYTE}Mi (memory) and was killed"
                raise ScoreFailedError(ScoreFailure(FailureKind.MEMORY, plan.name, message)) from None
            message = f"its process died with exit code {error.exitcode}"
            raise ScoreFailedError(ScoreFailure(FailureKind.PROCESS_DIED, plan.name, message)) from None
        except Exception as error:
            # The request could not be sent or the outcome could not be read (a column that does not pickle).
            raise ScoreFailedError(describe_exception(plan.name, error)) from error
        if isinstance(outcome, ScoreFailure):
            raise ScoreFailedError(outcome)
        return outcome

    def _kill_above(self, memory_bytes: int | None) -> bool:
        """Kills the scoring process if its private memory is above the limit."""
        pid = self._pid.value if self._pid is not None else 0
        if memory_bytes is None or pid == 0 or read_private_bytes(pid) <= memory_bytes:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def _get_pool(self) -> pebble.ProcessPool:
        with self._lock:
            if self._pool is None:
                # Not fork: the parent has threads (Ray, gRPC, the progress server), and a forked child can inherit a
                # lock that nobody will release.
                context = _LightSpawnContext()
                self._pid = context.Value("i", 0, lock=False)
                self._pool = pebble.ProcessPool(
                    max_workers=1,
                    initializer=start_scoring_process,
                    initargs=(os.getpid(), self._pid, self._plans),
                    context=context,
                )
            return self._pool


def read_private_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs (Linux); 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


class _LightSpawnProcess(multiprocessing.context.SpawnProcess):
    """Spawned without the parent's `__main__`: importing it again costs, in a Ray worker, a second of CPU time and a
    hundred megabytes per scoring process, and in the driver it is the trainer."""

    def start(self) -> None:
        with _main_lock, _hidden_main_module():
            super().start()


class _LightSpawnContext(multiprocessing.context.SpawnContext):
    """The spawn context with light processes."""

    Process = _LightSpawnProcess


_main_lock = threading.Lock()


@contextlib.contextmanager
def _hidden_main_module() -> Iterator[None]:
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in saved:
        del main.__file__
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(main, name, value)
