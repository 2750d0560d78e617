"""From per-token losses to one number, with global denominators.

Every mode is a weighted sum `sum_i w_i l_i` whose weights come from counts of the whole mini-batch. Micro-batches and
ranks therefore just add up, and the gradient does not depend on how the mini-batch was cut (verl 5625, TRL 2995).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import LossAggregation


def compute_token_weights(
    aggregation: LossAggregation,
    mask_N: Tensor,
    sequence_ids_N: Tensor,
    *,
    num_tokens_global: int,
    num_sequences_global: int,
    sequence_token_counts_S: Tensor,
    norm_tokens: int,
) -> Tensor:
    """Weight of each packed token (N,) float32; 0 under the mask. The loss is `(weights * token_losses).sum()`.

    Args:
        aggregation: the mode.
        mask_N: true on trainable tokens.
        sequence_ids_N: sequence of each token, an index into `sequence_token_counts_S`.
        num_tokens_global: trainable tokens of the mini-batch over all micro-batches and ranks.
        num_sequences_global: its sequences with at least one trainable token.
        sequence_token_counts_S: trainable tokens per sequence (a sequence is never cut).
        norm_tokens: constant length of SequenceMeanTokenSumNorm (the response limit; arXiv 2503.20783).
    """
    mask_N = mask_N.bool()
    if aggregation is LossAggregation.TOKEN_SUM:
        weights_N = torch.ones(mask_N.shape, dtype=torch.float32, device=mask_N.device)
    elif aggregation is LossAggregation.TOKEN_MEAN:
        weights_N = torch.full(mask_N.shape, 1.0 / max(num_tokens_global, 1), device=mask_N.device)
    else:
        weights_N = torch.full(mask_N.shape, 1.0 / max(num_sequences_global, 1), device=mask_N.device)
        if aggregation is LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM:
            weights_N = weights_N / norm_tokens
        elif aggregation is LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            counts_S = sequence_token_counts_S.to(mask_N.device).clamp(min=1).float()
            weights_N = weights_N / counts_S[sequence_ids_N]
    return torch.where(mask_N, weights_N, torch.zeros_like(weights_N))


def aggregate(token_losses_N: Tensor, weights_N: Tensor) -> Tensor:
    """`sum_i w_i l_i`; tokens of weight 0 are selected away first, since 0 x NaN is NaN in value and gradient."""
    return (torch.where(weights_N != 0, token_losses_N, torch.zeros_like(token_losses_N)) * weights_N).sum()
