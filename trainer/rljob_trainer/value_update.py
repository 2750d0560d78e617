"""Values and one optimizer update of a sharded critic (shape legend: R response tokens of a micro-batch)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_trainer.algorithms.aggregation import aggregate, compute_token_weights
from rljob_trainer.algorithms.value_loss import compute_value_loss
from rljob_trainer.models.sharding import iterate_micro_batches
from rljob_trainer.models.value import ValueModel
from rljob_trainer.optimization import set_learning_rate
from rljob_trainer.rows import FloatArray, MiniBatch, TrainRow, ValueMetrics
from rljob_trainer.update import Ranks, clip_gradients, pack_rows

SUM_NAMES = ("loss", "clipped", "value")


@torch.no_grad()
def compute_row_values(
    critic: ValueModel,
    micro_batches: list[list[TrainRow]],
    *,
    device: torch.device,
    on_micro_batch: Callable[[], None],
) -> list[list[FloatArray]]:
    """Values per row (one per token of its response), in the order given. Collective over ranks."""
    results: list[list[FloatArray]] = []
    for rows in micro_batches:
        flat = critic(pack_rows(rows, device, critic.pack_layout)).cpu().numpy()
        offsets = np.cumsum([0, *(len(row.response_ids) for row in rows)])
        results.append([flat[offsets[i] : offsets[i + 1]].copy() for i in range(len(rows))])
        on_micro_batch()
    return results


def apply_value_update(
    critic: ValueModel,
    optimizer: torch.optim.Optimizer,
    batch: MiniBatch,
    *,
    value_clip: float,
    gradient_clip: float,
    ranks: Ranks,
    device: torch.device,
    on_micro_batch: Callable[[], None],
) -> ValueMetrics:
    """One step on the clipped value loss, mean over the trainable tokens of the whole mini-batch. Collective; every
    rank returns the same metrics.

    Rows carry `values` (before the update) and `returns`. As for the policy, the gradient does not depend on
    micro-batches or ranks, and an update with NaN or Inf, or without a trainable token, is skipped on every rank alike.
    """
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device)
    for rows in iterate_micro_batches(critic, batch.micro_batches):
        loss, micro_sums = _compute_loss(critic, rows, batch, value_clip, device)
        (loss * ranks.world_size).backward()
        sums += micro_sums
        on_micro_batch()
    gradient_norm = clip_gradients(critic, gradient_clip)
    totals = dict(zip(SUM_NAMES, ranks.sum_over_ranks(sums).tolist(), strict=True))
    finite = math.isfinite(gradient_norm) and all(math.isfinite(total) for total in totals.values())
    if finite and batch.num_tokens_global > 0:
        set_learning_rate(optimizer, batch.learning_rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    num_tokens = max(batch.num_tokens_global, 1)
    return ValueMetrics(
        loss=totals["loss"],
        gradient_norm=gradient_norm,
        clip_fraction=totals["clipped"] / num_tokens,
        value_mean=totals["value"] / num_tokens,
        num_tokens=batch.num_tokens_global,
        is_finite=finite,
    )


def _compute_loss(
    critic: ValueModel, rows: list[TrainRow], batch: MiniBatch, value_clip: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Loss with graph (also for an empty micro-batch) and sums of metrics."""
    rows = [row for row in rows if row.response_ids]
    pack = pack_rows(rows, device, critic.pack_layout)
    values_R = critic(pack)

    def per_token(arrays: list[FloatArray | None]) -> Tensor:
        present = [array for array in arrays if array is not None]
        assert len(present) == len(arrays), "values and returns are computed before the update"
        return torch.from_numpy(np.concatenate(present)).to(device) if present else torch.zeros_like(values_R)

    old_R = per_token([row.values for row in rows])
    returns_R = per_token([row.returns for row in rows])
    mask = np.concatenate([row.loss_mask for row in rows]) if rows else np.zeros(len(values_R), dtype=np.bool_)
    mask_R = torch.from_numpy(mask).to(device)
    weights_R = compute_token_weights(
        LossAggregation.TOKEN_MEAN,
        mask_R,
        pack.sequence_ids_R,
        num_tokens_global=batch.num_tokens_global,
        num_sequences_global=batch.num_sequences_global,
        sequence_token_counts_S=torch.bincount(pack.sequence_ids_R, minlength=pack.num_sequences),
        norm_tokens=1,
    )
    loss = aggregate(compute_value_loss(values_R, old_R, returns_R, mask_R, value_clip), weights_R)
    detached_R = values_R.detach()
    sums = torch.stack(
        [
            loss.detach().double(),
            ((detached_R - old_R).abs() > value_clip).logical_and(mask_R).sum().double(),
            torch.where(mask_R, detached_R.double(), 0.0).sum(),
        ]
    )
    return loss, sums
