"""DAPO's soft penalty for responses close to the length limit."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_overlong_penalty(num_tokens_B: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """Reward term (B,) float64: 0 up to `max_tokens - buffer_tokens`, then down to -factor at `max_tokens`.

    Source: arXiv 2503.14476, eq. 13.
    """
    excess_B = num_tokens_B.double() - (max_tokens - buffer_tokens)
    return torch.clamp(-excess_B / buffer_tokens * factor, max=0.0)
