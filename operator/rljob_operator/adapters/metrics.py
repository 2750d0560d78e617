"""Prometheus metrics of the operator. Per-job series vanish with the job; at most 25 per job, no pod or UID labels."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rljob_api import __version__
from rljob_api.v1alpha1.status import Phase, RLJobStatus
from rljob_operator.scheduler import Key

_WRITE_VERBS: Final = frozenset({"apply", "create", "update", "patch", "delete"})


@dataclass(frozen=True)
class JobMetric:
    """One per-job gauge."""

    name: str
    help: str
    read: Callable[[RLJobStatus], float | None]
    """The value, or None: then the job has no sample."""


def _progress(field: str) -> Callable[[RLJobStatus], float | None]:
    return lambda status: getattr(status.progress, field, None)


def _timestamp(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


JOB_METRICS: Final = (
    JobMetric("rljob_job_step", "Finished training steps.", _progress("step")),
    JobMetric("rljob_job_total_steps", "Steps of the whole run.", _progress("total_steps")),
    JobMetric("rljob_job_reward_mean", "Mean reward of the last step's samples.", _progress("reward_mean")),
    JobMetric(
        "rljob_job_evaluation_reward_mean",
        "Mean reward of the last held-out evaluation.",
        _progress("evaluation_reward_mean"),
    ),
    JobMetric("rljob_job_kl_mean", "KL divergence to the reference, nats per token.", _progress("kl_mean")),
    JobMetric("rljob_job_entropy", "Mean token entropy, nats.", _progress("entropy")),
    JobMetric("rljob_job_response_tokens_mean", "Mean response length, tokens.", _progress("response_tokens_mean")),
    JobMetric("rljob_job_tokens_per_second", "Tokens per second of the last step.", _progress("tokens_per_second")),
    JobMetric("rljob_job_step_seconds", "Wall time of the last step, seconds.", _progress("step_seconds")),
    JobMetric("rljob_job_attempt", "Number of the current attempt.", lambda status: status.attempt),
    JobMetric("rljob_job_cluster_generation", "Number of the current RayCluster.", lambda s: s.cluster_generation),
    JobMetric("rljob_job_retries_counted", "Retries counted against maxRetries.", lambda s: s.retries.counted),
    JobMetric("rljob_job_retries_free", "Retries after lost pods and preemption.", lambda s: s.retries.free),
    JobMetric(
        "rljob_job_checkpoint_step",
        "Step of the newest complete checkpoint.",
        lambda s: s.checkpoint.step if s.checkpoint else None,
    ),
    JobMetric(
        "rljob_job_checkpoint_timestamp_seconds",
        "When the newest complete checkpoint was published, Unix time.",
        lambda s: _timestamp(s.checkpoint.time) if s.checkpoint else None,
    ),
    JobMetric(
        "rljob_job_start_timestamp_seconds",
        "When the first cluster was created, Unix time.",
        lambda status: _timestamp(status.start_time),
    ),
    JobMetric(
        "rljob_job_completion_timestamp_seconds",
        "When the job ended, Unix time.",
        lambda status: _timestamp(status.completion_time),
    ),
    JobMetric(
        "rljob_job_gpu_seconds",
        "GPUs x running seconds over all attempts.",
        lambda s: s.goodput.gpu_seconds if s.goodput else None,
    ),
    JobMetric(
        "rljob_job_useful_gpu_seconds",
        "The part of rljob_job_gpu_seconds whose steps were not lost.",
        lambda s: s.goodput.useful_gpu_seconds if s.goodput else None,
    ),
)
"""Every per-job gauge; labels namespace and name."""

PHASES_METRIC: Final = "rljob_operator_jobs"


class Metrics:
    """One registry per operator, so that two can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._statuses: dict[Key, RLJobStatus] = {}
        self.reconciles = Counter(
            "rljob_operator_reconcile",
            "Reconciles by result (ok, error).",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "rljob_operator_reconcile_duration_seconds",
            "Duration of one reconcile, seconds.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self._writes = Counter(
            "rljob_operator_api_writes",
            "Writes to the API server by kind and verb, refused ones included.",
            ["kind", "verb"],
            registry=self.registry,
        )
        self._errors = Counter(
            "rljob_operator_api_errors",
            "Requests to the API server that failed, by verb and status (0: no answer).",
            ["verb", "status"],
            registry=self.registry,
        )
        self.leader = Gauge("rljob_operator_leader", "1 while this replica holds the Lease.", registry=self.registry)
        self._queue_depth = Gauge(
            "rljob_operator_queue_depth", "RLJobs that are due and wait for a free worker.", registry=self.registry
        )
        self._running = Gauge("rljob_operator_reconciles_running", "Reconciles in progress.", registry=self.registry)
        info = Gauge("rljob_operator_build_info", "Always 1.", ["version"], registry=self.registry)
        info.labels(version=__version__).set(1)
        for result in ("ok", "error"):  # a series that exists from the start: rate() sees the first error
            self.reconciles.labels(result=result)
        self.registry.register(_JobCollector(self._statuses))

    def observe_request(self, verb: str, kind: str, status: int) -> None:
        """One API request ended; status 0 when no answer came."""
        if verb in _WRITE_VERBS:
            self._writes.labels(kind=kind, verb=verb).inc()
        # 404 and 409 are ordinary answers to get, create and update.
        if status == 0 or (status >= 400 and status not in (404, 409)):
            self._errors.labels(verb=verb, status=str(status)).inc()

    def observe_job(self, key: Key, status: RLJobStatus) -> None:
        """The newest status of a job."""
        self._statuses[key] = status

    def forget_job(self, key: Key) -> None:
        """The job is gone: all its series end."""
        self._statuses.pop(key, None)

    def watch_queue(self, num_queued: Callable[[], float], num_running: Callable[[], float]) -> None:
        """Read queue depth and running reconciles at scrape time."""
        self._queue_depth.set_function(num_queued)
        self._running.set_function(num_running)


class _JobCollector(Collector):
    """Builds the per-job families at scrape time from what is known then: nothing to clean up."""

    def __init__(self, statuses: dict[Key, RLJobStatus]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[GaugeMetricFamily]:
        statuses = list(self._statuses.items())
        phases = GaugeMetricFamily(PHASES_METRIC, "RLJobs by phase.", labels=["phase"])
        tally = Tally(status.phase for _, status in statuses)
        for phase in Phase:
            phases.add_metric([str(phase)], tally[phase])
        yield phases
        for metric in JOB_METRICS:
            family = GaugeMetricFamily(metric.name, metric.help, labels=["namespace", "name"])
            for key, status in statuses:
                value = metric.read(status)
                if value is not None:
                    family.add_metric([key.namespace, key.name], value)
            yield family
        active = GaugeMetricFamily("rljob_job_phase", "1 for the job's phase.", labels=["namespace", "name", "phase"])
        for key, status in statuses:
            if status.phase is not None:
                active.add_metric([key.namespace, key.name, str(status.phase)], 1)
        yield active
