"""Feeds the processes that hold a reward model: one per GPU, in micro-batches of what has come in meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rljob_api.contract import Layout
from rljob_trainer.errors import ConfigurationError, RewardError
from rljob_trainer.rewards.functions import FunctionPlan
from rljob_trainer.rewards.model import ModelScore, SequenceScorer
from rljob_trainer.rewards.outcome import FailureKind, ScoreFailure, ScoreRequest

MAX_SAMPLES_PER_CALL: Final = 32
"""Samples that a worker takes at once; those that come meanwhile wait for its next call."""
LOAD_SECONDS: Final = 1800.0
"""For reading the weights of the reward model."""
RELEASE_SECONDS: Final = 300.0
"""For moving the weights of the reward model to host memory."""


class ModelHost(Protocol):
    """Where a `SequenceScorer` lives: calls return at once."""

    def load(self) -> Future[None]:
        """Begin to load."""

    def score(self, requests: Sequence[ScoreRequest]) -> Future[list[ModelScore]]:
        """Begin to score."""

    def release(self) -> Future[None]:
        """Free the GPU once idle; done when it is free."""

    def restart(self) -> None:
        """Kill what runs and begin anew."""

    def close(self) -> None:
        """End it."""


@dataclass
class _Call:
    requests: list[tuple[ScoreRequest, Future[ModelScore]]]
    is_settled: bool = False
    timer: threading.Timer | None = None


@dataclass
class _Worker:
    host: ModelHost
    waiting: list[tuple[ScoreRequest, Future[ModelScore]]] = field(default_factory=list)
    running: _Call | None = None


class ModelWorkers:
    """Feeds the hosts of one reward model while generation goes on: each takes what has come in since its last call.

    A call that takes longer than `timeoutSeconds` per sample is a failure of its samples, and its host is killed and
    started again; so is one that died. Thread-safe.
    """

    def __init__(self, plan: FunctionPlan, hosts: Sequence[ModelHost]) -> None:
        """Loading begins at once."""
        self.plan = plan
        self._lock = threading.RLock()
        self._workers = [_Worker(host) for host in hosts]
        self._loading = [host.load() for host in hosts]
        self._turn = 0

    @property
    def num_hosts(self) -> int:
        """Copies of the reward model."""
        return len(self._workers)

    def wait_until_loaded(self, timeout_seconds: float = LOAD_SECONDS) -> None:
        """Raises:
        ConfigurationError: the model cannot be used. RewardError: it was not there in time.
        """
        for loading in self._loading:
            try:
                loading.result(timeout=timeout_seconds)
            except TimeoutError:
                raise RewardError(
                    f"{self.plan.field_path} ({self.plan.name}): the reward model was not loaded within "
                    f"{timeout_seconds:.0f} s"
                ) from None

    def submit(self, request: ScoreRequest) -> Future[ModelScore]:
        """The score to come; failures are values, never exceptions."""
        future: Future[ModelScore] = Future()
        with self._lock:
            # The shortest queue, counting what runs; equal ones in turn.
            self._turn += 1
            order = self._workers[self._turn % len(self._workers) :] + self._workers[: self._turn % len(self._workers)]
            worker = min(order, key=lambda worker: len(worker.waiting) + MAX_SAMPLES_PER_CALL * bool(worker.running))
            worker.waiting.append((request, future))
            self._send(worker)
        return future

    def release(self) -> list[Future[None]]:
        """All samples of a step are scored; done, for each host, when its GPU is free."""
        return [worker.host.release() for worker in self._workers]

    def release_and_wait(self, timeout_seconds: float = RELEASE_SECONDS) -> None:
        """As `release`; returns when the GPUs are free.

        Raises:
            RewardError: they were not in time, or a host is gone.
        """
        for released in self.release():
            try:
                released.result(timeout=timeout_seconds)
            except Exception as error:
                raise RewardError(
                    f"{self.plan.field_path} ({self.plan.name}): the reward model did not leave its GPU within "
                    f"{timeout_seconds:g} s: {type(error).__name__}: {error}"
                ) from error

    def close(self) -> None:
        """End the hosts; what still waits fails."""
        with self._lock:
            for worker in self._workers:
                for _, future in worker.waiting:
                    self._set(future, self._fail(FailureKind.WORKER_LOST, "the run ended"))
                worker.waiting.clear()
                if worker.running is not None and worker.running.timer is not None:
                    worker.running.timer.cancel()
                worker.host.close()

    def _send(self, worker: _Worker) -> None:
        if worker.running is not None or not worker.waiting:
            return
        call = _Call(worker.waiting[:MAX_SAMPLES_PER_CALL])
        del worker.waiting[:MAX_SAMPLES_PER_CALL]
        worker.running = call
        limit = self.plan.timeout_seconds * len(call.requests)
        call.timer = threading.Timer(limit, self._expire, (worker, call, limit))
        call.timer.daemon = True
        call.timer.start()
        answer = worker.host.score([request for request, _ in call.requests])
        answer.add_done_callback(lambda done: self._receive(worker, call, done))

    def _receive(self, worker: _Worker, call: _Call, answer: Future[list[ModelScore]]) -> None:
        with self._lock:
            if call.is_settled:
                return  # it came too late: its samples have failed already
            error = answer.exception() if not answer.cancelled() else RuntimeError("cancelled")
            if error is None:
                self._settle(worker, call, answer.result())
                return
            lines = str(error).strip().splitlines() or [type(error).__name__]
            failure = self._fail(FailureKind.PROCESS_DIED, f"{type(error).__name__}: {lines[-1]}")
            worker.host.restart()
            self._settle(worker, call, [failure] * len(call.requests))

    def _expire(self, worker: _Worker, call: _Call, limit: float) -> None:
        with self._lock:
            if call.is_settled:
                return
            worker.host.restart()
            message = f"{len(call.requests)} samples took longer than {limit:g} s together; the scorer was killed"
            self._settle(worker, call, [self._fail(FailureKind.TIMEOUT, message)] * len(call.requests))

    def _settle(self, worker: _Worker, call: _Call, scores: Sequence[ModelScore]) -> None:
        call.is_settled = True
        if call.timer is not None:
            call.timer.cancel()
        worker.running = None
        for (_, future), score in zip(call.requests, scores, strict=True):
            self._set(future, score)
        self._send(worker)

    def _fail(self, kind: FailureKind, message: str) -> ScoreFailure:
        return ScoreFailure(kind, self.plan.name, message)

    @staticmethod
    def _set(future: Future[ModelScore], score: ModelScore) -> None:
        try:
            future.set_result(score)
        except InvalidStateError:
            return  # cancelled at the deadline of the step


class LocalHost:
    """A thread of this process; a running forward pass cannot be killed, only left behind."""

    def __init__(self, scorer: Callable[[], Any]) -> None:
        """`scorer` makes a `SequenceScorer`."""
        self._make = scorer
        self._start()

    def _start(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._scorer = self._make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    def load(self) -> Future[None]:
        """See `ModelHost`."""
        return self._thread.submit(self._scorer.load)

    def score(self, requests: Sequence[ScoreRequest]) -> Future[list[ModelScore]]:
        """See `ModelHost`."""
        return self._thread.submit(self._scorer.score, requests)

    def release(self) -> Future[None]:
        """See `ModelHost`."""
        return self._thread.submit(self._scorer.release)

    def restart(self) -> None:
        """See `ModelHost`."""
        self.close()
        self._start()
        self.load()

    def close(self) -> None:
        """See `ModelHost`."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class RayHost:
    """An actor on one node without resource shares: it works beside ranks and engines that hold all CPUs and GPUs."""

    def __init__(self, plan: FunctionPlan, device: str, node_id: str) -> None:
        """`device` is `cpu`, or `cuda:<index>` among the node's GPUs."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        # Without GPU shares Ray leaves the node's GPUs visible (since 2.60; it used to hide them all).
        self._actor = (
            ray.remote(num_cpus=0, num_gpus=0, max_restarts=-1)(SequenceScorer)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
            .remote(plan, device)
        )

    def load(self) -> Future[None]:
        """See `ModelHost`."""
        future: Future[None] = Future()
        self._actor.load.remote().future().add_done_callback(lambda done: _pass_on(done, future))
        return future

    def score(self, requests: Sequence[ScoreRequest]) -> Future[list[ModelScore]]:
        """See `ModelHost`."""
        future: Future[list[ModelScore]] = self._actor.score.remote(list(requests)).future()
        return future

    def release(self) -> Future[None]:
        """See `ModelHost`."""
        future: Future[None] = self._actor.release.remote().future()
        return future

    def restart(self) -> None:
        """See `ModelHost`."""
        self._ray.kill(self._actor, no_restart=False)
        self._actor.load.remote()

    def close(self) -> None:
        """See `ModelHost`."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


def _pass_on(done: Future[Any], future: Future[None]) -> None:
    """The actor's own error instead of Ray's wrapper around it."""
    error = done.exception()
    if error is None:
        future.set_result(None)
    else:
        cause = getattr(error, "cause", None)
        future.set_exception(cause if isinstance(cause, ConfigurationError) else error)


def start_model_workers(plan: FunctionPlan, layout: Layout | None) -> ModelWorkers:
    """One worker per GPU of the job, or per node on CPUs; in this process without a layout (no Ray).

    Raises:
        TransientError: the nodes are not there in time.
    """
    if layout is None:
        return ModelWorkers(plan, [LocalHost(lambda: SequenceScorer(plan, "cpu"))])
    from rljob_trainer.distributed.placement import wait_for_nodes

    devices = [f"cuda:{index}" for index in range(layout.gpus_per_node)] or ["cpu"]
    nodes = wait_for_nodes(layout)
    return ModelWorkers(plan, [RayHost(plan, device, node.node_id) for node in nodes for device in devices])
