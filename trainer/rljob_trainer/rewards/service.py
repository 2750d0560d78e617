"""Streams samples to scoring workers while generation still runs, and collects every one of them by a deadline."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

from rljob_api.contract import Layout
from rljob_api.v1alpha1.data import OnRewardError, Reward
from rljob_trainer.data.rows import PromptRow
from rljob_trainer.errors import RewardError
from rljob_trainer.rewards.functions import HTTP, MODEL, FunctionPlan
from rljob_trainer.rewards.outcome import (
    FailureKind,
    Score,
    ScoreFailure,
    ScoreRequest,
    ScoreResult,
    add_outcome,
)
from rljob_trainer.rewards.plans import plan_functions
from rljob_trainer.rewards.scorer import Outcomes, Scorer

if TYPE_CHECKING:
    from rljob_trainer.rewards.http_function import HttpScorer
    from rljob_trainer.rewards.model_workers import ModelWorkers

MAX_FAILED_SHARE: Final = 0.5
"""Under DropSample, more failures than this in one batch mean that the function is broken, not single samples."""
_WORKER_START_SECONDS: Final = 300
DRY_RUN_ROWS: Final = 4
SLACK_SECONDS: Final = 60.0
"""Added to every deadline: queues and a loaded machine."""


class Backend(StrEnum):
    """Where scoring workers run."""

    RAY = "Ray"
    LOCAL = "Local"


class _Workers(Protocol):
    def submit(self, worker: int, request: ScoreRequest) -> concurrent.futures.Future[Outcomes]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Pending:
    """A sample that is being scored."""

    in_worker: concurrent.futures.Future[Outcomes] | None
    """None: no function needs a worker."""
    by_server: dict[str, concurrent.futures.Future[Score | ScoreFailure]]
    """Name of the Http or Model function -> its answer."""

    @property
    def futures(self) -> list[concurrent.futures.Future[Any]]:
        return [*([] if self.in_worker is None else [self.in_worker]), *self.by_server.values()]


class RewardService:
    """`submit` samples as they are generated, then `collect` the results of all that were submitted.

    Both may be called from any thread; in an asyncio program call `collect` through `asyncio.to_thread`. A sample never
    gets lost silently: at the deadline it becomes a failure that names it.
    """

    def __init__(self, reward: Reward, *, backend: Backend = Backend.RAY, layout: Layout | None = None) -> None:
        """Starts `reward.num_workers` workers: Ray actors without CPU shares, which work beside ranks and engines that
        hold all CPUs, or threads of this process.

        Raises:
            ConfigurationError: a function of `spec.reward` lacks an option, or its type is not supported yet.
        """
        self._reward = reward
        self.plans: list[FunctionPlan] = plan_functions(reward.functions)
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._turns = itertools.cycle(range(reward.num_workers))
        self._workers: _Workers | None = None
        if any(plan.runs_in_worker for plan in self.plans):
            start = _RayWorkers if backend is Backend.RAY else _LocalWorkers
            self._workers = start(self.plans, reward.num_workers)
        self._http_plans = [plan for plan in self.plans if plan.type == HTTP]
        self._http: HttpScorer | None = None
        if self._http_plans:
            from rljob_trainer.rewards.http_function import HttpScorer

            self._http = HttpScorer(self._http_plans, dict(os.environ))
        model_plans = [plan for plan in self.plans if plan.type == MODEL]
        self._models: list[ModelWorkers] = []
        if model_plans:
            from rljob_trainer.rewards.model_workers import start_model_workers

            model_layout = layout if backend is Backend.RAY else None
            self._models = [start_model_workers(plan, model_layout) for plan in model_plans]

    def submit(self, request: ScoreRequest) -> None:
        """Hand over one sample; returns at once.

        Raises:
            ValueError: a sample with this id is pending.
        """
        with self._lock:
            if request.sample_id in self._pending:
                raise ValueError(f"sample {request.sample_id} was submitted twice")
            by_server = {} if self._http is None else {p.name: self._http.submit(p, request) for p in self._http_plans}
            by_model = {workers.plan.name: workers.submit(request) for workers in self._models}
            self._pending[request.sample_id] = _Pending(
                None if self._workers is None else self._workers.submit(next(self._turns), request),
                {**by_server, **by_model},
            )

    def compute_deadline_seconds(self, num_samples: int) -> float:
        """How long so many samples may take if each uses its whole time: workers one after another, servers as many
        as `maxConcurrentRequests`."""
        in_worker = sum(plan.timeout_seconds for plan in self.plans if plan.runs_in_worker)
        seconds = in_worker * -(-num_samples // self._reward.num_workers)
        for plan in self._http_plans:
            at_once = plan.options["batch_samples"] * plan.options["max_concurrent_requests"]
            seconds = max(seconds, plan.timeout_seconds * -(-num_samples // at_once))
        for workers in self._models:
            seconds = max(seconds, workers.plan.timeout_seconds * -(-num_samples // workers.num_hosts))
        return SLACK_SECONDS + seconds

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
            futures = [future for entry in pending.values() for future in entry.futures]
            for future in concurrent.futures.as_completed(futures, timeout=deadline_seconds):
                if fail_fast and _has_failed(future):
                    break  # the rest of the batch no longer matters
        except concurrent.futures.TimeoutError:
            pass  # what is missing becomes a failure below
        results = [self._read(sample_id, entry, deadline_seconds) for sample_id, entry in pending.items()]
        for workers in self._models:
            workers.release()
        if fail_fast:
            # A sample that was not waited for is not the cause.
            failed = [result for result in results if result.failure is not None]
            failed.sort(key=lambda result: result.failure is not None and result.failure.kind is FailureKind.DEADLINE)
            if failed:
                raise RewardError(self._describe_failures(failed[:1], len(failed), len(results)))
        self._check_share(results)
        return results

    def dry_run(self, rows: Sequence[PromptRow], num_rows: int = DRY_RUN_ROWS) -> list[ScoreResult]:
        """Scores the first rows with their own gold answer and with an empty response, before any GPU works. Reward
        models have left the GPUs when it returns: engines size their caches by what is free.

        Raises:
            RewardError: a function failed on one of them, whatever `onError` says.
        """
        for workers in self._models:
            workers.wait_until_loaded()
        requests = [
            ScoreRequest(f"dry run {row.uid} {label}", row.prompt_text, response, row.answer, row.fields, row.messages)
            for row in rows[:num_rows]
            for label, response in (("(gold answer as response)", str(row.answer)), ("(empty response)", ""))
        ]
        for request in requests:
            self.submit(request)
        with self._lock:
            pending, self._pending = self._pending, {}
        limit = _WORKER_START_SECONDS + self.compute_deadline_seconds(len(requests))
        concurrent.futures.wait([future for entry in pending.values() for future in entry.futures], limit)
        results = [self._read(sample_id, entry, limit) for sample_id, entry in pending.items()]
        failed = [result for result in results if result.failure is not None]
        if failed:
            raise RewardError(self._describe_failures(failed[:1], len(failed), len(results)))
        for workers in self._models:
            workers.release_and_wait()
        return results

    def close(self) -> None:
        """Ends the workers."""
        if self._workers is not None:
            self._workers.close()
        if self._http is not None:
            self._http.close()
        for workers in self._models:
            workers.close()

    def _read(self, sample_id: str, pending: _Pending, deadline_seconds: float) -> ScoreResult:
        """The weighted sum of what is there, or the failure; functions in the order of the spec."""
        late = FailureKind.DEADLINE, f"was not scored within {deadline_seconds:g} s"
        result = ScoreResult(sample_id)
        outcomes: Outcomes = {}
        if pending.in_worker is not None:
            if not pending.in_worker.done():
                pending.in_worker.cancel()
                return add_outcome(result, "", 0.0, ScoreFailure(late[0], "", late[1]))
            error = pending.in_worker.exception()
            if error is not None:
                message = f"its scoring worker was lost: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
                return add_outcome(result, "", 0.0, ScoreFailure(FailureKind.WORKER_LOST, "", message))
            outcomes = pending.in_worker.result()
        for plan in self.plans:
            if plan.name in pending.by_server:
                answer = pending.by_server[plan.name]
                if answer.cancelled() or not answer.done():
                    answer.cancel()
                    outcome: Score | ScoreFailure = ScoreFailure(late[0], plan.name, late[1])
                else:
                    outcome = answer.result()
            elif plan.name in outcomes:
                outcome = outcomes[plan.name]
            else:
                continue  # not asked, since a function before it failed
            result = add_outcome(result, plan.name, plan.weight, outcome)
        return result

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


def _has_failed(future: concurrent.futures.Future[Any]) -> bool:
    if future.cancelled() or future.exception() is not None:
        return True
    outcome = future.result()
    return any(
        isinstance(entry, ScoreFailure) for entry in (outcome.values() if isinstance(outcome, dict) else [outcome])
    )


class _LocalWorkers:
    """One thread and one scoring process per worker, in this process."""

    def __init__(self, plans: list[FunctionPlan], num_workers: int) -> None:
        self._scorers = [Scorer(plans) for _ in range(num_workers)]
        self._threads = [
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"reward-{number}")
            for number in range(num_workers)
        ]

    def submit(self, worker: int, request: ScoreRequest) -> concurrent.futures.Future[Outcomes]:
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

    def submit(self, worker: int, request: ScoreRequest) -> concurrent.futures.Future[Outcomes]:
        future: concurrent.futures.Future[Outcomes] = self._actors[worker].score.remote(request).future()
        return future

    def close(self) -> None:
        if not self._ray.is_initialized():
            return  # Ray took its actors along; asking it to kill one would start another Ray
        for actor in self._actors:
            self._ray.kill(actor)
