"""Which tokens Clip-Cov and KL-Cov treat (arXiv 2505.22617; shape legend: N tokens of a whole mini-batch).

The covariance of a token is (A - mean A)(log pi - mean log pi) over the trainable tokens of the mini-batch. Chosen once
for the whole mini-batch, the update does not depend on how that is cut into micro-batches.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob_api.v1alpha1.algorithm import PolicyLoss
from rljob_trainer.algorithms.policy_losses import COVARIANCE_LOG_RATIO_CLAMP, PolicyLossOptions


def select_tokens(
    loss: PolicyLoss,
    *,
    log_probs_N: Tensor,
    old_log_probs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    options: PolicyLossOptions,
    rng: np.random.Generator,
) -> NDArray[np.bool_]:
    """Selected tokens (N,) bool.

    KLCov takes the highest covariances. ClipCov draws at random among the tokens that the ratio does not clip and whose
    covariance lies between `cov_low` and `cov_high`; `rng` makes the draw repeatable. Both take `cov_fraction` of the
    trainable tokens, at least one.
    """
    mask_N = mask_N.bool()
    count = int(mask_N.sum())
    chosen_N = np.zeros(mask_N.shape[0], dtype=np.bool_)
    if count == 0:
        return chosen_N
    zeros_N = torch.zeros(mask_N.shape, dtype=torch.float64)
    advantages_N = torch.where(mask_N, advantages_N.double(), zeros_N)
    log_probs_N = torch.where(mask_N, log_probs_N.detach().double(), zeros_N)
    old_log_probs_N = torch.where(mask_N, old_log_probs_N.double(), zeros_N)
    covariance_N = (advantages_N - advantages_N.sum() / count) * (log_probs_N - log_probs_N.sum() / count)
    quota = max(1, int(options.cov_fraction * count))
    if loss is PolicyLoss.KL_COV:
        ranked_N = torch.where(mask_N, covariance_N, torch.full_like(covariance_N, -torch.inf))
        chosen_N[torch.topk(ranked_N, min(quota, count)).indices.numpy()] = True
        return chosen_N
    log_ratio_N = (log_probs_N - old_log_probs_N).clamp(-COVARIANCE_LOG_RATIO_CLAMP, COVARIANCE_LOG_RATIO_CLAMP)
    ratio_N = log_ratio_N.exp()
    bounded_N = ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
    is_clipped_N = -advantages_N * bounded_N > -advantages_N * ratio_N
    in_band_N = (covariance_N > options.cov_low) & (covariance_N < options.cov_high)
    eligible = np.flatnonzero((mask_N & ~is_clipped_N & in_band_N).numpy())
    chosen_N[rng.permutation(eligible)[:quota]] = True
    return chosen_N
