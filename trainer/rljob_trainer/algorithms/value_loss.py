"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, mask_N: Tensor, clip: float
) -> Tensor:
    """Per-token 0.5 max((V-R)^2, (clip(V, V_old +- clip) - R)^2) (N,), 0 under the mask (arXiv 1707.06347)."""
    mask_N = mask_N.bool()

    def select(x_N: Tensor) -> Tensor:
        return torch.where(mask_N, x_N, torch.zeros_like(x_N))

    values_N, old_N, returns_N = select(values_N), select(old_values_N.detach()), select(returns_N.detach())
    clipped_N = torch.minimum(torch.maximum(values_N, old_N - clip), old_N + clip)
    return select(0.5 * torch.maximum((values_N - returns_N) ** 2, (clipped_N - returns_N) ** 2))
