"""Scores one sample with all functions of `spec.reward`; user code runs in a process that is killed on its time limit.

signal.alarm is not used: it works only in the main thread of the main interpreter and cannot interrupt native code.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from typing import Final

import pebble

from rljob_trainer.rewards.functions import (
    FunctionPlan,
    describe_exception,
    die_with_parent,
    run_function,
    run_in_process,
)
from rljob_trainer.rewards.outcome import FailureKind, Score, ScoreFailure, ScoreRequest, ScoreResult

PROCESS_START_SECONDS: Final = 120
"""Allowance for starting a scoring process (imports of the user's file included) on a busy machine; it is not part of
a sample's time limit."""


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
        self._plans = plans
        self._pool: pebble.ProcessPool | None = None
        self._lock = threading.Lock()

    def score(self, request: ScoreRequest) -> ScoreResult:
        """The weighted sum over all functions. Never raises for what a function does: failures are part of the result,
        and a failed sample has no reward (a silent 0 keeps a run at reward 0.0 for days)."""
        scores: dict[str, float | None] = {}
        metrics: dict[str, float] = {}
        total: float | None = 0.0
        is_nan = False
        for plan in self._plans:
            try:
                score = self._score_one(plan, request)
            except ScoreFailedError as error:
                return ScoreResult(request.sample_id, None, scores, metrics, error.failure, is_nan)
            scores[plan.name] = score.value
            metrics.update({f"{plan.name}/{key}": value for key, value in score.metrics.items()})
            is_nan = is_nan or score.is_nan
            total = None if total is None or score.value is None else total + plan.weight * score.value
        return ScoreResult(request.sample_id, total, scores, metrics, None, is_nan)

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
        future = self._get_pool().schedule(run_in_process, args=(plan, request), timeout=plan.timeout_seconds)
        try:
            outcome = future.result(timeout=plan.timeout_seconds + PROCESS_START_SECONDS)
        except concurrent.futures.TimeoutError:
            future.cancel()
            message = f"took longer than timeoutSeconds = {plan.timeout_seconds} and was killed"
            raise ScoreFailedError(ScoreFailure(FailureKind.TIMEOUT, plan.name, message)) from None
        except pebble.ProcessExpired as error:
            message = f"its process died with exit code {error.exitcode}"
            raise ScoreFailedError(ScoreFailure(FailureKind.PROCESS_DIED, plan.name, message)) from None
        except Exception as error:
            # The request could not be sent or the outcome could not be read (a column that does not pickle).
            raise ScoreFailedError(describe_exception(plan.name, error)) from error
        if isinstance(outcome, ScoreFailure):
            raise ScoreFailedError(outcome)
        return outcome

    def _get_pool(self) -> pebble.ProcessPool:
        with self._lock:
            if self._pool is None:
                # Not fork: the parent has threads (Ray, gRPC, the progress server), and a forked child can inherit a
                # lock that nobody will release.
                self._pool = pebble.ProcessPool(
                    max_workers=1,
                    initializer=die_with_parent,
                    initargs=(os.getpid(),),
                    context=_LightSpawnContext(),
                )
            return self._pool


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
