"""Importance correction for the mismatch of trainer and engine (shape legend: N packed tokens, S sequences).

The engine samples with other kernels, another precision and, off policy, older weights than the trainer computes with.
With d = log pi_trainer - log pi_engine, a token's weight is exp(d), a sequence's exp(sum d); rejection rules leave out
tokens or sequences whose mismatch is too large. Sources: truncated importance sampling (Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training"), IcePop (arXiv 2510.18855).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import RejectionRule, RejectionScope, RejectionStatistic, RolloutCorrectionLevel

LOG_WEIGHT_CLAMP = 20.0
"""Bound of the exponent, so that weights stay finite in float32."""


@dataclass(frozen=True)
class CorrectionOptions:
    """What `spec.algorithm.rolloutCorrection` asks for."""

    level: RolloutCorrectionLevel = RolloutCorrectionLevel.NONE
    truncation: float = 2.0
    """Largest weight."""
    floor: float | None = None
    """IcePop: weights outside [floor, truncation] become 0; None truncates instead."""
    normalize: bool = False
    """Divide by the mean weight of the batch."""
    rejection: tuple[RejectionRule, ...] = field(default=())
    """All of them must hold."""


@dataclass(frozen=True)
class Correction:
    """Weights (N,) float32, 0 under the mask, None without a level; kept tokens (N,) bool, false under the mask."""

    weights_N: Tensor | None
    kept_N: Tensor


def compute_correction(
    train_log_probs_N: Tensor,
    rollout_log_probs_N: Tensor,
    mask_N: Tensor,
    sequence_ids_N: Tensor,
    num_sequences: int,
    options: CorrectionOptions,
) -> Correction:
    """Weights and rejections without gradient. Weights are computed before anything is rejected.

    Args:
        train_log_probs_N: log-probabilities of the policy being corrected to (old, or current), any float dtype.
        rollout_log_probs_N: those the engine sampled with.
        mask_N: trainable tokens.
        sequence_ids_N: sequence of each token, in [0, num_sequences).
        num_sequences: sequences of the pack.
        options: what to do.
    """
    mask_N = mask_N.bool()
    difference_N = (train_log_probs_N - rollout_log_probs_N).detach().double()
    difference_N = torch.where(mask_N, difference_N, torch.zeros_like(difference_N))
    kept_N = mask_N
    for rule in options.rejection:
        kept_N = kept_N & _satisfies(rule, difference_N, mask_N, sequence_ids_N, num_sequences)
    weights_N = None
    if options.level is not RolloutCorrectionLevel.NONE:
        weights_N = _compute_weights(difference_N, mask_N, sequence_ids_N, num_sequences, options).float()
    return Correction(weights_N, kept_N)


def _compute_weights(
    difference_N: Tensor, mask_N: Tensor, sequence_ids_N: Tensor, num_sequences: int, options: CorrectionOptions
) -> Tensor:
    is_sequence = options.level is RolloutCorrectionLevel.SEQUENCE
    exponent_N = difference_N
    if is_sequence:
        exponent_N = _sum_per_sequence(difference_N, sequence_ids_N, num_sequences)[sequence_ids_N]
    weights_N = exponent_N.clamp(-LOG_WEIGHT_CLAMP, LOG_WEIGHT_CLAMP).exp()
    if options.floor is None:
        weights_N = weights_N.clamp(max=options.truncation)
    else:
        inside_N = (weights_N >= options.floor) & (weights_N <= options.truncation)
        weights_N = torch.where(inside_N, weights_N, torch.zeros_like(weights_N))
    weights_N = torch.where(mask_N, weights_N, torch.zeros_like(weights_N))
    if options.normalize:
        # Every token of a sequence has its weight, so the mean over rows is the mean of their means.
        if is_sequence:
            counts_S = _sum_per_sequence(mask_N.double(), sequence_ids_N, num_sequences)
            sums_S = _sum_per_sequence(weights_N, sequence_ids_N, num_sequences)
            mean = (sums_S / counts_S.clamp(min=1)).sum() / (counts_S > 0).sum().clamp(min=1)
        else:
            mean = weights_N.sum() / mask_N.sum().clamp(min=1)
        weights_N = weights_N / mean if float(mean) > 0 else weights_N
    return weights_N


def _satisfies(
    rule: RejectionRule, difference_N: Tensor, mask_N: Tensor, sequence_ids_N: Tensor, num_sequences: int
) -> Tensor:
    """Tokens that a rule keeps. K1 is bounded as a probability ratio engine/trainer, so its bounds are logarithms."""
    clamped_N = difference_N.clamp(-LOG_WEIGHT_CLAMP, LOG_WEIGHT_CLAMP)
    if rule.statistic is RejectionStatistic.K1:
        values_N = -difference_N
    elif rule.statistic is RejectionStatistic.K2:
        values_N = 0.5 * difference_N**2
    else:
        values_N = torch.expm1(clamped_N) - clamped_N
    values_N = torch.where(mask_N, values_N, torch.zeros_like(values_N))
    if rule.scope is RejectionScope.SEQUENCE_SUM:
        values_N = _sum_per_sequence(values_N, sequence_ids_N, num_sequences)[sequence_ids_N]
    elif rule.scope is RejectionScope.SEQUENCE_MEAN:
        counts_S = _sum_per_sequence(mask_N.double(), sequence_ids_N, num_sequences)
        sums_S = _sum_per_sequence(values_N, sequence_ids_N, num_sequences)
        values_N = (sums_S / counts_S.clamp(min=1))[sequence_ids_N]
    elif rule.scope is RejectionScope.SEQUENCE_MAX:
        lowest_S = torch.full((num_sequences,), -torch.inf, dtype=values_N.dtype, device=values_N.device)
        ranked_N = torch.where(mask_N, values_N, torch.full_like(values_N, -torch.inf))
        values_N = lowest_S.scatter_reduce(0, sequence_ids_N, ranked_N, "amax")[sequence_ids_N]
    if rule.statistic is not RejectionStatistic.K1:
        return values_N <= rule.upper
    upper_N = values_N <= math.log(rule.upper)
    if rule.lower is None:
        return upper_N
    return upper_N & (values_N >= math.log(rule.lower))


def compute_effective_sample_fraction(weight_sum: float, weight_square_sum: float, num_tokens: float) -> float:
    """(sum w)^2 / (n sum w^2) = 1 / mean((w / mean w)^2): 1 for equal weights, 0 when there are none."""
    return weight_sum**2 / (num_tokens * weight_square_sum) if weight_square_sum > 0 else 0.0


def _sum_per_sequence(values_N: Tensor, sequence_ids_N: Tensor, num_sequences: int) -> Tensor:
    return torch.zeros(num_sequences, dtype=values_N.dtype, device=values_N.device).index_add(
        0, sequence_ids_N, values_N
    )
