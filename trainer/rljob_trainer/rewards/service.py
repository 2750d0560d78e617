"""Streams samples to scoring workers while generation still runs, and collects every one of them by a deadline."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

from rljob_api.v1alpha1.data import OnRewardError, Reward
from rljob_trainer.data.rows import PromptRow
from rljob_trainer.errors import RewardError
from rljob_trainer.rewards.functions import FunctionPlan
from rljob_trainer.rewards.outcome import FailureKind, ScoreFailure, ScoreRequest, ScoreResult
from rljob_trainer.rewards.plans import plan_functions
from rljob_trainer.rewards.scorer import Scorer

MAX_FAILED_SHARE: Final = 0.5
"""Under DropSample, more failures than this in one batch mean that the function is broken, not single samples."""
_WORKER_START_SECONDS: Final = 300
DRY_RUN_ROWS: Final = 4


class Backend(StrEnum):
    """Where scoring workers run."""

    RAY = "Ray"
    LOCAL = "Local"


class _Workers(Protocol):
    def submit(self, worker: int, request: ScoreRequest) -> concurrent.futures.Future[ScoreResult]: ...

    def close(self) -> None: ...


class RewardService:
    """`submit` samples as they are generated, then `collect` the results of all that were submitted.

    Both may be called from any thread; in an asyncio program call `collect` through `asyncio.to_thread`. A sample never
    gets lost silently: at the deadline it becomes a failure that names it.
    """

    def __init__(self, reward: Reward, *, backend: Backend = Backend.RAY) -> None:
        """Starts `reward.num_workers` workers: Ray actors without CPU shares, which work beside ranks and engines that
        hold all CPUs, or threads of this process.

        Raises:
            ConfigurationError: a function of `spec.reward` lacks an option, or its type is not supported yet.
        """
        self._reward = reward
        self.plans: list[FunctionPlan] = plan_functions(reward.functions)
        self._lock = threading.Lock()
        self._pending: dict[str, concurrent.futures.Future[ScoreResult]] = {}
        self._turns = itertools.cycle(range(reward.num_workers))
        self._workers: _Workers = (
            _RayWorkers(self.plans, reward.num_workers)
            if backend is Backend.RAY
            else _LocalWorkers(self.plans, reward.num_workers)
        )

    def submit(self, request: ScoreRequest) -> None:
        """Hand over one sample; returns at once.

        Raises:
            ValueError: a sample with this id is pending.
        """
        with self._lock:
            if request.sample_id in self._pending:
                raise ValueError(f"sample {request.sample_id} was submitted twice")
            self._pending[request.sample_id] = self._workers.submit(next(self._turns), request)

    def collect(self, deadline_seconds: float) -> list[ScoreResult]:
        """Results of everything submitted since the last call, in order of submission.

        Failed samples (`reward` None and `failure` set) are among the results under `onError: DropSample`.

        Raises:
            RewardError: under `onError: FailJob` the first failed sample; under DropSample more than half of the
                samples failed.
        """
        with self._lock:
            pending, self._pending = self._pending, {}
        fail_fast = self._reward.on_error is OnRewardError.FAIL_JOB
        try:
            for future in concurrent.futures.as_completed(pending.values(), timeout=deadline_seconds):
                if fail_fast and _has_failed(future):
                    break  # the rest of the batch no longer matters
        except concurrent.futures.TimeoutError:
            pass  # what is missing becomes a failure below
        results = [self._read(sample_id, future, deadline_seconds) for sample_id, future in pending.items()]
        if fail_fast:
            # A sample that was not waited for is not the cause.
            failed = [result for result in results if result.failure is not None]
            failed.sort(key=lambda result: result.failure is not None and result.failure.kind is FailureKind.DEADLINE)
            if failed:
                raise RewardError(self._describe_failures(failed[:1], len(failed), len(results)))
        self._check_share(results)
        return results

    def dry_run(self, rows: Sequence[PromptRow], num_rows: int = DRY_RUN_ROWS) -> list[ScoreResult]:
        """Scores the first rows with their own gold answer and with an empty response, before any GPU works.

        Raises:
            RewardError: a function failed on one of them, whatever `onError` says.
        """
        requests = [
            ScoreRequest(f"dry run {row.uid} {label}", row.prompt_text, response, row.answer, row.fields)
            for row in rows[:num_rows]
            for label, response in (("(gold answer as response)", str(row.answer)), ("(empty response)", ""))
        ]
        for request in requests:
            self.submit(request)
        with self._lock:
            pending, self._pending = self._pending, {}
        limit = _WORKER_START_SECONDS + len(requests) * sum(plan.timeout_seconds for plan in self.plans)
        concurrent.futures.wait(pending.values(), limit)
        results = [self._read(sample_id, future, limit) for sample_id, future in pending.items()]
        failed = [result for result in results if result.failure is not None]
        if failed:
            raise RewardError(self._describe_failures(failed[:1], len(failed), len(results)))
        return results

    def close(self) -> None:
        """Ends the workers."""
        self._workers.close()

    def _read(
        self, sample_id: str, future: concurrent.futures.Future[ScoreResult], deadline_seconds: float
    ) -> ScoreResult:
        if not future.done():
            future.cancel()
            message = f"was not scored within {deadline_seconds:g} s"
            return ScoreResult(sample_id, None, failure=ScoreFailure(FailureKind.DEADLINE, "", message))
        error = future.exception()
        if error is not None:
            message = f"its scoring worker was lost: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
            return ScoreResult(sample_id, None, failure=ScoreFailure(FailureKind.WORKER_LOST, "", message))
        return future.result()

    def _check_share(self, results: list[ScoreResult]) -> None:
        failed = [result for result in results if result.failure is not None]
        if len(failed) > MAX_FAILED_SHARE * len(results):
            raise RewardError(
                f"{len(failed)} of {len(results)} samples of this step could not be scored, more than "
                f"{MAX_FAILED_SHARE:.0%}: {self._describe_failures(failed[:1], len(failed), len(results))}"
            )

    def _describe_failures(self, shown: list[ScoreResult], num_failed: int, num_results: int) -> str:
        """One failed sample in full, with the field of its function and the user's traceback."""
        result = shown[0]
        failure = result.failure
        assert failure is not None
        places = {plan.name: f"{plan.field_path} ({plan.name})" for plan in self.plans}
        place = places.get(failure.function, "spec.reward")
        more = f"; {num_failed} of {num_results} samples failed" if num_failed > 1 else ""
        trace = f"\n{failure.traceback}" if failure.traceback else ""
        return f"{place}: sample {result.sample_id}: {failure.message}{more}{trace}"


def _has_failed(future: concurrent.futures.Future[ScoreResult]) -> bool:
    return future.exception() is not None or future.result().failure is not None


class _LocalWorkers:
    """One thread and one scoring process per worker, in this process."""

    def __init__(self, plans: list[FunctionPlan], num_workers: int) -> None:
        self._scorers = [Scorer(plans) for _ in range(num_workers)]
        self._threads = [
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"reward-{number}")
            for number in range(num_workers)
        ]

    def submit(self, worker: int, request: ScoreRequest) -> concurrent.futures.Future[ScoreResult]:
        return self._threads[worker].submit(self._scorers[worker].score, request)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for scorer in self._scorers:
            scorer.close()


class _RayWorkers:
    """One Ray actor per worker. A lost actor is started again and its samples are scored once more; a sample whose
    worker is lost twice becomes a failure."""

    def __init__(self, plans: list[FunctionPlan], num_workers: int) -> None:
        import ray

        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=1)(Scorer)
        self._ray = ray
        self._actors = [actor.options(name=None).remote(plans) for _ in range(num_workers)]

    def submit(self, worker: int, request: ScoreRequest) -> concurrent.futures.Future[ScoreResult]:
        future: concurrent.futures.Future[ScoreResult] = self._actors[worker].score.remote(request).future()
        return future

    def close(self) -> None:
        if not self._ray.is_initialized():
            return  # Ray took its actors along; asking it to kill one would start another Ray
        for actor in self._actors:
            self._ray.kill(actor)
