"""The critic on two real FSDP2 ranks: same gradient as on one, and a checkpoint that loads at another world size."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_tr_critic import with_returns
from torch.distributed.device_mesh import init_device_mesh
from tr_ranks import run_ranks
from tr_tiny import assert_same_gradient, make_rows

from rljob_api.v1alpha1.model import DType
from rljob_trainer.batching import plan_batches
from rljob_trainer.checkpoint.state import StatePart, StateWriter, load_state
from rljob_trainer.critic import CriticRank
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sharding import shard_policy
from rljob_trainer.models.value import load_value_model
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.update import Ranks

CPU = torch.device("cpu")


def sum_over_ranks(values):
    dist.all_reduce(values)
    return values


def build(job, source, recompute=False):
    """Policy and critic of one rank; the critic starts from the policy with one weight changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = PolicyModel(load_causal_lm(source))
    with torch.no_grad():
        policy.causal_lm.model.norm.weight.mul_(0.5)
    shard_policy(policy, mesh, DType.FLOAT32, recompute_blocks=recompute)
    model = load_value_model(source)
    shard_policy(model, mesh, DType.FLOAT32, recompute_blocks=recompute)
    ranks = Ranks(dist.get_world_size(), sum_over_ranks, lambda values: values)
    critic = CriticRank(job, model, ranks, CPU, lambda: None)
    critic.start_from_policy(policy)
    return policy, critic


def update(critic, learning_rate, seed, **limits):
    rows = with_returns(make_rows(11, seed=seed), seed)
    plan = plan_batches([row.num_tokens for row in rows], dist.get_world_size(), **limits)
    share = split_rows(rows, plan)[dist.get_rank()]
    gradients = {}

    def keep(*_):
        for name, parameter in critic.state.module.named_parameters():
            gradients[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad.full_tensor().clone()

    handle = critic.state.optimizer.register_step_pre_hook(keep)
    values = critic.compute_values(share)
    metrics = critic.update(MiniBatch(share, *count_trainable(rows), learning_rate))
    handle.remove()
    first = {
        index: values[m][r].tolist()
        for m, micro in enumerate(plan.rows[dist.get_rank()])
        for r, index in enumerate(micro)
    }
    return metrics, gradients, first


def run_rank(rank, job, source, directory):
    directory = Path(directory)
    policy, critic = build(job, source)
    # One row per micro-batch: 11 rows leave rank 1 an empty one.
    update(critic, 1e-2, 0, micro_batch_sequences=1)
    metrics, gradients, values = update(critic, 1e-2, 1, micro_batch_sequences=1)
    writer = StateWriter(use_gpu=False)
    (directory / "saved").mkdir(exist_ok=True)
    dist.barrier()
    writer.start(
        directory / "saved",
        {"policy": StatePart(policy, build_optimizer(policy, job.spec.training)), "critic": critic.state},
    )
    writer.finish()
    following, _, _ = update(critic, 1e-2, 2, micro_batch_tokens=30)
    found = {
        "loss": metrics.loss,
        "norm": metrics.gradient_norm,
        "values": values,
        "next": [following.loss, following.gradient_norm],
    }
    (directory / f"found-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        torch.save(gradients, directory / "gradients.pt")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from tr_job import build_job

    return build_job(run_directory=str(tmp_path_factory.mktemp("run")), algorithm={"type": "PPO"})


@pytest.fixture(scope="module")
def two_ranks(job, tiny_model, tmp_path_factory):
    """What two ranks found; they run once."""
    directory = tmp_path_factory.mktemp("critic-ranks")
    run_ranks(run_rank, 2, job, tiny_model, str(directory))
    return directory, [json.loads((directory / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_take_the_same_steps_as_one(two_ranks, one_rank, job, tiny_model):
    """The second update has the weights of the first, so the whole step is compared; blocks are recomputed here."""
    directory, (rank_0, rank_1) = two_ranks
    _, critic = build(job, tiny_model, recompute=True)
    update(critic, 1e-2, 0, micro_batch_tokens=10_000)
    metrics, expected, values = update(critic, 1e-2, 1, micro_batch_tokens=10_000)
    assert rank_0["loss"] == rank_1["loss"] == pytest.approx(metrics.loss, rel=1e-4)
    assert rank_0["norm"] == rank_1["norm"] == pytest.approx(metrics.gradient_norm, rel=1e-4)
    assert len(rank_0["values"]) + len(rank_1["values"]) == len(values) == 11
    for index, row in (rank_0["values"] | rank_1["values"]).items():
        assert row == pytest.approx(values[int(index)], rel=1e-3, abs=1e-5)
    gradients = torch.load(directory / "gradients.pt")
    assert set(gradients) == set(expected)
    difference = torch.stack([(gradients[name] - expected[name]).norm() for name in expected]).norm()
    assert difference <= 1e-3 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()


def test_a_critic_of_two_ranks_continues_on_one(two_ranks, one_rank, job, tiny_model):
    """Weights, head, moments and step count come along: the next update is the same."""
    directory, (rank_0, _) = two_ranks
    policy, critic = build(job, tiny_model)
    load_state(
        directory / "saved",
        {"policy": StatePart(policy, build_optimizer(policy, job.spec.training)), "critic": critic.state},
    )
    assert {float(state["step"]) for state in critic.state.optimizer.state.values()} == {2.0}
    metrics, _, _ = update(critic, 1e-2, 2, micro_batch_tokens=30)
    assert [metrics.loss, metrics.gradient_norm] == pytest.approx(rank_0["next"], rel=1e-4)


def test_the_same_seed_gives_the_same_gradient_at_once(two_ranks, one_rank, job, tiny_model):
    """Before any step there is no accumulated rounding: equal to 1e-5."""
    _, critic = build(job, tiny_model)
    _, one, _ = update(critic, 0.0, 0, micro_batch_sequences=1)
    _, critic = build(job, tiny_model, recompute=True)
    _, all_at_once, _ = update(critic, 0.0, 0, micro_batch_tokens=10_000)
    assert_same_gradient(one, all_at_once)


def test_a_checkpoint_without_a_critic_is_refused(one_rank, job, tiny_model, tmp_path):
    """A GRPO run's, for example: a critic that starts anew in the middle would look like one that was resumed."""
    policy, critic = build(job, tiny_model)
    part = StatePart(policy, build_optimizer(policy, job.spec.training))
    writer = StateWriter(use_gpu=False)
    writer.start(tmp_path, {"policy": part})
    writer.finish()
    with pytest.raises(CheckpointError, match="critic"):
        load_state(tmp_path, {"policy": part, "critic": critic.state})
