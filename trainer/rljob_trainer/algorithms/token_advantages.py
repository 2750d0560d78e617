"""Token-level estimators: returns, GAE, ReMax, optimal token baselines. All ignore masked tokens entirely."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.groups import sum_per_group
from rljob_trainer.algorithms.masked import move_masked_rewards, whiten

WEIGHT_EPSILON = 1e-8


def compute_discounted_returns(token_rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t'} with t' the next trainable token; 0 under the mask. (B, T) float64."""
    mask_BT = mask_BT.bool()
    rewards_BT = move_masked_rewards(token_rewards_BT.double(), mask_BT)
    returns_BT = torch.zeros_like(rewards_BT)
    running_B = torch.zeros(rewards_BT.shape[0], dtype=torch.float64, device=rewards_BT.device)
    for t in range(rewards_BT.shape[1] - 1, -1, -1):
        running_B = torch.where(mask_BT[:, t], rewards_BT[:, t] + gamma * running_B, running_B)
        returns_BT[:, t] = torch.where(mask_BT[:, t], running_B, torch.zeros_like(running_B))
    return returns_BT


def compute_gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): (unwhitened advantages, returns), float64, 0 under the mask.

    delta_t = r_t + gamma V_{t'} - V_t, A_t = delta_t + gamma lambda A_{t'}, t' = next trainable token; returns = A + V.
    """
    mask_BT = mask_BT.bool()
    rewards_BT = move_masked_rewards(token_rewards_BT.double(), mask_BT)
    values_BT = torch.where(mask_BT, values_BT, torch.zeros_like(values_BT)).double()
    advantages_BT = torch.zeros_like(rewards_BT)
    next_value_B = torch.zeros(rewards_BT.shape[0], dtype=torch.float64, device=rewards_BT.device)
    running_B = torch.zeros_like(next_value_B)
    for t in range(rewards_BT.shape[1] - 1, -1, -1):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        running_B = torch.where(mask_BT[:, t], delta_B + gamma * gae_lambda * running_B, running_B)
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = torch.where(mask_BT[:, t], running_B, torch.zeros_like(running_B))
    return advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))


def compute_whitened_gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """PPO's (advantages whitened over the batch, returns), float32."""
    advantages_BT, returns_BT = compute_gae(token_rewards_BT, values_BT, mask_BT, gamma, gae_lambda)
    return whiten(advantages_BT, mask_BT.bool()).float(), returns_BT.float()


def compute_remax(token_rewards_BT: Tensor, mask_BT: Tensor, greedy_rewards_B: Tensor) -> Tensor:
    """Reward-to-go minus the reward of the greedy response; ReMax (arXiv 2310.10505)."""
    returns_BT = compute_discounted_returns(token_rewards_BT, mask_BT, gamma=1.0)
    advantages_BT = returns_BT - greedy_rewards_B.double()[:, None]
    return torch.where(mask_BT.bool(), advantages_BT, torch.zeros_like(advantages_BT)).float()


def compute_optimal_token_baseline(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    group_ids_B: Tensor,
    old_log_probs_BT: Tensor,
    sum_pi_squared_BT: Tensor,
    *,
    token_weights_BT: Tensor | None = None,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) with the variance-optimal baseline per token position.

    Positions count trainable tokens (so that tool tokens do not shift rows against each other):
    A_t = G_t - sum_i G_it W_it / sum_i W_it, W_it = sum_{j<=t} (1 - 2 pi_j + sum_a pi_a^2) w_j^2 over the group.
    `zero_tail`: positions that only one row of a group reaches get no baseline, so that their advantage is the return.
    """
    mask_BT = mask_BT.bool()
    num_rows, num_positions = mask_BT.shape
    returns_BT = compute_discounted_returns(token_rewards_BT, mask_BT, gamma=1.0)
    energy_BT = 1 - 2 * old_log_probs_BT.double().exp() + sum_pi_squared_BT.double()
    if token_weights_BT is not None:
        energy_BT = energy_BT * token_weights_BT.double() ** 2
    weight_BT = torch.where(mask_BT, energy_BT, torch.zeros_like(energy_BT)).cumsum(dim=1)

    # Column c of the compacted view is the c-th trainable token of each row.
    column_BT = (mask_BT.int().cumsum(dim=1) - 1).clamp(min=0)
    _, group_index_B = torch.unique(group_ids_B, return_inverse=True)
    num_groups = int(group_index_B.max()) + 1 if num_rows else 0
    cell_BT = group_index_B[:, None] * num_positions + column_BT
    cells = num_groups * num_positions

    def sum_per_cell(values_BT: Tensor) -> Tensor:
        kept_BT = torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))
        return sum_per_group(kept_BT.reshape(-1), cell_BT.reshape(-1), cells)[cell_BT]

    rows_BT = sum_per_cell(torch.ones_like(weight_BT))
    baseline_BT = sum_per_cell(returns_BT * weight_BT) / (sum_per_cell(weight_BT) + WEIGHT_EPSILON)
    if zero_tail:
        baseline_BT = torch.where(rows_BT <= 1, torch.zeros_like(baseline_BT), baseline_BT)
    advantages_BT = torch.where(mask_BT, returns_BT - baseline_BT, torch.zeros_like(returns_BT))
    return advantages_BT.float(), returns_BT.float()
