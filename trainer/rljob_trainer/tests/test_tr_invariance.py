"""The gradient of an update does not depend on micro-batches or world size, for every loss and aggregation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tr_ranks import run_ranks
from tr_tiny import assert_same_gradient, make_loss, make_rows

from rljob_api.v1alpha1.algorithm import KLEstimator, LossAggregation, PolicyLoss, RolloutCorrectionLevel
from rljob_api.v1alpha1.model import DType
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.algorithms.policy_losses import PolicyLossOptions
from rljob_trainer.algorithms.rollout_correction import CorrectionOptions
from rljob_trainer.batching import plan_batches
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sharding import clean_parameter_name, shard_policy
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, TrainRow, count_trainable, split_rows
from rljob_trainer.update import LossSettings, Ranks, apply_update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORLD_SIZES = (1, 2, 4)
SPLITS = (1, 2, 8)
FULL_GRID = ("PPOClip", "GSPO", "SequenceMeanTokenMean", "bypass")
"""The rest is compared at both ends: one micro-batch on one rank, eight on four ranks."""
NUM_ROWS = 19  # no world size and no split divides it
OPTIONS = PolicyLossOptions(clip_low=0.05, clip_high=0.1)
LOSSES: dict[str, LossSettings] = {
    str(loss): make_loss(
        policy_loss=loss,
        aggregation=LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        options=OPTIONS,
        entropy_coefficient=0.01,
        loss_kl_estimator=KLEstimator.K3,
    )
    for loss in PolicyLoss
} | {str(aggregation): make_loss(aggregation=aggregation, options=OPTIONS) for aggregation in LossAggregation}
LOSSES["bypass"] = make_loss(
    policy_loss=PolicyLoss.GPG, bypass_correction=CorrectionOptions(level=RolloutCorrectionLevel.SEQUENCE)
)

GRID = [
    (name, world_size, split)
    for name in LOSSES
    for world_size in WORLD_SIZES
    for split in SPLITS
    if name in FULL_GRID or (world_size, split) in ((1, 1), (4, 8))
]


def make_corrected_rows() -> list[TrainRow]:
    """Rows with weights, rejected tokens and selected tokens, so that all of the update's inputs are cut."""
    rows = make_rows(NUM_ROWS, reference=True)
    rng = np.random.default_rng(1)
    for row in rows:
        length = len(row.response_ids)
        row.token_weights = rng.uniform(0.5, 1.5, length).astype(np.float32)
        row.kept = rng.random(length) > 0.2
        row.selected = rng.random(length) > 0.7
    return rows


def compute_gradients(
    policy: PolicyModel, optimizer: torch.optim.Optimizer, settings: LossSettings, split: int
) -> dict[str, torch.Tensor]:
    """Full gradients of one update on all ranks."""
    rows = make_corrected_rows()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    rows_per_micro_batch = math.ceil(math.ceil(len(rows) / world_size) / split)
    plan = plan_batches([row.num_tokens for row in rows], world_size, micro_batch_sequences=rows_per_micro_batch)
    num_tokens, num_sequences = count_trainable(rows)
    batch = MiniBatch(split_rows(rows, plan)[rank], num_tokens, num_sequences, 0.0, kl_coefficient=0.1)
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in policy.named_parameters():
            gradient: Any = parameter.grad
            gradients[clean_parameter_name(name)] = gradient.full_tensor().clone()

    handle = optimizer.register_step_pre_hook(keep)

    def reduce(values: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        dist.all_reduce(values, op=operation)
        return values

    ranks = Ranks(world_size, reduce, lambda values: reduce(values, dist.ReduceOp.MAX))
    apply_update(
        policy,
        optimizer,
        batch,
        settings,
        gradient_clip=1e9,
        ranks=ranks,
        device=torch.device("cpu"),
        on_micro_batch=lambda: None,
    )
    handle.remove()
    return gradients


def run_rank(rank: int, source: str, directory: str) -> None:
    """Every loss and split on one world size; rank 0 keeps the gradients."""
    world_size = dist.get_world_size()
    policy = PolicyModel(load_causal_lm(source))
    shard_policy(policy, init_device_mesh("cpu", (world_size,)), DType.FLOAT32, recompute_blocks=False)
    optimizer = build_optimizer(policy, Training(weight_decay=0.0))
    found = {
        (name, split): compute_gradients(policy, optimizer, LOSSES[name], split)
        for name, size, split in GRID
        if size == world_size
    }
    if rank == 0:
        torch.save(found, Path(directory) / f"world-{world_size}.pt")


@pytest.fixture(scope="module")
def gradients(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    """World size -> (loss, split) -> gradients."""
    directory = tmp_path_factory.mktemp("gradients")
    found = {}
    for world_size in WORLD_SIZES:
        run_ranks(run_rank, world_size, tiny_model, str(directory))
        found[world_size] = torch.load(directory / f"world-{world_size}.pt")
    return found


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_gradient_depends_on_neither_split_nor_world_size(gradients, name):
    expected = gradients[1][name, 1]
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for other, world_size, split in GRID:
        if other == name:
            assert_same_gradient(gradients[world_size][name, split], expected)


def test_losses_and_aggregations_differ(gradients):
    """Otherwise the test above would compare one thing with itself."""
    norms = {name: sum(float(g.square().sum()) for g in gradients[1][name, 1].values()) for name in LOSSES}
    assert len({round(norm, 9) for norm in norms.values()}) == len(norms)
