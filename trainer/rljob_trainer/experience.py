"""From scored samples to training rows with advantages (shape legend: B samples, T longest response)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rljob_api.v1alpha1.algorithm import AdvantageEstimator, Algorithm, KLPlacement
from rljob_trainer.algorithms.advantages import compute_advantages, place_outcome_rewards
from rljob_trainer.algorithms.groups import compute_group_statistics
from rljob_trainer.algorithms.kl import compute_kl
from rljob_trainer.algorithms.token_advantages import compute_whitened_gae
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


def fill_advantages(
    rows: Sequence[TrainRow],
    samples: Sequence[ScoredSample],
    algorithm: Algorithm,
    *,
    kl_coefficient: float = 0.0,
    policy_log_probs: Sequence[FloatArray] | None = None,
    greedy_rewards: Mapping[str, float] | None = None,
) -> None:
    """Compute advantages in place; for GAE, from each row's `values`, its returns too. With `kl.placement: Reward`,
    `policy_log_probs` and each row's `reference_log_probs` give the penalty subtracted from every token's reward.

    `greedy_rewards` (ReMax): prompt uid -> reward of its greedy response; rows of a prompt whose greedy response has no
    reward have no baseline and are left out of the loss.
    """
    assert algorithm.advantage_estimator is not None, "the job is resolved"
    if greedy_rewards is not None:
        for row, sample in zip(rows, samples, strict=True):
            row.trainable = row.trainable and bool(np.isfinite(greedy_rewards[sample.row.uid]))
    longest = max((len(row.response_ids) for row in rows), default=0)
    mask_BT = torch.zeros(len(rows), max(longest, 1), dtype=torch.bool)
    for index, row in enumerate(rows):
        mask_BT[index, : len(row.response_ids)] = row.trainable
    rewards_B = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    token_rewards_BT = None
    if algorithm.kl.placement is KLPlacement.REWARD:
        assert policy_log_probs is not None
        token_rewards_BT = place_outcome_rewards(rewards_B, mask_BT)
        for index, (row, log_probs) in enumerate(zip(rows, policy_log_probs, strict=True)):
            assert row.reference_log_probs is not None
            kl_T = compute_kl(
                algorithm.kl.estimator, torch.from_numpy(log_probs), torch.from_numpy(row.reference_log_probs)
            )
            token_rewards_BT[index, : len(row.response_ids)] -= kl_coefficient * kl_T * row.trainable
    if algorithm.advantage_estimator is AdvantageEstimator.GAE:
        if token_rewards_BT is None:
            token_rewards_BT = place_outcome_rewards(rewards_B, mask_BT)
        values_BT = _pad([row.values for row in rows], mask_BT)
        advantages_BT, returns_BT = compute_whitened_gae(
            token_rewards_BT, values_BT, mask_BT, algorithm.gamma, algorithm.gae_lambda
        )
        for index, row in enumerate(rows):
            row.advantages = advantages_BT[index, : len(row.response_ids)].numpy().copy()
            row.returns = returns_BT[index, : len(row.response_ids)].numpy().copy()
        return
    advantages_BT = compute_advantages(
        algorithm.advantage_estimator,
        rewards_B=rewards_B,
        group_ids_B=_group_ids(samples),
        mask_BT=mask_BT,
        normalize_by_std=algorithm.normalize_by_std is not False,
        gamma=algorithm.gamma,
        token_rewards_BT=token_rewards_BT,
        greedy_rewards_B=None
        if greedy_rewards is None
        else torch.tensor([greedy_rewards[sample.row.uid] for sample in samples], dtype=torch.float64),
    )
    for index, row in enumerate(rows):
        row.advantages = advantages_BT[index, : len(row.response_ids)].numpy().copy()


def _pad(arrays: Sequence[FloatArray | None], like_BT: torch.Tensor) -> torch.Tensor:
    padded_BT = torch.zeros(like_BT.shape, dtype=torch.float32)
    for index, array in enumerate(arrays):
        assert array is not None, "values are computed before advantages"
        padded_BT[index, : len(array)] = torch.from_numpy(array)
    return padded_BT


def compute_explained_variance(rows: Sequence[TrainRow]) -> float | None:
    """1 - Var(returns - values) / Var(returns) over trainable tokens, for the values that the advantages were made of.

    1: the critic knew every return; 0: no better than a constant; below 0: worse. None without varying returns.
    """
    used = [row for row in rows if row.trainable and row.response_ids]
    returns = [row.returns for row in used if row.returns is not None]
    values = [row.values for row in used if row.values is not None]
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
