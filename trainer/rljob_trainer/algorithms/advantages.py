"""Outcome-reward advantage estimators, and the dispatch over all estimators.

Conventions (where libraries differ): group standard deviation is the n-1 one with epsilon 1e-6 added to it; a group
whose rewards are all equal in float32 gives exactly 0; a group of one gives 0 (no baseline, no signal); rows with a
non-finite reward are excluded from the baseline and get 0; the reward of a row without trainable tokens still counts
in its group's baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import AdvantageEstimator
from rljob_trainer.algorithms.groups import GroupStatistics, compute_group_statistics, sum_per_group
from rljob_trainer.algorithms.masked import whiten
from rljob_trainer.algorithms.token_advantages import compute_discounted_returns, compute_remax

STD_EPSILON = 1e-6


def compute_advantages(
    estimator: AdvantageEstimator,
    *,
    rewards_B: Tensor,
    group_ids_B: Tensor,
    mask_BT: Tensor,
    normalize_by_std: bool = True,
    gamma: float = 1.0,
    token_rewards_BT: Tensor | None = None,
    greedy_rewards_B: Tensor | None = None,
    num_tokens_B: Tensor | None = None,
) -> Tensor:
    """Advantages (B, T) float32, zero outside the mask and on excluded rows.

    Args:
        estimator: which formula; GAE and the token baselines need a critic or statistics of the policy and have
            functions of their own in `token_advantages`.
        rewards_B: outcome reward of each response; NaN excludes the row.
        group_ids_B: integer id of the prompt instance each response answers.
        mask_BT: true on trainable tokens.
        normalize_by_std: divide group advantages by the group's standard deviation (GRPO, GRPOPassK).
        gamma: discount per token (ReinforcePlusPlus).
        token_rewards_BT: rewards per token, for example with a KL penalty; default: the outcome reward on the last
            trainable token. A row without trainable tokens has no room for them, and keeps `rewards_B`.
        greedy_rewards_B: reward of the greedy response to the same prompt (ReMax).
        num_tokens_B: length of each response, trainable or not, which weighs its reward (OPO); default: the number of
            trainable tokens.

    Raises:
        ValueError: the estimator needs an input that is missing.
    """
    mask_BT = mask_BT.bool()
    valid_B = torch.isfinite(rewards_B)
    trainable_BT = mask_BT & valid_B[:, None]
    if estimator in (AdvantageEstimator.REINFORCE_PLUS_PLUS, AdvantageEstimator.REMAX):
        tokens_BT = place_outcome_rewards(rewards_B, mask_BT) if token_rewards_BT is None else token_rewards_BT
        if estimator is AdvantageEstimator.REMAX:
            if greedy_rewards_B is None:
                raise ValueError("ReMax needs greedy_rewards_B, the reward of a greedy response per prompt")
            return compute_remax(tokens_BT, trainable_BT, greedy_rewards_B)
        return whiten(compute_discounted_returns(tokens_BT, trainable_BT, gamma), trainable_BT)

    if token_rewards_BT is not None:
        has_tokens_B = valid_B & mask_BT.any(dim=1)
        rewards_B = torch.where(has_tokens_B, token_rewards_BT.nan_to_num().double().sum(dim=1), rewards_B.double())
    groups = compute_group_statistics(rewards_B, group_ids_B)
    if estimator is AdvantageEstimator.GRPO:
        row_B = compute_grpo(groups, normalize_by_std)
    elif estimator is AdvantageEstimator.GRPO_PASS_K:
        row_B = compute_grpo_pass_k(groups, normalize_by_std)
    elif estimator is AdvantageEstimator.RLOO:
        row_B = compute_rloo(groups)
    elif estimator is AdvantageEstimator.OPO:
        row_B = compute_opo(groups, num_tokens_B=mask_BT.sum(dim=1) if num_tokens_B is None else num_tokens_B)
    elif estimator is AdvantageEstimator.GPG:
        row_B = compute_gpg(groups)
    elif estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
        row_B = compute_centered(groups)
    else:
        raise ValueError(f"{estimator} is not an outcome-reward estimator")
    advantages_BT = torch.where(trainable_BT, row_B[:, None], torch.zeros((), dtype=row_B.dtype, device=row_B.device))
    if estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
        advantages_BT = whiten(advantages_BT, trainable_BT)
    return advantages_BT.float()


def place_outcome_rewards(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Token rewards (B, T): the outcome reward on the last trainable token, 0 elsewhere; excluded rows stay 0."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = torch.where(mask_BT.bool(), positions_T, torch.full_like(positions_T, -1)).max(dim=1).values
    placed_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
    rows_R = torch.nonzero((last_B >= 0) & torch.isfinite(rewards_B)).squeeze(1)
    placed_BT[rows_R, last_B[rows_R]] = rewards_B[rows_R].float()
    return placed_BT


def compute_centered(groups: GroupStatistics) -> Tensor:
    """R - mean of the group; 0 for constant groups and excluded rows. (B,) float64."""
    centered_B = groups.rewards_B - groups.mean_B
    return torch.where(groups.valid_B & ~groups.constant_B, centered_B, torch.zeros_like(centered_B))


def compute_grpo(groups: GroupStatistics, normalize_by_std: bool) -> Tensor:
    """(R - mean) / (std + 1e-6), DeepSeekMath (arXiv 2402.03300); without the division: Dr.GRPO (arXiv 2503.20783)."""
    centered_B = compute_centered(groups)
    return centered_B / (groups.std_B + STD_EPSILON) if normalize_by_std else centered_B


def compute_rloo(groups: GroupStatistics) -> Tensor:
    """R minus the mean of the other rows = n/(n-1) (R - mean); RLOO (arXiv 2402.14740)."""
    return compute_centered(groups) * groups.count_B / (groups.count_B - 1).clamp(min=1)


def compute_opo(groups: GroupStatistics, num_tokens_B: Tensor) -> Tensor:
    """R minus the length-weighted mean of the group; OPO (arXiv 2505.23585)."""
    lengths_B = torch.where(groups.valid_B, num_tokens_B, torch.zeros_like(num_tokens_B)).double()
    weighted_G = sum_per_group(lengths_B * groups.rewards_B, groups.group_index_B, groups.num_groups)
    length_G = sum_per_group(lengths_B, groups.group_index_B, groups.num_groups)
    baseline_B = (weighted_G / length_G.clamp(min=1))[groups.group_index_B]
    centered_B = groups.rewards_B - baseline_B
    return torch.where(groups.valid_B & ~groups.constant_B, centered_B, torch.zeros_like(centered_B))


def compute_gpg(groups: GroupStatistics) -> Tensor:
    """alpha (R - mean) with alpha = rows / rows in groups with variance; GPG (arXiv 2504.02546).

    The scale counts groups without signal, not rewards equal to 0, so that it does not depend on the reward's offset.
    """
    num_informative = (groups.valid_B & ~groups.constant_B).sum().clamp(min=1)
    return compute_centered(groups) * groups.valid_B.sum() / num_informative


def compute_grpo_pass_k(groups: GroupStatistics, normalize_by_std: bool) -> Tensor:
    """Only the best row of a group gets (best - second best) [/ (std + 1e-6)]; Pass@k training (arXiv 2503.19595)."""
    advantages_B = torch.zeros_like(groups.rewards_B)
    for group in range(groups.num_groups):
        rows_R = torch.nonzero((groups.group_index_B == group) & groups.valid_B).squeeze(1)
        if rows_R.numel() < 2:
            continue
        top = torch.topk(groups.rewards_B[rows_R], 2)
        best = rows_R[top.indices[0]]
        gap = top.values[0] - top.values[1]
        advantages_B[best] = gap / (groups.std_B[best] + STD_EPSILON) if normalize_by_std else gap
    return torch.where(groups.constant_B, torch.zeros_like(advantages_B), advantages_B)


def compute_gdpo(
    reward_components_KB: Tensor,
    weights_K: Tensor,
    group_ids_B: Tensor,
    mask_BT: Tensor,
    *,
    normalize_by_std: bool = True,
) -> Tensor:
    """whiten(sum_k w_k GRPO(component k)): components are normalised before they are mixed; GDPO (arXiv 2601.05242).

    Rows with a missing component take no part in that component's groups and get 0 from it.
    """
    mixed_B = torch.zeros(group_ids_B.shape[0], dtype=torch.float64, device=group_ids_B.device)
    for rewards_B, weight in zip(reward_components_KB, weights_K, strict=True):
        mixed_B = mixed_B + weight.double() * compute_grpo(
            compute_group_statistics(rewards_B, group_ids_B), normalize_by_std
        )
    mask_BT = mask_BT.bool()
    spread_BT = torch.where(mask_BT, mixed_B[:, None], torch.zeros((), dtype=torch.float64, device=mask_BT.device))
    return whiten(spread_BT, mask_BT).float()
