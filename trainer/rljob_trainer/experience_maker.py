"""From scored samples to rows ready for updates: the passes over the models that the algorithm needs, and no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.algorithm import AdvantageEstimator, KLPlacement, RolloutCorrectionLevel
from rljob_trainer.algorithms.covariance import select_tokens
from rljob_trainer.algorithms.policy_losses import COVARIANCE_LOSSES
from rljob_trainer.config import build_policy_loss_options, compute_updates_per_rollout
from rljob_trainer.critic import uses_critic
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.experience import ShapingReport, apply_correction, build_rows, fill_advantages
from rljob_trainer.rollout import ScoredSample
from rljob_trainer.rows import FloatArray, TrainRow


@dataclass(frozen=True)
class Experience:
    """What a step trains on."""

    rows: list[TrainRow]
    shaping: ShapingReport


class ExperienceMaker:
    """[Old log-probabilities] -> [correction] -> [reference] -> [values] -> advantages."""

    def __init__(self, job: ResolvedJob, dispatcher: Dispatcher) -> None:
        self._job, self._dispatcher, self._algorithm = job, dispatcher, job.spec.algorithm
        correction = self._algorithm.rollout_correction
        self._bypasses = correction.bypass_old_log_probs
        self._corrects = not self._bypasses and (
            correction.level is not RolloutCorrectionLevel.NONE or bool(correction.rejection)
        )
        # With one update the policy is still the one that acted: old = new, the ratio is 1, the pass is free.
        self._needs_old = compute_updates_per_rollout(job) > 1 and not self._bypasses
        self._is_token_baseline = self._algorithm.advantage_estimator is AdvantageEstimator.OPTIMAL_TOKEN_BASELINE
        self._needs_pass = (
            self._needs_old
            or self._corrects
            or self._is_token_baseline
            or self._algorithm.kl.placement is KLPlacement.REWARD
        )
        # job.json carries a name for every function; GDPO normalises each by itself.
        self._reward_weights = {function.name or "": function.weight for function in job.spec.reward.functions}

    def make(
        self,
        samples: Sequence[ScoredSample],
        *,
        kl_coefficient: float,
        greedy_rewards: Mapping[str, float] | None = None,
    ) -> Experience:
        """Rows with everything that the updates of the step read."""
        algorithm = self._algorithm
        rows = build_rows(samples, algorithm)
        log_probs: list[FloatArray] | None = None
        sum_pi_squared: list[FloatArray] | None = None
        if self._needs_pass:
            log_probs, sum_pi_squared = self._pass_policy(rows)
        for index, row in enumerate(rows):
            if self._bypasses:
                row.old_log_probs = row.rollout_log_probs
            elif self._needs_old and log_probs is not None:
                row.old_log_probs = log_probs[index]
        if self._corrects and log_probs is not None:
            apply_correction(rows, log_probs, algorithm.rollout_correction)
        if algorithm.kl.placement is not KLPlacement.NONE:
            for row, values in zip(rows, self._dispatcher.compute_log_probs(rows, reference=True), strict=True):
                row.reference_log_probs = values
        if uses_critic(algorithm):
            for row, values in zip(rows, self._dispatcher.compute_values(rows), strict=True):
                row.values = values
        shaping = fill_advantages(
            rows,
            samples,
            algorithm,
            kl_coefficient=kl_coefficient,
            policy_log_probs=log_probs,
            sum_pi_squared=sum_pi_squared,
            greedy_rewards=greedy_rewards,
            reward_weights=self._reward_weights,
            max_response_tokens=self._job.spec.rollout.max_response_tokens,
        )
        return Experience(rows, shaping)

    def select_tokens(self, rows: Sequence[TrainRow], seed: Sequence[int]) -> None:
        """Right before an update with Clip-Cov or KL-Cov: choose its tokens over the whole mini-batch, in place.

        Costs a pass over the policy, since the covariances are those of the policy as it is now; a micro-batch alone
        could not know them, and the update would depend on how the mini-batch is cut.
        """
        loss = self._algorithm.policy_loss
        rows = [row for row in rows if row.response_ids]
        if loss not in COVARIANCE_LOSSES or loss is None or not rows:
            return
        lengths = [len(row.response_ids) for row in rows]
        log_probs = np.concatenate(self._dispatcher.compute_log_probs(rows, reference=False))
        old = [row.old_log_probs for row in rows if row.old_log_probs is not None]
        mask = [row.loss_mask for row in rows]
        selected = select_tokens(
            loss,
            log_probs_N=torch.from_numpy(log_probs),
            old_log_probs_N=torch.from_numpy(np.concatenate(old) if old else log_probs),
            advantages_N=torch.from_numpy(np.concatenate([row.advantages for row in rows])),
            mask_N=torch.from_numpy(np.concatenate(mask)),
            options=build_policy_loss_options(self._algorithm),
            rng=np.random.default_rng(list(seed)),
        )
        for row, chosen in zip(rows, np.split(selected, np.cumsum(lengths)[:-1]), strict=True):
            row.selected = chosen

    def _pass_policy(self, rows: Sequence[TrainRow]) -> tuple[list[FloatArray], list[FloatArray] | None]:
        found = self._dispatcher.compute_log_probs(rows, reference=False, with_sum_pi_squared=self._is_token_baseline)
        if not self._is_token_baseline:
            return found, None
        return [pair[0] for pair in found], [pair[1] for pair in found]
