"""Policy losses on packed tokens (shape legend: N packed tokens, S sequences of the batch).

Each function returns per-token losses; `aggregation` turns them into one number. The log-ratio is clamped to +-20
before exp(), and masked tokens are replaced before any arithmetic, so that garbage under the mask (even NaN) reaches
neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import PolicyLoss

LOG_RATIO_CLAMP = 20.0
COVARIANCE_LOG_RATIO_CLAMP = 80.0
"""Clip-Cov and KL-Cov are defined without a clamp; this one only keeps exp() finite in float32."""
GSPO_LOG_RATIO_MAX = 10.0


@dataclass(frozen=True)
class PolicyLossOptions:
    """Numbers of the losses; each is read only by the losses that name it.

    `clip_low`, `clip_high`: ratio kept in [1 - low, 1 + high] (PPOClip, GSPO, CISPO, ClipCov; log-ratio for GMPO;
    divergence bounds for DPPO*). `clip_dual`: upper bound for A < 0 as a multiple of |A| (PPOClip); None: no bound.
    `ratio_cap`: DPPO*. `tau_positive`, `tau_negative`: SAPO temperatures. `dro_beta`: DRO regularisation.
    `cov_fraction`, `cov_low`, `cov_high`, `kl_cov_coefficient`: ClipCov and KLCov.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    ratio_cap: float = 20.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    dro_beta: float = 1.0
    cov_fraction: float = 0.0002
    cov_low: float = 1.0
    cov_high: float = 5.0
    kl_cov_coefficient: float = 1.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """Packed inputs (N,): float32 log-probs and advantages, bool mask, long sequence ids in [0, num_sequences)."""

    log_probs_N: Tensor
    old_log_probs_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor
    sequence_ids_N: Tensor
    num_sequences: int
    options: PolicyLossOptions
    selected_N: Tensor


@dataclass(frozen=True)
class PolicyLossOutput:
    """Per-token losses (N,) with gradient, and which trainable tokens were clipped (N,) bool."""

    token_losses_N: Tensor
    clipped_N: Tensor


def compute_policy_loss(
    loss: PolicyLoss,
    *,
    log_probs_N: Tensor,
    old_log_probs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    sequence_ids_N: Tensor,
    num_sequences: int,
    options: PolicyLossOptions | None = None,
    token_weights_N: Tensor | None = None,
    selected_N: Tensor | None = None,
) -> PolicyLossOutput:
    """Per-token losses of `loss`.

    `token_weights_N` (rollout correction) multiply them, without gradient; GMPO, one product per sequence, takes their
    geometric mean over the sequence. `selected_N`: the tokens that ClipCov and KLCov treat, from
    `covariance.select_tokens` over the whole mini-batch.

    Raises:
        ValueError: ClipCov or KLCov without `selected_N`.
    """
    if loss in COVARIANCE_LOSSES and selected_N is None:
        raise ValueError(f"{loss} needs selected_N, chosen over the whole mini-batch by covariance.select_tokens")
    mask_N = mask_N.bool()

    def select(values_N: Tensor) -> Tensor:
        return torch.where(mask_N, values_N, torch.zeros_like(values_N))

    inputs = PolicyLossInputs(
        log_probs_N=select(log_probs_N),
        old_log_probs_N=select(old_log_probs_N.detach()),
        advantages_N=select(advantages_N.detach()),
        mask_N=mask_N,
        sequence_ids_N=sequence_ids_N,
        num_sequences=num_sequences,
        options=options or PolicyLossOptions(),
        selected_N=torch.zeros_like(mask_N) if selected_N is None else selected_N.bool() & mask_N,
    )
    output = LOSSES[loss](inputs)
    token_losses_N = select(output.token_losses_N)
    if token_weights_N is not None:
        weights_N = select(token_weights_N.detach())
        if loss is PolicyLoss.GMPO:
            weights_N = select(mean_per_sequence(weights_N.log(), inputs).exp())
        token_losses_N = token_losses_N * weights_N
    return PolicyLossOutput(token_losses_N, output.clipped_N & mask_N)


def mean_per_sequence(values_N: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """Mean over the trainable tokens of each sequence, spread back to its tokens (N,)."""
    kept_N = torch.where(inputs.mask_N, values_N, torch.zeros_like(values_N))
    zeros_S = torch.zeros(inputs.num_sequences, dtype=values_N.dtype, device=values_N.device)
    sum_S = zeros_S.index_add(0, inputs.sequence_ids_N, kept_N)
    count_S = zeros_S.index_add(0, inputs.sequence_ids_N, inputs.mask_N.to(values_N.dtype))
    return (sum_S / count_S.clamp(min=1))[inputs.sequence_ids_N]


def compute_ratio(inputs: PolicyLossInputs, clamp: float = LOG_RATIO_CLAMP) -> Tensor:
    """exp(clamp(log pi - log pi_old, +-clamp)) (N,)."""
    return (inputs.log_probs_N - inputs.old_log_probs_N).clamp(-clamp, clamp).exp()


def compute_ppo_clip(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """max(-A r, -A clip(r, 1-low, 1+high)), for A < 0 at most -A dual (arXiv 1707.06347, dual clip 1912.09729)."""
    options, advantages_N = inputs.options, inputs.advantages_N
    ratio_N = compute_ratio(inputs)
    plain_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss_N = torch.maximum(plain_N, clipped_N)
    is_clipped_N = clipped_N > plain_N
    if options.clip_dual is not None:
        bound_N = -advantages_N * options.clip_dual
        is_bounded_N = (advantages_N < 0) & (bound_N < loss_N)
        loss_N = torch.where(is_bounded_N, bound_N, loss_N)
        is_clipped_N = is_clipped_N | is_bounded_N
    return PolicyLossOutput(loss_N, is_clipped_N)


def compute_gspo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """PPO clip on the sequence ratio s = exp(mean log-ratio), with a token-wise gradient (GSPO, arXiv 2507.18071)."""
    options, advantages_N = inputs.options, inputs.advantages_N
    sequence_log_ratio_N = mean_per_sequence(inputs.log_probs_N - inputs.old_log_probs_N, inputs).detach()
    log_ratio_N = inputs.log_probs_N - inputs.log_probs_N.detach() + sequence_log_ratio_N
    ratio_N = log_ratio_N.clamp(max=GSPO_LOG_RATIO_MAX).exp()
    plain_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
    return PolicyLossOutput(torch.maximum(plain_N, clipped_N), clipped_N > plain_N)


def compute_sapo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A (4/tau) sigmoid(tau (r - 1)): a soft gate instead of a clip (SAPO, arXiv 2511.20347)."""
    options, advantages_N = inputs.options, inputs.advantages_N
    positive_N = torch.full_like(advantages_N, options.tau_positive)
    tau_N = torch.where(advantages_N > 0, positive_N, torch.full_like(advantages_N, options.tau_negative))
    gate_N = torch.sigmoid(tau_N * (compute_ratio(inputs) - 1)) * 4 / tau_N
    return PolicyLossOutput(-advantages_N * gate_N, torch.zeros_like(inputs.mask_N))


def compute_cispo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-sg(clip(r)) A log pi: the weight is clipped, the gradient is not (CISPO, arXiv 2506.13585)."""
    options = inputs.options
    ratio_N = compute_ratio(inputs).detach()
    weight_N = ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
    return PolicyLossOutput(-weight_N * inputs.advantages_N * inputs.log_probs_N, weight_N != ratio_N)


def compute_gpg(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A log pi (GPG, arXiv 2504.02546; REINFORCE)."""
    return PolicyLossOutput(-inputs.advantages_N * inputs.log_probs_N, torch.zeros_like(inputs.mask_N))


def compute_dro(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-(A log pi - beta/2 (log pi - log pi_old)^2) (DRO, arXiv 2405.19107)."""
    penalty_N = 0.5 * inputs.options.dro_beta * (inputs.log_probs_N - inputs.old_log_probs_N) ** 2
    return PolicyLossOutput(-(inputs.advantages_N * inputs.log_probs_N - penalty_N), torch.zeros_like(inputs.mask_N))


def compute_dppo_tv(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A sg(min(r, cap)) log pi while pi - pi_old stays inside the total-variation bounds (arXiv 2602.04879)."""
    options, advantages_N = inputs.options, inputs.advantages_N
    move_N = (inputs.log_probs_N.exp() - inputs.old_log_probs_N.exp()).detach()
    inside_N = torch.where(advantages_N > 0, move_N <= options.clip_high, move_N >= -options.clip_low)
    return _mask_divergence(inputs, inside_N)


def compute_dppo_kl(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """As DPPO-TV with the Bernoulli KL(pi_old || pi) of the token as the divergence; inward moves always count."""
    options, advantages_N = inputs.options, inputs.advantages_N
    old_N = inputs.old_log_probs_N.exp()
    new_N = inputs.log_probs_N.detach().exp()
    other_old_N, other_new_N = (1 - old_N).clamp(min=1e-8), (1 - new_N).clamp(min=1e-8)
    kl_N = (
        old_N * (inputs.old_log_probs_N - inputs.log_probs_N.detach()) + other_old_N * (other_old_N / other_new_N).log()
    )
    up_N, down_N = (kl_N <= options.clip_high) | (new_N <= old_N), (kl_N <= options.clip_low) | (new_N >= old_N)
    return _mask_divergence(inputs, torch.where(advantages_N > 0, up_N, down_N))


def _mask_divergence(inputs: PolicyLossInputs, inside_N: Tensor) -> PolicyLossOutput:
    weight_N = compute_ratio(inputs).detach().clamp(max=inputs.options.ratio_cap) * inside_N
    return PolicyLossOutput(-inputs.advantages_N * weight_N * inputs.log_probs_N, ~inside_N)


def compute_gmpo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-mean(A) exp(mean log-ratio), log-ratio clipped on the harmful side (GMPO, arXiv 2507.20673).

    Every token carries its sequence's loss, so that the mean over a sequence's tokens is that loss.
    """
    options = inputs.options
    sign_N = inputs.advantages_N.sign()
    log_ratio_N = inputs.log_probs_N - inputs.old_log_probs_N
    bounded_N = log_ratio_N.clamp(-options.clip_low, options.clip_high)
    harmful_N = torch.minimum(sign_N * log_ratio_N, sign_N * bounded_N)
    geometric_N = mean_per_sequence(sign_N * harmful_N, inputs).exp()
    loss_N = -mean_per_sequence(inputs.advantages_N, inputs) * geometric_N
    return PolicyLossOutput(loss_N, harmful_N != sign_N * log_ratio_N)


def compute_clip_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Single clip; the selected tokens of high covariance lose their gradient (Clip-Cov, arXiv 2505.22617)."""
    plain_N, clipped_N = compute_single_clip(inputs)
    loss_N = torch.maximum(plain_N, clipped_N)
    loss_N = torch.where(inputs.selected_N, torch.zeros_like(loss_N), loss_N)
    return PolicyLossOutput(loss_N, (clipped_N > plain_N) | inputs.selected_N)


def compute_kl_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A r, plus a KL penalty on the selected tokens of highest covariance (KL-Cov, arXiv 2505.22617)."""
    plain_N = -inputs.advantages_N * compute_ratio(inputs, COVARIANCE_LOG_RATIO_CLAMP)
    penalty_N = inputs.options.kl_cov_coefficient * (inputs.log_probs_N - inputs.old_log_probs_N).abs()
    return PolicyLossOutput(torch.where(inputs.selected_N, plain_N + penalty_N, plain_N), inputs.selected_N)


def compute_single_clip(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor]:
    """(-A r, -A clip(r)) of Clip-Cov."""
    options, advantages_N = inputs.options, inputs.advantages_N
    ratio_N = compute_ratio(inputs, COVARIANCE_LOG_RATIO_CLAMP)
    return -advantages_N * ratio_N, -advantages_N * ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)


COVARIANCE_LOSSES = frozenset({PolicyLoss.CLIP_COV, PolicyLoss.KL_COV})
"""Losses whose tokens are selected over a whole mini-batch, which no micro-batch sees."""

LOSSES: dict[PolicyLoss, Callable[[PolicyLossInputs], PolicyLossOutput]] = {
    PolicyLoss.PPO_CLIP: compute_ppo_clip,
    PolicyLoss.GSPO: compute_gspo,
    PolicyLoss.SAPO: compute_sapo,
    PolicyLoss.CISPO: compute_cispo,
    PolicyLoss.GPG: compute_gpg,
    PolicyLoss.DRO: compute_dro,
    PolicyLoss.DPPO_TV: compute_dppo_tv,
    PolicyLoss.DPPO_KL: compute_dppo_kl,
    PolicyLoss.GMPO: compute_gmpo,
    PolicyLoss.CLIP_COV: compute_clip_cov,
    PolicyLoss.KL_COV: compute_kl_cov,
}
