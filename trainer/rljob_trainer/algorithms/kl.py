"""KL estimators and controllers."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import KLControllerType, KLEstimator

LOG_RATIO_CLAMP = 20.0
"""exp() of a clamped log-ratio stays finite in float32, and so does its gradient."""


def compute_kl(estimator: KLEstimator, log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), any shape.

    With d = log_probs - reference: K1 d, Abs |d|, K2 d^2/2, K3 exp(-d) + d - 1 (Schulman 2020). StraightThrough:
    the value of the estimator with the gradient of K2, which is the unbiased gradient of the KL (arXiv 2506.09477).
    For K3 the log-ratio is clamped to +-20 and, unlike elsewhere, the result is not capped: a cap would silently
    switch the gradient off once d < -2.6.
    """
    difference = log_probs - reference_log_probs
    if estimator is KLEstimator.K1:
        return difference
    if estimator is KLEstimator.ABS:
        return difference.abs()
    k2 = 0.5 * difference**2
    if estimator is KLEstimator.K2:
        return k2
    clamped = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    k3 = torch.expm1(-clamped) + clamped
    if estimator is KLEstimator.K3:
        return k3
    values = {
        KLEstimator.K1_STRAIGHT_THROUGH: difference,
        KLEstimator.ABS_STRAIGHT_THROUGH: difference.abs(),
        KLEstimator.K3_STRAIGHT_THROUGH: k3,
    }
    return k2 - k2.detach() + values[estimator].detach()


def compute_mean_kl(kl_BT: Tensor, mask_BT: Tensor) -> float:
    """Mean over rows of the mean over their tokens: what the adaptive controller follows.

    Rows without tokens are left out; counted as 0 they would pull the coefficient down.
    """
    mask_BT = mask_BT.bool()
    counts_B = mask_BT.sum(dim=1)
    sums_B = torch.where(mask_BT, kl_BT, torch.zeros_like(kl_BT)).double().sum(dim=1)
    rows_R = counts_B > 0
    return float((sums_B[rows_R] / counts_B[rows_R]).mean()) if bool(rows_R.any()) else 0.0


def update_kl_coefficient(
    coefficient: float,
    controller: KLControllerType,
    *,
    measured_kl: float,
    target: float,
    horizon_samples: int,
    num_samples: int,
) -> float:
    """The next coefficient: Adaptive multiplies by 1 + clip(kl/target - 1, +-0.2) n/horizon (arXiv 1909.08593)."""
    if controller is KLControllerType.FIXED:
        return coefficient
    error = min(max(measured_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * num_samples / horizon_samples)
