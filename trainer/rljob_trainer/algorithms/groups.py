"""Group statistics of outcome rewards: rows of one prompt form a group, by id and never by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Per-row view of the group every row belongs to; excluded (non-finite) rewards take no part.

    `valid_B`: finite reward; `count_B`: valid rows of the group; `mean_B`, `std_B` (n-1) in float64;
    `constant_B`: all valid rewards of the group are equal in float32 (a group of one is constant).
    """

    group_index_B: Tensor
    num_groups: int
    valid_B: Tensor
    rewards_B: Tensor
    count_B: Tensor
    mean_B: Tensor
    std_B: Tensor
    constant_B: Tensor

    @property
    def constant_fraction(self) -> float:
        """Share of groups without any signal."""
        constant_G = torch.zeros(self.num_groups, dtype=torch.bool, device=self.constant_B.device)
        constant_G[self.group_index_B] = self.constant_B
        return float(constant_G.double().mean()) if self.num_groups else 0.0


def sum_per_group(values_B: Tensor, group_index_B: Tensor, num_groups: int) -> Tensor:
    """Sum of `values_B` over the rows of each group, as (G,)."""
    return torch.zeros(num_groups, dtype=values_B.dtype, device=values_B.device).index_add(0, group_index_B, values_B)


def compute_group_statistics(rewards_B: Tensor, group_ids_B: Tensor) -> GroupStatistics:
    """Statistics of each row's group. NaN and infinite rewards are excluded, not treated as 0."""
    _, group_index_B = torch.unique(group_ids_B, return_inverse=True)
    num_groups = int(group_index_B.max()) + 1 if group_index_B.numel() else 0
    valid_B = torch.isfinite(rewards_B)
    clean_B = torch.where(valid_B, rewards_B, torch.zeros_like(rewards_B)).double()
    count_G = sum_per_group(valid_B.double(), group_index_B, num_groups)
    mean_G = sum_per_group(clean_B, group_index_B, num_groups) / count_G.clamp(min=1)
    centered_B = torch.where(valid_B, clean_B - mean_G[group_index_B], torch.zeros_like(clean_B))
    std_G = (sum_per_group(centered_B**2, group_index_B, num_groups) / (count_G - 1).clamp(min=1)).sqrt()

    single_B = rewards_B.float()
    highest_G = torch.full((num_groups,), -torch.inf, device=rewards_B.device).scatter_reduce(
        0, group_index_B, torch.where(valid_B, single_B, torch.full_like(single_B, -torch.inf)), "amax"
    )
    lowest_G = torch.full((num_groups,), torch.inf, device=rewards_B.device).scatter_reduce(
        0, group_index_B, torch.where(valid_B, single_B, torch.full_like(single_B, torch.inf)), "amin"
    )
    constant_G = highest_G <= lowest_G
    return GroupStatistics(
        group_index_B=group_index_B,
        num_groups=num_groups,
        valid_B=valid_B,
        rewards_B=clean_B,
        count_B=count_G[group_index_B],
        mean_B=mean_G[group_index_B],
        std_B=std_G[group_index_B],
        constant_B=constant_G[group_index_B],
    )
