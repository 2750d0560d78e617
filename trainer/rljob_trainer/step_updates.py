"""The optimizer updates of a step: passes over the rollout in mini-batches, for the critic and for the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rljob_api.contract import ResolvedJob
from rljob_trainer.batching import order_mini_batches
from rljob_trainer.critic import uses_critic
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.experience import compute_explained_variance
from rljob_trainer.experience_maker import ExperienceMaker
from rljob_trainer.optimization import compute_learning_rate
from rljob_trainer.reporting import CriticReport
from rljob_trainer.rows import TrainRow, UpdateMetrics, ValueMetrics
from rljob_trainer.run_state import RunState
from rljob_trainer.skipped_updates import count_skipped


@dataclass(frozen=True)
class StepUpdates:
    """What the updates of a step did."""

    policy: list[UpdateMetrics]
    """Empty while only the critic learns."""
    learning_rate: float
    """Of the policy."""
    critic: CriticReport | None = None


class Updater:
    """Updates the critic where there is one, then the policy; skipped updates are counted in the run's state."""

    def __init__(
        self,
        job: ResolvedJob,
        dispatcher: Dispatcher,
        maker: ExperienceMaker,
        *,
        total_steps: int,
        note: Callable[[str], None],
    ) -> None:
        self._spec, self._dispatcher, self._maker = job.spec, dispatcher, maker
        self._total_steps, self._note = total_steps, note
        self._uses_critic = uses_critic(job.spec.algorithm)

    def run(self, rows: list[TrainRow], step: int, state: RunState) -> StepUpdates:
        """All updates of `step`. The policy's advantages come from the critic's values before its updates.

        Raises:
            NumericalError: `training.maxNanSteps` consecutive updates of one model were not finite.
        """
        training, settings = self._spec.training, self._spec.critic
        critic = self._update_critic(rows, step, state) if self._uses_critic else None
        learning_rate = self._compute_learning_rate(training.learning_rate, step)
        updates: list[UpdateMetrics] = []
        is_critic_warmup = self._uses_critic and settings is not None and step <= settings.warmup_steps
        if not is_critic_warmup:
            for number, mini_batch in enumerate(self._cut_mini_batches(rows, step, training.epochs_per_step)):
                self._maker.select_tokens(mini_batch, seed=[training.seed, step, number])
                updates.append(self._update_policy(mini_batch, learning_rate, state))
        return StepUpdates(updates, learning_rate, critic)

    def _update_policy(self, rows: Sequence[TrainRow], learning_rate: float, state: RunState) -> UpdateMetrics:
        metrics = self._dispatcher.update(rows, learning_rate=learning_rate, kl_coefficient=state.kl_coefficient)
        state.num_nan_steps_in_a_row = self._count_non_finite(
            metrics.is_finite,
            state,
            state.num_nan_steps_in_a_row,
            f"loss {metrics.loss}, gradient norm {metrics.gradient_norm}, entropy {metrics.entropy}, KL {metrics.kl}",
            f"spec.training.learningRate (now {self._spec.training.learning_rate:g})",
        )
        return metrics

    def _update_critic(self, rows: list[TrainRow], step: int, state: RunState) -> CriticReport:
        settings = self._spec.critic
        assert settings is not None, "the job is resolved"
        learning_rate = self._compute_learning_rate(settings.learning_rate, step)
        num_epochs = settings.epochs_per_step or self._spec.training.epochs_per_step
        updates: list[ValueMetrics] = []
        for mini_batch in self._cut_mini_batches(rows, step, num_epochs):
            metrics = self._dispatcher.update_critic(mini_batch, learning_rate=learning_rate)
            state.num_critic_nan_steps_in_a_row = self._count_non_finite(
                metrics.is_finite,
                state,
                state.num_critic_nan_steps_in_a_row,
                f"critic: loss {metrics.loss}, gradient norm {metrics.gradient_norm}",
                f"spec.critic.learningRate (now {settings.learning_rate:g})",
            )
            updates.append(metrics)
        return CriticReport(updates, learning_rate, compute_explained_variance(rows))

    def _count_non_finite(self, is_finite: bool, state: RunState, num_in_a_row: int, facts: str, cure: str) -> int:
        """Skipped updates in a row of one model; each is counted and named, and too many end the run."""
        state.num_nan_steps += not is_finite
        return count_skipped(
            num_in_a_row,
            is_finite,
            limit=self._spec.training.max_nan_steps,
            facts=facts,
            cure=f"{cure} or inspect samples.jsonl",
            note=self._note,
        )

    def _compute_learning_rate(self, peak: float, step: int) -> float:
        """Policy and critic follow the same schedule, each to its own peak."""
        training = self._spec.training
        return compute_learning_rate(
            step,
            peak=peak,
            schedule=training.schedule,
            warmup_steps=training.warmup_steps,
            total_steps=self._total_steps,
            min_ratio=training.min_learning_rate_ratio,
        )

    def _cut_mini_batches(self, rows: list[TrainRow], step: int, num_epochs: int) -> list[list[TrainRow]]:
        training, num_samples = self._spec.training, self._spec.rollout.samples_per_prompt
        order = order_mini_batches(
            training.prompts_per_step,
            training.mini_batch_prompts or training.prompts_per_step,
            num_epochs,
            seed=[training.seed, step],
        )
        return [
            [row for prompt in prompts for row in rows[prompt * num_samples : (prompt + 1) * num_samples]]
            for prompts in order
        ]
