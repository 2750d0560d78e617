"""What the RLJob dashboard shows: one table of rows and panels.

Metric names come from `rljob_trainer.telemetry` (prefix `rljob_`) and `rljob_operator.adapters.metrics` (`rljob_job_`,
`rljob_operator_`); a test compares them with the code. Gauges are aggregated by job, so that the lines of attempts,
which run in different pods, join.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

JOB: Final = 'namespace=~"$namespace", name=~"$name"'
OPERATOR: Final = 'job=~"$operator"'
BY_JOB: Final = "by (namespace, name)"
JOB_LEGEND: Final = "{{namespace}}/{{name}}"


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel; `width` in Grafana's 24 columns."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """A titled group of panels."""

    title: str
    panels: tuple[Panel, ...]


def latest(metric: str, legend: str = JOB_LEGEND) -> Query:
    """A gauge per job."""
    return Query(f"max {BY_JOB} ({metric}{{{JOB}}})", legend)


def growth(metric: str, legend: str) -> Query:
    """What a counter gained in the interval, per job."""
    return Query(f"sum {BY_JOB} (increase({metric}{{{JOB}}}[$__rate_interval]))", legend)


ROWS: Final = (
    Row(
        "Now",
        (
            Panel("Step", "Finished training steps.", "none", (latest("rljob_step"),), kind="stat", width=4),
            Panel(
                "Held-out reward",
                "Mean reward of the last evaluation on validation prompts.",
                "none",
                (latest("rljob_evaluation_reward_mean"),),
                kind="stat",
                width=4,
            ),
            Panel(
                "Throughput",
                "Prompt and response tokens per second of the last step.",
                "cps",
                (latest("rljob_tokens_per_second"),),
                kind="stat",
                width=4,
            ),
            Panel(
                "Attempt",
                "Number of the current attempt; above 1 after retries or a suspension.",
                "none",
                (latest("rljob_job_attempt"),),
                kind="stat",
                width=4,
            ),
            Panel(
                "Checkpoint age",
                "Time since the newest complete checkpoint: what a failure now would cost.",
                "s",
                (
                    Query(
                        f"time() - max {BY_JOB} (rljob_checkpoint_timestamp_seconds{{{JOB}}})",
                        JOB_LEGEND,
                    ),
                ),
                kind="stat",
                width=4,
            ),
            Panel(
                "Phase",
                "Phase of each job, as `kubectl get rljobs` shows it.",
                "none",
                (Query(f"max by (namespace, name, phase) (rljob_job_phase{{{JOB}}})", "{{name}}: {{phase}}"),),
                kind="stat",
                width=4,
            ),
        ),
    ),
    Row(
        "Learning",
        (
            Panel(
                "Reward",
                "Mean reward of the training samples of a step, and of the held-out evaluation.",
                "none",
                (
                    latest("rljob_reward_mean", "train {{name}}"),
                    latest("rljob_evaluation_reward_mean", "held-out {{name}}"),
                ),
                width=12,
            ),
            Panel(
                "KL",
                "KL divergence per token (nats) to the reference, or to the rollout policy when there is no reference.",
                "none",
                (latest("rljob_kl_mean"),),
                width=6,
            ),
            Panel(
                "Entropy",
                "Mean token entropy (nats). A fall towards zero is a collapse.",
                "none",
                (latest("rljob_entropy"),),
                width=6,
            ),
            Panel(
                "Response length",
                "Mean tokens of a response.",
                "none",
                (latest("rljob_response_tokens_mean"),),
                width=6,
            ),
            Panel(
                "Gradient norm",
                "Global gradient norm before clipping.",
                "none",
                (latest("rljob_gradient_norm"),),
                width=6,
            ),
            Panel(
                "Clipped tokens",
                "Share of tokens whose probability ratio was clipped.",
                "percentunit",
                (latest("rljob_clip_fraction"),),
                width=6,
            ),
            Panel(
                "Critic",
                "Share of the returns' variance that the critic knew before its update (PPO). Near 0 or below: raise "
                "the critic's learning rate, its epochs per step or its warm-up steps.",
                "none",
                (latest("rljob_value_explained_variance"),),
                width=6,
            ),
            Panel("Learning rate", "Learning rate of the policy.", "none", (latest("rljob_learning_rate"),), width=6),
        ),
    ),
    Row(
        "Rewards and evaluation",
        (
            Panel(
                "Reward functions",
                "Mean unweighted score of each reward function in a step.",
                "none",
                (
                    Query(
                        f"max by (namespace, name, function) (rljob_reward_function_mean{{{JOB}}})",
                        "{{function}} {{name}}",
                    ),
                ),
                width=8,
            ),
            Panel(
                "Validation sets",
                "Mean reward of the held-out evaluation, by validation set.",
                "none",
                (
                    Query(
                        f"max by (namespace, name, set) (rljob_evaluation_set_reward_mean{{{JOB}}})",
                        "{{set}} {{name}}",
                    ),
                ),
                width=8,
            ),
            Panel(
                "pass@k and maj@k",
                "Of evaluation.samplesPerPrompt samples: at least one passes, and reward of the most frequent answer.",
                "none",
                (
                    Query(f"max by (namespace, name, set) (rljob_evaluation_pass{{{JOB}}})", "pass {{set}} {{name}}"),
                    Query(
                        f"max by (namespace, name, set) (rljob_evaluation_majority{{{JOB}}})",
                        "maj {{set}} {{name}}",
                    ),
                ),
                width=8,
            ),
        ),
    ),
    Row(
        "Speed",
        (
            Panel(
                "Where a step's time goes",
                "Seconds of the last step by phase. Reward is the wait after generation ended; the two overlap.",
                "s",
                (Query(f"avg by (phase) (rljob_phase_seconds{{{JOB}}})", "{{phase}}"),),
                width=12,
                stacked=True,
            ),
            Panel(
                "Tokens per second",
                "Prompt and response tokens processed, averaged over the interval.",
                "cps",
                (Query(f"sum {BY_JOB} (rate(rljob_tokens_total{{{JOB}}}[$__rate_interval]))", JOB_LEGEND),),
                width=6,
            ),
            Panel("Step time", "Wall time of the last step.", "s", (latest("rljob_step_seconds"),), width=6),
        ),
    ),
    Row(
        "Resilience",
        (
            Panel(
                "Attempts and retries",
                "Attempts so far. Counted retries use up maxRetries; free ones follow lost pods and preemption.",
                "none",
                (
                    latest("rljob_job_attempt", "attempt {{name}}"),
                    latest("rljob_job_retries_counted", "counted {{name}}"),
                    latest("rljob_job_retries_free", "free {{name}}"),
                ),
            ),
            Panel(
                "Skipped updates and dropped samples",
                "Updates skipped for NaN or Inf, and samples without a usable reward.",
                "short",
                (
                    growth("rljob_nan_steps_total", "NaN updates {{name}}"),
                    growth("rljob_dropped_samples_total", "dropped samples {{name}}"),
                ),
            ),
            Panel(
                "Goodput",
                "Share of the GPU time whose steps were not lost to failures.",
                "percentunit",
                (
                    Query(
                        f"sum {BY_JOB} (rljob_job_useful_gpu_seconds{{{JOB}}})"
                        f" / (sum {BY_JOB} (rljob_job_gpu_seconds{{{JOB}}}) > 0)",
                        JOB_LEGEND,
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Operator",
        (
            Panel(
                "Jobs by phase",
                "RLJobs the operator knows.",
                "none",
                (Query(f"max by (phase) (rljob_operator_jobs{{{OPERATOR}}})", "{{phase}}"),),
                stacked=True,
            ),
            Panel(
                "Reconciles",
                "Reconciles per second by result.",
                "ops",
                (
                    Query(
                        f"sum by (result) (rate(rljob_operator_reconcile_total{{{OPERATOR}}}[$__rate_interval]))",
                        "{{result}}",
                    ),
                ),
            ),
            Panel(
                "Reconcile duration",
                "Median and 99th percentile of one reconcile, calls to Ray and the trainer included.",
                "s",
                tuple(
                    Query(
                        f"histogram_quantile({quantile}, sum by (le) "
                        f"(rate(rljob_operator_reconcile_duration_seconds_bucket{{{OPERATOR}}}[$__rate_interval])))",
                        f"p{quantile * 100:g}",
                    )
                    for quantile in (0.5, 0.99)
                ),
            ),
            Panel(
                "API writes",
                "Writes to the API server per second by kind.",
                "wps",
                (
                    Query(
                        f"sum by (kind, verb) (rate(rljob_operator_api_writes_total{{{OPERATOR}}}[$__rate_interval]))",
                        "{{verb}} {{kind}}",
                    ),
                ),
            ),
            Panel(
                "Queue",
                "RLJobs that are due and wait for a worker, and reconciles in progress.",
                "none",
                (
                    Query(f"sum(rljob_operator_queue_depth{{{OPERATOR}}})", "waiting"),
                    Query(f"sum(rljob_operator_reconciles_running{{{OPERATOR}}})", "running"),
                ),
            ),
            Panel(
                "Leader",
                "Replicas that hold the Lease: one, or zero for a few seconds during a change.",
                "none",
                (Query(f"sum(rljob_operator_leader{{{OPERATOR}}})", "leaders"),),
            ),
        ),
    ),
)
