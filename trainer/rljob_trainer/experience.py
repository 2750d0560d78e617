"""From scored samples to training rows with advantages (shape legend: B samples, T longest response)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rljob_api.v1alpha1.algorithm import AdvantageEstimator, Algorithm, KLPlacement, RolloutCorrection
from rljob_trainer.algorithms.advantages import compute_advantages, compute_gdpo, place_outcome_rewards
from rljob_trainer.algorithms.groups import compute_group_statistics
from rljob_trainer.algorithms.kl import compute_kl, compute_mean_kl
from rljob_trainer.algorithms.overlong import compute_overlong_penalty
from rljob_trainer.algorithms.rollout_correction import compute_correction
from rljob_trainer.algorithms.token_advantages import compute_optimal_token_baseline, compute_whitened_gae
from rljob_trainer.config import build_correction_options
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.rollout import ScoredSample
from rljob_trainer.rows import FloatArray, TrainRow


@dataclass(frozen=True)
class ExperienceStatistics:
    """What the step's samples look like."""

    reward_mean: float | None
    """Over samples that have a reward; None without any."""
    reward_std: float | None
    num_samples: int
    num_excluded: int
    """Without a reward (dropped by the reward function)."""
    response_tokens_mean: float
    num_prompt_tokens: int
    num_response_tokens: int
    truncated_fraction: float
    """Responses that hit the length limit."""
    zero_variance_group_fraction: float
    """Prompts whose samples all have the same reward: no learning signal."""
    weight_version_min: int


def build_rows(samples: Sequence[ScoredSample], algorithm: Algorithm) -> list[TrainRow]:
    """Rows without advantages yet; excluded and masked-out samples are not trainable."""
    return [
        TrainRow(
            prompt_ids=sample.row.prompt_ids,
            response_ids=sample.token_ids,
            advantages=np.zeros(len(sample.token_ids), dtype=np.float32),
            rollout_log_probs=sample.log_probs,
            trainable=bool(np.isfinite(sample.reward))
            and not (algorithm.mask_truncated and sample.finish_reason is FinishReason.LENGTH),
        )
        for sample in samples
    ]


@dataclass(frozen=True)
class ShapingReport:
    """What was added to the rewards of a step."""

    kl_mean: float | None = None
    """KL to the reference, nats per token, mean over rows of their means; None without a KL reward."""
    overlong_penalty_mean: float | None = None
    """Reward units per sample; None without an overlong penalty."""


def apply_correction(
    rows: Sequence[TrainRow], policy_log_probs: Sequence[FloatArray], correction: RolloutCorrection
) -> None:
    """Importance weights and rejected tokens, in place; over all rows at once, since `normalize` needs their mean."""
    used = [index for index, row in enumerate(rows) if row.response_ids]
    if not used:
        return
    lengths = [len(rows[index].response_ids) for index in used]
    trainable = torch.tensor([rows[index].trainable for index in used])
    result = compute_correction(
        torch.from_numpy(np.concatenate([policy_log_probs[index] for index in used])),
        torch.from_numpy(np.concatenate([rows[index].rollout_log_probs for index in used])),
        trainable.repeat_interleave(torch.tensor(lengths)),
        torch.arange(len(used)).repeat_interleave(torch.tensor(lengths)),
        len(used),
        build_correction_options(correction),
    )
    kept = result.kept_N.split(lengths)
    weights = None if result.weights_N is None else result.weights_N.split(lengths)
    for position, index in enumerate(used):
        rows[index].kept = kept[position].numpy().copy()
        rows[index].token_weights = None if weights is None else weights[position].numpy().copy()


def fill_advantages(
    rows: Sequence[TrainRow],
    samples: Sequence[ScoredSample],
    algorithm: Algorithm,
    *,
    kl_coefficient: float = 0.0,
    policy_log_probs: Sequence[FloatArray] | None = None,
    sum_pi_squared: Sequence[FloatArray] | None = None,
    greedy_rewards: Mapping[str, float] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    max_response_tokens: int | None = None,
) -> ShapingReport:
    """Compute advantages in place; for GAE, from each row's `values`, its returns too.

    Args:
        rows: one per sample; with `kl.placement: Reward` their `reference_log_probs` are set.
        samples: where the rewards come from.
        algorithm: resolved.
        kl_coefficient: current weight of the KL reward.
        policy_log_probs: per row, under the policy that acted (KL reward, optimal token baseline).
        sum_pi_squared: per row, sums of squared probabilities (optimal token baseline).
        greedy_rewards: prompt uid -> reward of its greedy response (ReMax); rows of a prompt whose greedy response has
            no reward have no baseline and are left out of the loss.
        reward_weights: reward function -> weight (GDPO, which normalises each function by itself).
        max_response_tokens: the limit that the overlong penalty is measured from.
    """
    if greedy_rewards is not None:
        for row, sample in zip(rows, samples, strict=True):
            row.trainable = row.trainable and bool(np.isfinite(greedy_rewards[sample.row.uid]))
    mask_BT = torch.zeros(len(rows), max((len(row.response_ids) for row in rows), default=1) or 1, dtype=torch.bool)
    for index, row in enumerate(rows):
        mask_BT[index, : len(row.response_ids)] = torch.from_numpy(row.loss_mask)
    rewards_B = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    penalties_B = _compute_penalties(samples, algorithm, max_response_tokens)
    shaped_B = rewards_B if penalties_B is None else rewards_B + penalties_B
    kl_mean, token_rewards_BT = None, None
    if algorithm.kl.placement is KLPlacement.REWARD:
        assert policy_log_probs is not None, "a KL reward compares the policy that acted with the reference"
        kl_BT = compute_kl(
            algorithm.kl.estimator,
            _pad(policy_log_probs, mask_BT),
            _pad([row.reference_log_probs for row in rows], mask_BT),
        )
        kl_mean = compute_mean_kl(kl_BT, mask_BT)
        token_rewards_BT = place_outcome_rewards(shaped_B, mask_BT) - kl_coefficient * torch.where(mask_BT, kl_BT, 0.0)

    estimator, group_ids_B = algorithm.advantage_estimator, _group_ids(samples)
    if estimator is AdvantageEstimator.GAE:
        advantages_BT, returns_BT = compute_whitened_gae(
            place_outcome_rewards(shaped_B, mask_BT) if token_rewards_BT is None else token_rewards_BT,
            _pad([row.values for row in rows], mask_BT),
            mask_BT,
            algorithm.gamma,
            algorithm.gae_lambda,
        )
        for index, row in enumerate(rows):
            row.returns = returns_BT[index, : len(row.response_ids)].numpy().copy()
    elif estimator is AdvantageEstimator.GDPO:
        advantages_BT = compute_gdpo(
            *_list_components(samples, reward_weights or {}, penalties_B),
            group_ids_B,
            mask_BT,
            normalize_by_std=algorithm.normalize_by_std is not False,
        )
    elif estimator is AdvantageEstimator.OPTIMAL_TOKEN_BASELINE:
        assert policy_log_probs is not None, "the baseline weighs tokens by the policy that acted"
        assert sum_pi_squared is not None, "the baseline weighs tokens by the policy that acted"
        weights = [row.token_weights for row in rows if row.token_weights is not None]
        advantages_BT, _ = compute_optimal_token_baseline(
            place_outcome_rewards(shaped_B, mask_BT) if token_rewards_BT is None else token_rewards_BT,
            mask_BT,
            group_ids_B,
            _pad(policy_log_probs, mask_BT),
            _pad(sum_pi_squared, mask_BT),
            token_weights_BT=_pad([row.token_weights for row in rows], mask_BT) if weights else None,
        )
        if token_rewards_BT is None:
            # Where all rewards are equal, the longest row's tail, which has no baseline, is no signal either.
            constant_B = compute_group_statistics(shaped_B, group_ids_B).constant_B
            advantages_BT = torch.where(constant_B[:, None], torch.zeros_like(advantages_BT), advantages_BT)
    else:
        assert estimator is not None, "the job is resolved"
        advantages_BT = compute_advantages(
            estimator,
            rewards_B=shaped_B,
            group_ids_B=group_ids_B,
            mask_BT=mask_BT,
            normalize_by_std=algorithm.normalize_by_std is not False,
            gamma=algorithm.gamma,
            token_rewards_BT=token_rewards_BT,
            greedy_rewards_B=None
            if greedy_rewards is None
            else torch.tensor([greedy_rewards[sample.row.uid] for sample in samples], dtype=torch.float64),
            num_tokens_B=torch.tensor([len(sample.token_ids) for sample in samples]),
        )
    for index, row in enumerate(rows):
        row.advantages = advantages_BT[index, : len(row.response_ids)].numpy().copy()
    return ShapingReport(kl_mean, None if penalties_B is None else float(penalties_B.mean()))


def _compute_penalties(
    samples: Sequence[ScoredSample], algorithm: Algorithm, max_response_tokens: int | None
) -> torch.Tensor | None:
    penalty = algorithm.overlong_penalty
    if penalty is None:
        return None
    assert max_response_tokens is not None, "the penalty is measured from the response limit"
    return compute_overlong_penalty(
        torch.tensor([len(sample.token_ids) for sample in samples]),
        max_tokens=max_response_tokens,
        buffer_tokens=penalty.buffer_tokens,
        factor=penalty.factor,
    )


def _list_components(
    samples: Sequence[ScoredSample], weights: Mapping[str, float], penalties_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards by function (K, B), NaN where there is none, and weights (K,); the overlong penalty is one component. A
    sample without a reward has none of them, the penalty included."""
    missing = float("nan")

    def read(sample: ScoredSample, name: str) -> float:
        score = sample.result.scores.get(name) if sample.result.reward is not None else None
        return missing if score is None else score

    components = [torch.tensor([read(sample, name) for sample in samples], dtype=torch.float64) for name in weights]
    factors = list(weights.values())
    if penalties_B is not None:
        has_reward_B = torch.tensor([sample.result.reward is not None for sample in samples], dtype=torch.bool)
        components.append(torch.where(has_reward_B, penalties_B, missing))
        factors.append(1.0)
    return torch.stack(components), torch.tensor(factors, dtype=torch.float64)


def _pad(arrays: Sequence[FloatArray | None], like_BT: torch.Tensor) -> torch.Tensor:
    padded_BT = torch.zeros(like_BT.shape, dtype=torch.float32)
    for index, array in enumerate(arrays):
        assert array is not None, "what the estimator reads is computed before advantages"
        padded_BT[index, : len(array)] = torch.from_numpy(array)
    return padded_BT


def compute_explained_variance(rows: Sequence[TrainRow]) -> float | None:
    """1 - Var(returns - values) / Var(returns) over trainable tokens, for the values that the advantages were made of.

    1: the critic knew every return; 0: no better than a constant; below 0: worse. None without varying returns.
    """
    used = [row for row in rows if row.num_trainable_tokens]
    returns = [row.returns[row.loss_mask] for row in used if row.returns is not None]
    values = [row.values[row.loss_mask] for row in used if row.values is not None]
    if not returns or len(returns) != len(values):
        return None
    returns_N = np.concatenate(returns).astype(np.float64)
    residuals_N = returns_N - np.concatenate(values)
    variance = float(returns_N.var())
    return None if variance == 0 else 1.0 - float(residuals_N.var()) / variance


def summarise(samples: Sequence[ScoredSample]) -> ExperienceStatistics:
    """Statistics over all samples, masked-out ones included."""
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    valid = rewards[np.isfinite(rewards)]
    lengths = [len(sample.token_ids) for sample in samples]
    groups = compute_group_statistics(torch.from_numpy(rewards), _group_ids(samples))
    return ExperienceStatistics(
        reward_mean=float(valid.mean()) if valid.size else None,
        reward_std=float(valid.std()) if valid.size else None,
        num_samples=len(samples),
        num_excluded=int(rewards.size - valid.size),
        response_tokens_mean=float(np.mean(lengths)) if lengths else 0.0,
        num_prompt_tokens=sum(len(sample.row.prompt_ids) for sample in samples),
        num_response_tokens=sum(lengths),
        truncated_fraction=float(np.mean([sample.finish_reason is FinishReason.LENGTH for sample in samples])),
        zero_variance_group_fraction=groups.constant_fraction,
        weight_version_min=min((sample.weight_version for sample in samples), default=0),
    )


def _group_ids(samples: Sequence[ScoredSample]) -> torch.Tensor:
    """Group by prompt uid, never by position (AReaL 1419)."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(sample.row.uid, len(numbers)) for sample in samples], dtype=torch.int64)
