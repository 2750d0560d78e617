"""One optimizer update of a sharded policy (shape legend: R response tokens of a micro-batch, S its sequences)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rljob_api.v1alpha1.algorithm import KLEstimator, LossAggregation, PolicyLoss
from rljob_trainer.algorithms.aggregation import aggregate, compute_token_weights
from rljob_trainer.algorithms.kl import compute_kl
from rljob_trainer.algorithms.policy_losses import PolicyLossOptions, compute_policy_loss
from rljob_trainer.algorithms.rollout_correction import (
    CorrectionOptions,
    compute_correction,
    compute_effective_sample_fraction,
)
from rljob_trainer.models.log_probs import compute_entropy, compute_sum_pi_squared
from rljob_trainer.models.packed_attention import send
from rljob_trainer.models.packed_batch import EXACT_LAYOUT, PackedBatch, PackLayout, pack_sequences
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.models.sharding import iterate_micro_batches
from rljob_trainer.optimization import set_learning_rate
from rljob_trainer.rows import BoolArray, FloatArray, MiniBatch, TrainRow, UpdateMetrics

SUM_NAMES = ("loss", "entropy", "kl", "rollout_kl", "clipped", "trainable", "rejected", "weight", "weight_square")


@dataclass(frozen=True)
class LossSettings:
    """What is minimised, from `spec.algorithm` and `spec.rollout`."""

    policy_loss: PolicyLoss
    aggregation: LossAggregation
    temperature: float
    norm_tokens: int
    """Constant length of SequenceMeanTokenSumNorm."""
    entropy_coefficient: float = 0.0
    loss_kl_estimator: KLEstimator | None = None
    """Set when the KL term is part of the loss."""
    options: PolicyLossOptions = field(default_factory=PolicyLossOptions)
    bypass_correction: CorrectionOptions | None = None
    """Set when old log-probabilities are the engine's: weights and rejections then follow the policy as it moves."""


@dataclass(frozen=True)
class Ranks:
    """The collectives an update needs; a single process passes identities."""

    world_size: int
    sum_over_ranks: Callable[[Tensor], Tensor]
    max_over_ranks: Callable[[Tensor], Tensor]


def pack_rows(rows: list[TrainRow], device: torch.device, layout: PackLayout = EXACT_LAYOUT) -> PackedBatch:
    """Rows without response tokens carry nothing to predict and are left out."""
    rows = [row for row in rows if row.response_ids]
    return pack_sequences([row.prompt_ids for row in rows], [row.response_ids for row in rows], device, layout)


@torch.no_grad()
def compute_row_log_probs(
    policy: PolicyModel,
    micro_batches: list[list[TrainRow]],
    *,
    temperature: float,
    device: torch.device,
    on_micro_batch: Callable[[], None],
    with_sum_pi_squared: bool = False,
) -> list[list[FloatArray]]:
    """Log-probabilities per row (tokens of its response), in the order given. Collective over ranks.

    `with_sum_pi_squared`: arrays (2, tokens), log-probabilities and sums of squared probabilities over the vocabulary.
    """
    statistic = compute_sum_pi_squared if with_sum_pi_squared else compute_entropy
    results: list[list[FloatArray]] = []
    for rows in micro_batches:
        log_probs_R, statistic_R = policy(
            pack_rows(rows, device, policy.pack_layout), temperature=temperature, statistic=statistic
        )
        found = torch.stack([log_probs_R, statistic_R]) if with_sum_pi_squared else log_probs_R
        flat = found.float().cpu().numpy()
        offsets = np.cumsum([0, *(len(row.response_ids) for row in rows)])
        results.append([flat[..., offsets[i] : offsets[i + 1]].copy() for i in range(len(rows))])
        on_micro_batch()
    return results


def apply_update(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    batch: MiniBatch,
    settings: LossSettings,
    *,
    gradient_clip: float,
    ranks: Ranks,
    device: torch.device,
    on_micro_batch: Callable[[], None],
) -> UpdateMetrics:
    """Accumulate gradients over the micro-batches, clip, step. Collective; every rank returns the same metrics.

    Losses are sums weighted by global counts, so gradients of micro-batches and ranks add up to that of the whole
    mini-batch. FSDP averages over ranks; multiplying by their number turns the average into the sum.

    The update is skipped, on every rank alike, when loss, KL, entropy or gradient is not finite, and when no token is
    trainable (AdamW would still move the weights by momentum and decay).
    """
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device)
    deviation = torch.zeros(1, dtype=torch.float64, device=device)
    for rows in iterate_micro_batches(policy, batch.micro_batches):
        loss, micro_sums, micro_deviation = _compute_loss(policy, rows, batch, settings, device)
        (loss * ranks.world_size).backward()
        sums += micro_sums
        deviation = torch.maximum(deviation, micro_deviation)
        on_micro_batch()
    gradient_norm = clip_gradients(policy, gradient_clip)
    totals = dict(zip(SUM_NAMES, ranks.sum_over_ranks(sums).tolist(), strict=True))
    num_weighted = max(totals["trainable"], 1)
    num_tokens = max(totals["trainable"] - totals["rejected"], 1)
    finite = math.isfinite(gradient_norm) and all(math.isfinite(total) for total in totals.values())
    if finite and batch.num_tokens_global > 0:
        set_learning_rate(optimizer, batch.learning_rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return UpdateMetrics(
        loss=totals["loss"],
        gradient_norm=gradient_norm,
        entropy=totals["entropy"] / num_tokens,
        kl=totals["kl"] / num_tokens,
        rollout_kl=totals["rollout_kl"] / num_tokens,
        clip_fraction=totals["clipped"] / num_tokens,
        ratio_max_deviation=float(ranks.max_over_ranks(deviation)),
        num_tokens=batch.num_tokens_global,
        is_finite=finite,
        correction_weight_mean=totals["weight"] / num_weighted,
        effective_sample_fraction=compute_effective_sample_fraction(
            totals["weight"], totals["weight_square"], num_weighted
        ),
        rejected_fraction=totals["rejected"] / num_weighted,
    )


def _compute_loss(
    policy: PolicyModel, rows: list[TrainRow], batch: MiniBatch, settings: LossSettings, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss with graph (also for an empty micro-batch), sums of metrics, and max |ratio - 1|."""
    rows = [row for row in rows if row.response_ids]
    pack = pack_rows(rows, device, policy.pack_layout)
    temperature = 1.0 if batch.is_supervised else settings.temperature
    log_probs_R, entropy_R = policy(
        pack,
        temperature=temperature,
        with_entropy_gradient=settings.entropy_coefficient > 0 and not batch.is_supervised,
    )
    num_tokens = log_probs_R.shape[0]

    def per_token(get_values: Callable[[TrainRow], FloatArray | BoolArray | None]) -> Tensor | None:
        values = [get_values(row) for row in rows]
        present = [value for value in values if value is not None]
        if not present or len(present) != len(values):
            return None
        return send(torch.from_numpy(np.concatenate(present)), device)

    detached_R = log_probs_R.detach()
    rollout_R = per_token(lambda row: row.rollout_log_probs)
    reference_R = per_token(lambda row: row.reference_log_probs)
    old_R = per_token(lambda row: row.old_log_probs)
    old_R = detached_R if old_R is None else old_R
    token_weights_R = per_token(lambda row: row.token_weights)
    kept_R = per_token(lambda row: row.kept)
    # An empty micro-batch still takes part in every collective; nothing of it is selected.
    selected_R = per_token(lambda row: row.selected) if rows else torch.zeros_like(detached_R, dtype=torch.bool)
    trainable = [row.trainable for row in rows] or [False]
    trainable_R = send(torch.tensor(trainable), device)[pack.sequence_ids_R]
    if settings.bypass_correction is not None and not batch.is_supervised:
        correction = compute_correction(
            detached_R, old_R, trainable_R, pack.sequence_ids_R, pack.num_sequences, settings.bypass_correction
        )
        token_weights_R, kept_R = correction.weights_N, correction.kept_N
    mask_R = trainable_R if kept_R is None else trainable_R & kept_R
    counts_S = torch.zeros(pack.num_sequences, device=device).index_add(0, pack.sequence_ids_R, mask_R.float())
    weights_R = compute_token_weights(
        LossAggregation.TOKEN_MEAN if batch.is_supervised else settings.aggregation,
        mask_R,
        pack.sequence_ids_R,
        num_tokens_global=batch.num_tokens_global,
        num_sequences_global=batch.num_sequences_global,
        sequence_token_counts_S=counts_S,
        norm_tokens=settings.norm_tokens,
    )
    clipped_R = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    deviation = torch.zeros(1, dtype=torch.float64, device=device)
    if batch.is_supervised:
        loss = aggregate(-log_probs_R, weights_R)
    else:
        advantages_R = per_token(lambda row: row.advantages)
        output = compute_policy_loss(
            settings.policy_loss,
            log_probs_N=log_probs_R,
            old_log_probs_N=old_R,
            advantages_N=torch.zeros_like(detached_R) if advantages_R is None else advantages_R,
            mask_N=mask_R,
            sequence_ids_N=pack.sequence_ids_R,
            num_sequences=pack.num_sequences,
            options=settings.options,
            token_weights_N=token_weights_R,
            selected_N=selected_R,
        )
        loss = aggregate(output.token_losses_N, weights_R)
        if settings.loss_kl_estimator is not None and reference_R is not None:
            kl_R = compute_kl(settings.loss_kl_estimator, log_probs_R, reference_R)
            loss = loss + batch.kl_coefficient * aggregate(kl_R, weights_R)
        if settings.entropy_coefficient > 0:
            loss = loss - settings.entropy_coefficient * aggregate(entropy_R, weights_R)
        clipped_R = output.clipped_N
        ratio_R = (detached_R - old_R).exp()
        deviation = torch.where(mask_R, (ratio_R - 1).abs(), torch.zeros_like(ratio_R)).max().double().reshape(1)

    def masked_sum(values_R: Tensor, mask_R: Tensor = mask_R) -> Tensor:
        return torch.where(mask_R, values_R.detach().double(), 0.0).sum()

    zeros_R = torch.zeros_like(detached_R)
    correction_R = torch.ones_like(detached_R) if token_weights_R is None else token_weights_R
    sums = torch.stack(
        [
            loss.detach().double(),
            masked_sum(entropy_R),
            masked_sum(zeros_R if reference_R is None else compute_kl(KLEstimator.K3, detached_R, reference_R)),
            masked_sum(zeros_R if rollout_R is None else compute_kl(KLEstimator.K3, detached_R, rollout_R)),
            masked_sum(clipped_R),
            masked_sum(torch.ones_like(detached_R), trainable_R),
            masked_sum(~mask_R, trainable_R),
            masked_sum(correction_R, trainable_R),
            masked_sum(correction_R**2, trainable_R),
        ]
    )
    return loss, sums, deviation


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale gradients to a global norm of at most `limit`; returns the norm before.

    On the shards themselves: `clip_grad_norm_` sends every parameter through DTensor dispatch, 0.1 ms each.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    square = torch.stack(torch._foreach_norm(shards)).double().square().sum()
    mesh = gradients[0].device_mesh if isinstance(gradients[0], DTensor) else None
    if mesh is not None and mesh.size() > 1:
        dist.all_reduce(square, group=mesh.get_group())
    norm = square.sqrt()
    torch._foreach_mul_(shards, (limit / (norm + 1e-6)).clamp(max=1.0).to(shards[0].dtype))
    return float(norm)
