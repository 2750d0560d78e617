"""One whole step in this process: the loop's own pieces on a tiny policy, without Ray and without ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tr_job import build_job

from rljob_api.contract import ResolvedJob
from rljob_trainer.algorithms.kl import update_kl_coefficient
from rljob_trainer.batching import order_mini_batches, plan_batches
from rljob_trainer.config import build_loss_settings
from rljob_trainer.data import PromptRow
from rljob_trainer.dynamic_sampling import CollectedBatch, collect_batch
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.experience_maker import ExperienceMaker
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rewards import ScoreResult
from rljob_trainer.rollout import ScoredSample
from rljob_trainer.rows import FloatArray, MiniBatch, TrainRow, UpdateMetrics, count_trainable, split_rows
from rljob_trainer.update import LossSettings, Ranks, apply_update, compute_row_log_probs

CPU = torch.device("cpu")
MICRO_BATCH_SEQUENCES = 5
ONE_RANK = Ranks(1, lambda values: values, lambda values: values)


def make_sample(
    uid: str,
    index: int,
    *,
    reward: float | None,
    token_ids: Sequence[int] = (3, 4, 5),
    scores: dict[str, float | None] | None = None,
    log_probs: FloatArray | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
    prompt_ids: Sequence[int] = (6, 7),
) -> ScoredSample:
    """A scored response."""
    row = PromptRow(uid=uid, prompt_ids=list(prompt_ids), prompt_text=uid, answer="", fields={})
    return ScoredSample(
        row=row,
        index=index,
        token_ids=list(token_ids),
        log_probs=np.full(len(token_ids), -3.0, dtype=np.float32) if log_probs is None else log_probs,
        finish_reason=finish_reason,
        weight_version=1,
        text="",
        result=ScoreResult(f"{uid}#{index}", reward, {"score": reward} if scores is None else scores),
    )


class LocalDispatcher:
    """What `ExperienceMaker` asks of the ranks, answered by a policy in this process."""

    def __init__(self, policy: PolicyModel, reference: PolicyModel, temperature: float) -> None:
        self.policy, self.reference, self.temperature = policy, reference, temperature
        self.num_passes = 0

    def compute_log_probs(
        self, rows: Sequence[TrainRow], *, reference: bool, with_sum_pi_squared: bool = False
    ) -> list[FloatArray]:
        """In the micro-batches of an update of the same rows, as the real dispatcher cuts them."""
        self.num_passes += 1
        plan = plan_batches([row.num_tokens for row in rows], 1, micro_batch_sequences=MICRO_BATCH_SEQUENCES)
        found = compute_row_log_probs(
            self.reference if reference else self.policy,
            split_rows(rows, plan)[0],
            temperature=self.temperature,
            device=CPU,
            on_micro_batch=lambda: None,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        by_row = {
            index: values
            for micro, part in zip(plan.rows[0], found, strict=True)
            for index, values in zip(micro, part, strict=True)
        }
        return [by_row[index] for index in range(len(rows))]

    def compute_values(self, rows: Sequence[TrainRow]) -> list[FloatArray]:
        """A critic that knows the position and nothing else."""
        return [0.1 * np.arange(len(row.response_ids), dtype=np.float32) for row in rows]


class LocalStep:
    """Collect, make experience, update: the order of the loop."""

    def __init__(self, policy: PolicyModel, **sections: Any) -> None:
        self.job: ResolvedJob = build_job(
            run_directory="run",
            ranks=1,
            **{"training": {"prompts_per_step": 4, "mini_batch_prompts": 2, "learning_rate": 1e-2}} | sections,
        )
        self.settings: LossSettings = build_loss_settings(self.job)
        reference = copy.deepcopy(policy)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.02)
        self.dispatcher = LocalDispatcher(copy.deepcopy(policy), reference, self.settings.temperature)
        self.maker = ExperienceMaker(self.job, self.dispatcher)  # type: ignore[arg-type]
        self.optimizer = build_optimizer(self.dispatcher.policy, self.job.spec.training)
        self.kl_coefficient = self.job.spec.algorithm.kl.coefficient
        self.batch: CollectedBatch
        self.rows: list[TrainRow]

    def run(
        self,
        draw: Callable[[int], list[PromptRow]],
        roll_out: Callable[[list[PromptRow]], list[ScoredSample]],
        greedy_rewards: dict[str, float] | None = None,
    ) -> list[UpdateMetrics]:
        """One step; the policy is left updated."""
        spec = self.job.spec
        algorithm, training = spec.algorithm, spec.training
        self.batch = collect_batch(training.prompts_per_step, algorithm.dynamic_sampling, draw=draw, roll_out=roll_out)
        experience = self.maker.make(
            self.batch.samples, kl_coefficient=self.kl_coefficient, greedy_rewards=greedy_rewards
        )
        self.rows = experience.rows
        order = order_mini_batches(
            training.prompts_per_step,
            training.mini_batch_prompts or training.prompts_per_step,
            training.epochs_per_step,
            seed=[training.seed, 1],
        )
        num_samples = spec.rollout.samples_per_prompt
        metrics = []
        for number, prompts in enumerate(order):
            rows = [row for prompt in prompts for row in self.rows[prompt * num_samples : (prompt + 1) * num_samples]]
            self.maker.select_tokens(rows, seed=[training.seed, 1, number])
            metrics.append(self.update(rows))
        if experience.shaping.kl_mean is not None:
            controller = algorithm.kl.controller
            self.kl_coefficient = update_kl_coefficient(
                self.kl_coefficient,
                controller.type,
                measured_kl=experience.shaping.kl_mean,
                target=controller.target,
                horizon_samples=controller.horizon_samples,
                num_samples=len(self.rows),
            )
        return metrics

    def update(self, rows: list[TrainRow]) -> UpdateMetrics:
        """One optimizer update on one rank."""
        plan = plan_batches([row.num_tokens for row in rows], 1, micro_batch_sequences=MICRO_BATCH_SEQUENCES)
        num_tokens, num_sequences = count_trainable(rows)
        batch = MiniBatch(
            split_rows(rows, plan)[0],
            num_tokens,
            num_sequences,
            self.job.spec.training.learning_rate,
            self.kl_coefficient,
        )
        return apply_update(
            self.dispatcher.policy,
            self.optimizer,
            batch,
            self.settings,
            gradient_clip=1e9,
            ranks=ONE_RANK,
            device=CPU,
            on_micro_batch=lambda: None,
        )
