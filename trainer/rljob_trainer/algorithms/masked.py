"""Masked statistics (shape legend: see the package docstring)."""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over true positions; 0 with a zero gradient where the mask is empty."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over true positions with the n-1 variance; 0 elsewhere.

    One valid token has no variance and is returned unscaled; a constant batch is exactly 0, since dividing the
    rounding error of its mean by its standard deviation would create signal from nothing.
    """
    kept = torch.where(mask, values, torch.zeros_like(values)).double()
    count = int(mask.sum())
    if count <= 1:
        return kept.to(values.dtype)
    valid = kept[mask]
    if torch.equal(valid.max(), valid.min()):
        return torch.zeros_like(values)
    mean = valid.mean()
    variance = valid.var(correction=1)
    whitened = (kept - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return torch.where(mask, whitened, torch.zeros_like(whitened)).to(values.dtype)


def move_masked_rewards(token_rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Move rewards that fell on masked positions to the last trainable token before them (else the first one after).

    A terminal reward on a padding or tool token would otherwise vanish from every token-level estimator
    (verl PR 2337). Rows without trainable tokens get no reward.
    """
    num_positions = mask_BT.shape[1]
    positions_T = torch.arange(num_positions, device=mask_BT.device)
    last_trainable_BT = torch.where(mask_BT, positions_T, torch.full_like(positions_T, -1)).cummax(dim=1).values
    first_trainable_B = mask_BT.int().argmax(dim=1)
    target_BT = torch.where(last_trainable_BT >= 0, last_trainable_BT, first_trainable_B[:, None])
    clean_BT = torch.nan_to_num(token_rewards_BT)
    moved_BT = torch.zeros_like(clean_BT).scatter_add(1, target_BT, clean_BT)
    return torch.where(mask_BT, moved_BT, torch.zeros_like(moved_BT))
