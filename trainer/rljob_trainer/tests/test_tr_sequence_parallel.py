"""Ranks that share the tokens of a pack compute the losses, log-probabilities, values and gradients of one rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tr_ranks import run_ranks
from tr_tiny import assert_same_gradient, make_loss, make_rows, save_tiny_model

from rljob_api.v1alpha1.algorithm import KLEstimator, PolicyLoss
from rljob_api.v1alpha1.model import DType, Toggle
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.inputs import load_inputs
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sequence_parallel import build_sequence_group
from rljob_trainer.models.sharding import clean_parameter_name, shard_policy
from rljob_trainer.models.value import load_value_model
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.update import Ranks, apply_update, compute_row_log_probs, pack_rows

CPU = torch.device("cpu")
NUM_ROWS = 11  # one row per micro-batch: some group gets an empty one


def compute(policy, rows, ranks, num_groups, group, policy_loss):
    """Metrics, gradients and log-probabilities of an update with learning rate 0, on this group's rows."""
    plan = plan_batches([row.num_tokens for row in rows], num_groups, micro_batch_sequences=2)
    own = split_rows(rows, plan)[group]
    num_tokens, num_sequences = count_trainable(rows)
    optimizer = build_optimizer(policy, Training())
    gradients = {}

    def keep(*_):
        for name, parameter in policy.named_parameters():
            gradient = parameter.grad
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            gradients[clean_parameter_name(name)] = full.clone()

    optimizer.register_step_pre_hook(keep)
    metrics = apply_update(
        policy,
        optimizer,
        MiniBatch(own, num_tokens, num_sequences, 0.0, kl_coefficient=0.1),
        make_loss(policy_loss=policy_loss, entropy_coefficient=0.01, loss_kl_estimator=KLEstimator.K3),
        gradient_clip=1e9,
        ranks=ranks,
        device=CPU,
        on_micro_batch=lambda: None,
    )
    log_probs = compute_row_log_probs(policy, own, temperature=0.8, device=CPU, on_micro_batch=lambda: None)
    by_row = {
        index: torch.from_numpy(values)
        for indices, micro in zip(plan.rows[group], log_probs, strict=True)
        for index, values in zip(indices, micro, strict=True)
    }
    return {
        "loss": metrics.loss,
        "entropy": metrics.entropy,
        "kl": metrics.kl,
        "norm": metrics.gradient_norm,
        "gradients": gradients,
        "log_probs": by_row,
    }


def run_rank(rank, source, directory, size, policy_loss):
    world_size = dist.get_world_size()
    group = build_sequence_group("cpu", world_size, size)

    def sum_over_ranks(values):
        dist.all_reduce(values)
        return values / size

    def max_over_ranks(values):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    mesh = init_device_mesh("cpu", (world_size,))
    policy = PolicyModel(load_causal_lm(source))
    policy.sequence_group = group
    shard_policy(policy, mesh, DType.FLOAT32, recompute_blocks=size == 4)
    rows = make_rows(NUM_ROWS, reference=True)
    ranks = Ranks(world_size, sum_over_ranks, max_over_ranks)
    found = compute(policy, rows, ranks, world_size // size, rank // size, PolicyLoss(policy_loss))
    critic = load_value_model(source)
    torch.nn.init.ones_(critic.classifier.score.weight)
    critic.sequence_group = group
    shard_policy(critic, mesh, DType.FLOAT32, recompute_blocks=False)
    with torch.no_grad():
        found["values"] = critic(pack_rows(rows, CPU))
    torch.save(found, Path(directory) / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four query heads on two key heads: key heads must be repeated for four ranks."""
    directory = tmp_path_factory.mktemp("model") / "model"
    return str(save_tiny_model(directory, num_attention_heads=4, num_key_value_heads=2, sliding_window=None))


@pytest.mark.parametrize(
    ("world_size", "size", "policy_loss"),
    [(2, 2, "PPOClip"), (4, 2, "GSPO"), (4, 4, "PPOClip")],
)
def test_sharing_tokens_changes_nothing(source, tmp_path, world_size, size, policy_loss):
    run_ranks(run_rank, world_size, source, str(tmp_path), size, policy_loss)
    found = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(world_size)]
    rows = make_rows(NUM_ROWS, reference=True)
    alone = Ranks(1, lambda values: values, lambda values: values)
    expected = compute(PolicyModel(load_causal_lm(source)), rows, alone, 1, 0, PolicyLoss(policy_loss))
    for rank, one in enumerate(found):
        for name in ("loss", "entropy", "kl", "norm"):
            assert one[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (rank, name)
        for index, log_probs in one["log_probs"].items():
            torch.testing.assert_close(log_probs, expected["log_probs"][index], rtol=1e-5, atol=1e-5)
    # Every row was computed, by all ranks of its group.
    counted = sorted(index for one in found for index in one["log_probs"])
    assert counted == sorted([*range(NUM_ROWS)] * size)
    assert_same_gradient(found[0]["gradients"], expected["gradients"])
    critic = load_value_model(source)
    torch.nn.init.ones_(critic.classifier.score.weight)
    with torch.no_grad():
        values = critic(pack_rows(rows, CPU))
    for one in found:
        torch.testing.assert_close(one["values"], values, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_divide_are_refused_before_anything_starts(source, make_job, tmp_path):
    job = make_job(run_directory=str(tmp_path), model=source, training={"sequence_parallel_size": 3}, ranks=3)
    with pytest.raises(
        ConfigurationError, match=r"spec\.training\.sequenceParallelSize: 3.*4 attention heads.*1, 2, 4"
    ):
        load_inputs(job, lambda _: None)


def test_compilation_on_demand_and_shared_tokens_exclude_each_other(source, make_job, tmp_path):
    job = make_job(run_directory=str(tmp_path), model=source, training={"sequence_parallel_size": 2})
    model = job.spec.model.model_copy(update={"compile": Toggle.ALWAYS})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
    with pytest.raises(ConfigurationError, match=r"spec\.model\.compile: Always.*sequenceParallelSize.*Auto"):
        load_inputs(job, lambda _: None)
