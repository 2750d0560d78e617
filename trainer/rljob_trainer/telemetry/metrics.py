"""Prometheus metrics of the driver: one table, one registry, read from a snapshot at every scrape.

Labels are bounded: name and namespace of the job; the phase for phase times; reward functions, validation sets and
trackers of the specification. No rank, pod, step or prompt is ever a
label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_trainer.telemetry.state import Snapshot, TelemetryState, parse_time
from rljob_trainer.telemetry.statistics import StepStatistics

PREFIX: Final = "rljob_"
# Not `job`: Prometheus gives every target a label of that name. The operator's per-job series use the same two.
LABELS: Final = ("name", "namespace")

Value = float | Mapping[str, float] | None
"""None: not there yet (the series is absent); a mapping: one series per phase."""


@dataclass(frozen=True)
class MetricSpec:
    """One metric."""

    name: str
    """Without the prefix; counters end with `_total`."""
    kind: Literal["gauge", "counter"]
    """Prometheus type."""
    unit: str
    """Unit, for people; seconds and tokens also stand in the name."""
    help: str
    """What it measures."""
    read: Callable[[Snapshot], Value]
    """Its value."""
    label: str | None = None
    """Further label, when `read` gives a mapping."""


def _of_last(read: Callable[[StepStatistics], float | None]) -> Callable[[Snapshot], Value]:
    """Of the last finished step; an undefined statistic is NaN (Prometheus knows NaN, JSON does not)."""

    def get(snapshot: Snapshot) -> Value:
        if snapshot.last is None:
            return None
        value = read(snapshot.last)
        return math.nan if value is None else value

    return get


def _read_function_means(snapshot: Snapshot) -> Value:
    """Only the functions: the further numbers a function returns (`<function>/<key>`) are not bounded."""
    if snapshot.last is None:
        return None
    return {name: mean for name, mean in snapshot.last.reward_function_means.items() if "/" not in name}


def _of_sets(key: str) -> Callable[[Snapshot], Value]:
    """Of each validation set; a key that ends with `_` is completed by the largest number there is (pass_at_8)."""

    def get(snapshot: Snapshot) -> Value:
        values: dict[str, float] = {}
        for name, statistics in snapshot.evaluation_sets.items():
            numbers = [int(found[len(key) :]) for found in statistics if key.endswith("_") and found.startswith(key)]
            full_key = f"{key}{max(numbers)}" if numbers else key
            if full_key in statistics:
                values[name] = statistics[full_key]
        return values or None

    return get


def _of_last_or_absent(read: Callable[[StepStatistics], float | None]) -> Callable[[Snapshot], Value]:
    """Of the last finished step; jobs that do not have it (a critic's loss) have no such series."""
    return lambda snapshot: None if snapshot.last is None else read(snapshot.last)


def _read_checkpoint_time(snapshot: Snapshot) -> Value:
    checkpoint = snapshot.progress.checkpoint
    return None if checkpoint is None else parse_time(checkpoint.time)


METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec("step", "gauge", "steps", "Finished training steps.", lambda s: s.progress.progress.step),
    MetricSpec("total_steps", "gauge", "steps", "Steps of the whole run.", lambda s: s.progress.progress.total_steps),
    MetricSpec("epoch", "gauge", "epochs", "Passes over the training prompts so far.", _of_last(lambda s: s.epoch)),
    MetricSpec(
        "reward_mean",
        "gauge",
        "reward",
        "Mean reward of the last step's scored samples.",
        _of_last(lambda s: s.reward_mean),
    ),
    MetricSpec(
        "reward_std",
        "gauge",
        "reward",
        "Standard deviation of the last step's rewards.",
        _of_last(lambda s: s.reward_std),
    ),
    MetricSpec(
        "evaluation_reward_mean",
        "gauge",
        "reward",
        "Mean reward of the last held-out evaluation.",
        lambda s: s.progress.progress.evaluation_reward_mean,
    ),
    MetricSpec(
        "reward_function_mean",
        "gauge",
        "reward",
        "Mean unweighted score of each reward function in the last step.",
        _read_function_means,
        label="function",
    ),
    MetricSpec(
        "evaluation_set_reward_mean",
        "gauge",
        "reward",
        "Mean reward of the last held-out evaluation, by validation set.",
        _of_sets("reward_mean"),
        label="set",
    ),
    MetricSpec(
        "evaluation_pass",
        "gauge",
        "ratio",
        "Probability that one of evaluation.samplesPerPrompt samples passes (pass@k), by validation set.",
        _of_sets("pass_at_"),
        label="set",
    ),
    MetricSpec(
        "evaluation_majority",
        "gauge",
        "reward",
        "Reward of the answer that most of evaluation.samplesPerPrompt samples give (maj@k), by validation set.",
        _of_sets("majority_at_"),
        label="set",
    ),
    MetricSpec(
        "kl_mean",
        "gauge",
        "nats per token",
        "KL to the reference policy, or to the rollout policy when there is no reference.",
        _of_last(lambda s: s.kl_mean),
    ),
    MetricSpec(
        "entropy", "gauge", "nats per token", "Mean token entropy of the policy.", _of_last(lambda s: s.entropy)
    ),
    MetricSpec(
        "response_tokens_mean", "gauge", "tokens", "Mean response length.", _of_last(lambda s: s.response_tokens_mean)
    ),
    MetricSpec(
        "loss", "gauge", "loss", "Policy loss of the last step, mean over its updates.", _of_last(lambda s: s.loss)
    ),
    MetricSpec(
        "gradient_norm",
        "gauge",
        "norm",
        "Global gradient norm before clipping, mean over the step's updates.",
        _of_last(lambda s: s.gradient_norm),
    ),
    MetricSpec(
        "clip_fraction",
        "gauge",
        "ratio",
        "Share of tokens whose probability ratio was clipped.",
        _of_last(lambda s: s.clip_fraction),
    ),
    MetricSpec(
        "value_loss",
        "gauge",
        "loss",
        "Loss of the critic in the last step, mean over its updates; absent without a critic.",
        _of_last_or_absent(lambda s: s.value_loss),
    ),
    MetricSpec(
        "value_clip_fraction",
        "gauge",
        "ratio",
        "Share of tokens whose value left the critic's clip range; absent without a critic.",
        _of_last_or_absent(lambda s: s.value_clip_fraction),
    ),
    MetricSpec(
        "value_explained_variance",
        "gauge",
        "ratio",
        "Share of the returns' variance that the critic knew before the update; absent without a critic.",
        _of_last_or_absent(lambda s: s.value_explained_variance),
    ),
    MetricSpec(
        "learning_rate",
        "gauge",
        "learning rate",
        "Learning rate of the last step.",
        _of_last(lambda s: s.learning_rate),
    ),
    MetricSpec(
        "tokens_per_second",
        "gauge",
        "tokens per second",
        "Prompt and response tokens of the last step over its wall time.",
        lambda s: s.progress.progress.tokens_per_second,
    ),
    MetricSpec("step_seconds", "gauge", "seconds", "Wall time of the last step.", _of_last(lambda s: s.step_seconds)),
    MetricSpec(
        "phase_seconds",
        "gauge",
        "seconds",
        "Where the last step's time went.",
        lambda s: s.phase_seconds if s.last is not None else None,
        label="phase",
    ),
    MetricSpec(
        "rollout_ahead_seconds",
        "gauge",
        "seconds",
        "Wall time of the last step's rollout, beside the training of the step before; absent where they take turns.",
        _of_last_or_absent(lambda s: s.rollout_ahead_seconds),
    ),
    MetricSpec(
        "weight_version",
        "gauge",
        "version",
        "Version of the weights that the rollout engines hold.",
        lambda s: s.progress.progress.weight_version,
    ),
    MetricSpec(
        "checkpoint_step",
        "gauge",
        "steps",
        "Step of the newest complete checkpoint.",
        lambda s: None if s.progress.checkpoint is None else s.progress.checkpoint.step,
    ),
    MetricSpec(
        "checkpoint_timestamp_seconds",
        "gauge",
        "seconds",
        "Unix time of the newest complete checkpoint.",
        _read_checkpoint_time,
    ),
    MetricSpec(
        "heartbeat_timestamp_seconds",
        "gauge",
        "seconds",
        "Unix time of the last sign of progress inside a phase.",
        lambda s: s.heartbeat_seconds,
    ),
    MetricSpec("attempt", "gauge", "attempts", "Attempt that reports.", lambda s: s.progress.attempt),
    MetricSpec(
        "resumed_from_step",
        "gauge",
        "steps",
        "Checkpoint step this attempt started from; absent when it started from the beginning.",
        lambda s: s.progress.resumed_from_step,
    ),
    MetricSpec(
        "tokens_total", "counter", "tokens", "Prompt and response tokens trained on.", lambda s: s.num_tokens_total
    ),
    MetricSpec(
        "nan_steps_total",
        "counter",
        "updates",
        "Updates skipped because loss or gradient were NaN or infinite.",
        lambda s: s.last.num_nan_steps_total if s.last is not None else 0,
    ),
    MetricSpec(
        "dropped_samples_total",
        "counter",
        "samples",
        "Samples left out because they have no reward.",
        lambda s: s.num_dropped_samples_total,
    ),
    MetricSpec(
        "nan_rewards_total",
        "counter",
        "samples",
        "Samples left out because a reward function returned NaN or an infinity.",
        lambda s: s.num_nan_rewards_total,
    ),
    MetricSpec(
        "reward_timeouts_total",
        "counter",
        "samples",
        "Samples whose reward function was killed on its time limit.",
        lambda s: s.num_reward_timeouts_total,
    ),
    MetricSpec(
        "tracker_failures_total",
        "counter",
        "calls",
        "Calls that an experiment tracker refused or did not answer; training goes on.",
        lambda s: s.num_tracker_failures_total or None,
        label="tracker",
    ),
)
"""Every metric of the trainer; the reference page is generated from it."""


class TrainerCollector(Collector):
    """Builds all metrics from one snapshot per scrape: two Prometheus replicas see the same full set."""

    def __init__(self, state: TelemetryState, *, job: str, namespace: str) -> None:
        """`job` and `namespace` become the labels of every series."""
        self._state = state
        self._labels = [job, namespace]

    def collect(self) -> Iterable[Metric]:
        """All metrics that have a value."""
        snapshot = self._state.take_snapshot()
        for spec in METRICS:
            value = spec.read(snapshot)
            if value is not None:
                yield self._build(spec, value)

    def describe(self) -> Iterable[Metric]:
        """Names without values, so that registering takes no snapshot."""
        return [self._build(spec, {}) for spec in METRICS]

    def _build(self, spec: MetricSpec, value: float | Mapping[str, float]) -> Metric:
        family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        labels = [*LABELS, spec.label] if spec.label else list(LABELS)
        metric = family(PREFIX + spec.name, spec.help, labels=labels)
        if isinstance(value, Mapping):
            for name, part in value.items():
                metric.add_metric([*self._labels, name], part)
        else:
            metric.add_metric(self._labels, value)
        return metric


def build_registry(state: TelemetryState, *, job: str, namespace: str) -> CollectorRegistry:
    """A registry of its own: process metrics and those of libraries stay out."""
    registry = CollectorRegistry()
    registry.register(TrainerCollector(state, job=job, namespace=namespace))
    return registry
