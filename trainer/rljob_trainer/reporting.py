"""From what the loop says to progress, metrics, samples and console."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rljob_api.contract import ResolvedJob, TrainerPhase, TrainerState, Verdict
from rljob_api.v1alpha1.algorithm import Algorithm, KLPlacement, RolloutCorrectionLevel
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoint.files import Checkpoint
from rljob_trainer.dynamic_sampling import CollectedBatch
from rljob_trainer.evaluation import EvaluationMetrics
from rljob_trainer.experience import ExperienceStatistics, ShapingReport
from rljob_trainer.rewards import ScoreFailure, summarise_rewards
from rljob_trainer.rollout import ScoredSample
from rljob_trainer.rows import UpdateMetrics, ValueMetrics
from rljob_trainer.telemetry import (
    Console,
    MetricsWriter,
    SampleRecord,
    SampleWriter,
    StepStatistics,
    TelemetryState,
    write_summary,
)
from rljob_trainer.telemetry.console import format_number
from rljob_trainer.telemetry.trackers.hub import TrackerHub

WARM_START_LINE_EVERY = 20


@dataclass(frozen=True)
class CriticReport:
    """The critic's part of a step."""

    updates: list[ValueMetrics]
    learning_rate: float
    explained_variance: float | None
    """Of the returns, by the values before the updates; None without varying returns."""


@dataclass(frozen=True)
class StepReport:
    """One finished step."""

    step: int
    epoch: float
    statistics: ExperienceStatistics
    updates: list[UpdateMetrics]
    learning_rate: float
    seconds: float
    weight_version: int | None
    """That the engines hold after the step."""
    num_nan_steps: int
    """Updates skipped for NaN or Inf since the run began."""
    num_tokens_total: int
    batch: CollectedBatch
    shaping: ShapingReport
    kl_coefficient: float
    """Of this step; the adaptive controller moves it after each one."""
    critic: CriticReport | None = None
    """PPO."""
    greedy_samples: list[ScoredSample] | None = None
    """ReMax: one per prompt, not trained on."""
    rollout_ahead_seconds: float | None = None
    """Of the rollout that ran beside the training of the step before; None where they take turns."""


class RunReporter:
    """The loop's only way out. Called from the driver's thread."""

    def __init__(self, job: ResolvedJob, state: TelemetryState, console: Console) -> None:
        self._job, self._state, self._console = job, state, console
        self._directory = Path(job.paths.run_directory)
        self._metrics: MetricsWriter | None = None
        self._samples: SampleWriter | None = None
        self._total_steps = 0
        self._started = time.monotonic()
        self._statistics: StepStatistics | None = None
        self._checkpoint: Checkpoint | None = None
        self._trackers: TrackerHub | None = None

    def phase(self, phase: TrainerPhase) -> AbstractContextManager[None]:
        """Time and heartbeat of a phase."""
        return self._state.phase(phase)

    def heartbeat(self) -> None:
        """Progress inside a phase."""
        self._state.heartbeat()

    def count_samples(self, _: int) -> None:
        """Finished samples of a rollout are progress."""
        self._state.heartbeat()

    def note(self, text: str) -> None:
        """A line for people."""
        self._console.note(text)

    def start_training(
        self, *, step: int, total_steps: int, resumed_from: Checkpoint | None, num_parameters: int, note: str
    ) -> None:
        """The first step is about to start; metrics after a resumed step are dropped, since they will be repeated."""
        resumed_step = None if resumed_from is None else step
        self._checkpoint, self._total_steps = resumed_from, total_steps
        self._metrics = MetricsWriter(self._directory, resumed_from_step=resumed_step)
        self._samples = SampleWriter(self._directory, resumed_from_step=resumed_step)
        self._trackers = TrackerHub(
            self._job,
            is_new_run=resumed_step is None and self._job.attempt == 1,
            warn=self.note,
            count_failure=self._state.count_tracker_failure,
        )
        self._state.start_training(
            total_steps=total_steps,
            step=step,
            resumed_from_step=resumed_step,
            checkpoint=None if resumed_from is None else _describe(resumed_from),
        )
        layout = self._job.layout
        self.note(
            f"{self._job.name}: {num_parameters:,} parameters on {layout.world_size} ranks, {layout.num_engines} "
            f"{self._job.engine} engines; steps {step + 1} to {total_steps} ({note}); state in {self._directory}"
        )
        self._console.start("train", total=total_steps, completed=step)

    def report_warm_start(self, step: int, total_steps: int, metrics: UpdateMetrics) -> None:
        """One supervised step."""
        self._state.heartbeat()
        if step == 1:
            self._console.start("warm start", total=total_steps)
        self._console.update(step, total_steps, f"loss {metrics.loss:.3f}", every=WARM_START_LINE_EVERY)

    def report_step(self, report: StepReport) -> None:
        """Metrics and samples of a step; progress follows in `finish_step`, after evaluation and checkpoint."""
        statistics, updates = report.statistics, report.updates
        rewards = summarise_rewards([sample.result for sample in report.batch.all_samples])
        num_tokens = statistics.num_prompt_tokens + statistics.num_response_tokens
        # Without a reference the KL to watch is the one to the policy that generated.
        uses_reference = str(self._job.spec.algorithm.kl.placement) != "None"
        self._statistics = StepStatistics(
            step=report.step,
            step_seconds=report.seconds,
            num_tokens=num_tokens,
            epoch=report.epoch,
            reward_mean=statistics.reward_mean,
            reward_std=statistics.reward_std,
            reward_function_means=rewards.function_means,
            kl_mean=_mean([update.kl if uses_reference else update.rollout_kl for update in updates]),
            entropy=_mean([update.entropy for update in updates]),
            response_tokens_mean=statistics.response_tokens_mean,
            loss=_mean([update.loss for update in updates]),
            gradient_norm=_mean([update.gradient_norm for update in updates]),
            clip_fraction=_mean([update.clip_fraction for update in updates]),
            **({} if report.critic is None else _summarise_critic(report.critic)),
            learning_rate=report.learning_rate,
            weight_version=report.weight_version,
            num_nan_steps_total=report.num_nan_steps,
            num_dropped_samples=rewards.num_dropped,
            num_nan_rewards=rewards.num_nan,
            num_reward_timeouts=rewards.num_timeouts,
            num_tokens_total=report.num_tokens_total,
            rollout_ahead_seconds=report.rollout_ahead_seconds,
        )
        row = asdict(self._statistics) | {
            "rollout_kl_mean": _mean([update.rollout_kl for update in updates]),
            # Without an update (the critic's warm-up) there is nothing to say about the policy.
            "ratio_max_deviation": max((update.ratio_max_deviation for update in updates), default=None),
            "num_updates": len(updates),
            "num_skipped_updates": sum(not update.is_finite for update in updates),
            "num_samples": statistics.num_samples,
            # The policy that a step starts from has the step's number as its version.
            "staleness_steps": report.step - statistics.weight_version_min,
            "truncated_fraction": statistics.truncated_fraction,
            "zero_variance_group_fraction": statistics.zero_variance_group_fraction,
        }
        row |= _describe_algorithm(self._job.spec.algorithm, report)
        if report.critic is not None:
            row |= _describe_critic(report.critic)
        if report.greedy_samples is not None:
            row |= _describe_greedy(report.greedy_samples)
        if self._metrics is not None:
            self._metrics.write(row)
        if self._trackers is not None:
            self._trackers.log_step(report.step, row)
        every = self._job.spec.tracking.sample_every_steps
        if every and report.step % every == 0:
            self._write_samples(report.step, report.batch.all_samples, "train")

    def report_evaluation(
        self,
        step: int,
        statistics: ExperienceStatistics,
        samples: list[ScoredSample],
        sets: Mapping[str, EvaluationMetrics],
    ) -> None:
        """One held-out evaluation: all samples together, and each validation set by its name."""
        rows = {name: metrics.as_row() for name, metrics in sets.items()}
        self._state.record_evaluation(statistics.reward_mean, rows)
        row = {
            "step": step,
            "evaluation_reward_mean": statistics.reward_mean,
            "evaluation_response_tokens_mean": statistics.response_tokens_mean,
            "evaluation_truncated_fraction": statistics.truncated_fraction,
            "num_evaluation_samples": statistics.num_samples,
            "evaluation": rows,
        }
        if self._metrics is not None:
            self._metrics.write(row)
        if self._trackers is not None:
            self._trackers.log_evaluation(step, {"reward_mean": statistics.reward_mean, **rows})
        self._write_samples(step, samples, "evaluation")
        details = "; ".join(f"{name} {_describe_set(metrics)}" for name, metrics in sets.items())
        mean = format_number(statistics.reward_mean)
        self.note(f"held-out reward after step {step}: {mean} ({statistics.num_samples} samples; {details})")

    def report_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was published."""
        self._checkpoint = checkpoint
        self._state.record_checkpoint(_describe(checkpoint))

    def finish_step(self) -> None:
        """Everything of the step is done."""
        if self._statistics is None:
            return
        self._state.finish_step(self._statistics)
        self._console.show_step(
            self._statistics,
            total_steps=self._total_steps,
            phase_seconds=self._state.last_phase_seconds,
            seconds_left=self._state.estimate_seconds_left(),
        )

    def finish_run(self, verdict: Verdict, state: TrainerState) -> None:
        """Close files, publish the verdict, and show the summary of a run that got anywhere."""
        self._state.set_verdict(verdict, state)
        self._console.stop()
        for writer in (self._metrics, self._samples):
            if writer is not None:
                writer.close()
        if self._trackers is not None:
            self._trackers.close(succeeded=state is TrainerState.SUCCEEDED)
        if self._statistics is not None and state is not TrainerState.FAILED:
            export = self._directory / "export" / f"step-{self._statistics.step}"
            self.note(
                write_summary(
                    self._directory,
                    name=self._job.name,
                    seconds=time.monotonic() - self._started,
                    checkpoint_path=None if self._checkpoint is None else str(self._checkpoint.path),
                    export_path=str(export) if export.exists() else None,
                )
            )

    def _write_samples(self, step: int, samples: Sequence[ScoredSample], kind: str) -> None:
        if self._samples is None or not self._job.spec.tracking.sample_every_steps:
            return
        records = [
            SampleRecord(
                uid=sample.row.uid,
                prompt=sample.row.prompt_text,
                response=sample.text,
                reward=sample.result.reward,
                answer=sample.row.answer,
                scores=sample.result.scores,
                prediction=sample.result.prediction,
                failure=_describe_failure(sample.result.failure),
            )
            for sample in samples
        ]
        self._samples.write_samples(step, records, kind=kind)


def _describe_failure(failure: ScoreFailure | None) -> str | None:
    """`math: Timeout: took longer than ...`."""
    return None if failure is None else f"{failure.function or 'reward'}: {failure.kind}: {failure.message}"


def _describe_set(metrics: EvaluationMetrics) -> str:
    """`0.512, pass@8 0.750, maj@8 0.600`."""
    parts = [format_number(metrics.reward_mean)]
    for name, values in (("pass", metrics.pass_at), ("maj", metrics.majority_at)):
        if values and max(values) > 1:
            parts.append(f"{name}@{max(values)} {format_number(values[max(values)])}")
    return ", ".join(parts)


def _describe(checkpoint: Checkpoint) -> CheckpointStatus:
    return CheckpointStatus(step=checkpoint.step, path=str(checkpoint.path), time=checkpoint.manifest.time)


def _describe_algorithm(algorithm: Algorithm, report: StepReport) -> dict[str, Any]:
    """Statistics of the options that are in use."""
    row: dict[str, Any] = {}
    if algorithm.kl.placement is not KLPlacement.NONE:
        row["kl_coefficient"] = report.kl_coefficient
    if report.shaping.kl_mean is not None:
        row["kl_reward_mean"] = report.shaping.kl_mean
    if report.shaping.overlong_penalty_mean is not None:
        row["overlong_penalty_mean"] = report.shaping.overlong_penalty_mean
    if algorithm.dynamic_sampling is not None and algorithm.dynamic_sampling.enabled:
        row |= {
            "num_refills": report.batch.num_refills,
            "num_dropped_groups": report.batch.num_dropped_groups,
            "num_surplus_groups": report.batch.num_surplus_groups,
        }
    if report.batch.num_aborted_groups:
        row["num_aborted_groups"] = report.batch.num_aborted_groups
    correction = algorithm.rollout_correction
    if correction.level is not RolloutCorrectionLevel.NONE or correction.rejection:
        row |= {
            "correction_weight_mean": _mean([update.correction_weight_mean for update in report.updates]),
            "effective_sample_fraction": _mean([update.effective_sample_fraction for update in report.updates]),
            "rejected_fraction": _mean([update.rejected_fraction for update in report.updates]),
        }
    return row


def _summarise_critic(critic: CriticReport) -> dict[str, float | None]:
    return {
        "value_loss": _mean([update.loss for update in critic.updates]),
        "value_clip_fraction": _mean([update.clip_fraction for update in critic.updates]),
        "value_explained_variance": critic.explained_variance,
    }


def _describe_critic(critic: CriticReport) -> dict[str, Any]:
    updates = critic.updates
    return {
        "value_mean": _mean([update.value_mean for update in updates]),
        "critic_gradient_norm": _mean([update.gradient_norm for update in updates]),
        "critic_learning_rate": critic.learning_rate,
        "num_critic_updates": len(updates),
        "num_skipped_critic_updates": sum(not update.is_finite for update in updates),
    }


def _describe_greedy(samples: Sequence[ScoredSample]) -> dict[str, Any]:
    rewards = [sample.result.reward for sample in samples if sample.result.reward is not None]
    return {
        "baseline_reward_mean": _mean(rewards),
        "num_baseline_samples": len(samples),
        "num_baseline_tokens": sum(len(sample.token_ids) for sample in samples),
        "num_prompts_without_baseline": len(samples) - len(rewards),
    }


def _mean(values: Sequence[float]) -> Any:
    return sum(values) / len(values) if values else None
