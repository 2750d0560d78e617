"""Two real FSDP2 ranks over gloo: gradients, weight hand-over, checkpoints at another world size, export."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tr_ranks import run_ranks
from tr_tiny import assert_same_gradient, make_loss, make_rows

from rljob_api.v1alpha1.algorithm import KLEstimator
from rljob_api.v1alpha1.model import DType
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.checkpoint.export import export_policy
from rljob_trainer.checkpoint.state import StatePart, StateWriter, gather_full_weights, load_state
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sharding import clean_parameter_name, shard_policy
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.quickstart.model import build_tokenizer
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.sync.buckets import combine_checksums, compute_tensor_checksum
from rljob_trainer.sync.gather import gather_buckets
from rljob_trainer.update import Ranks, apply_update

CPU = torch.device("cpu")


def all_reduce(values, operation=dist.ReduceOp.SUM):
    dist.all_reduce(values, op=operation)
    return values


def build(source, dtype=DType.FLOAT32, recompute=False):
    policy = PolicyModel(load_causal_lm(source))
    shard_policy(policy, init_device_mesh("cpu", (dist.get_world_size(),)), dtype, recompute_blocks=recompute)
    return policy, build_optimizer(policy, Training())


def update(policy, optimizer, learning_rate, seed=0, **limits):
    rows = make_rows(11, seed=seed, reference=True)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plan = plan_batches([row.num_tokens for row in rows], world_size, **limits)
    num_tokens, num_sequences = count_trainable(rows)
    batch = MiniBatch(split_rows(rows, plan)[rank], num_tokens, num_sequences, learning_rate, kl_coefficient=0.1)
    gradients = {}

    def keep(*_):
        for name, parameter in policy.named_parameters():
            gradients[clean_parameter_name(name)] = parameter.grad.full_tensor().clone()

    handle = optimizer.register_step_pre_hook(keep)
    loss = make_loss(entropy_coefficient=0.01, loss_kl_estimator=KLEstimator.K3)
    ranks = Ranks(world_size, all_reduce, lambda values: all_reduce(values, dist.ReduceOp.MAX))
    metrics = apply_update(
        policy, optimizer, batch, loss, gradient_clip=1e9, ranks=ranks, device=CPU, on_micro_batch=lambda: None
    )
    handle.remove()
    return metrics, gradients


def checksum(policy, dtype=torch.float32, publish=True):
    buckets = list(gather_buckets(policy, dtype, publish=publish, bucket_bytes=20_000))
    return len(buckets), combine_checksums(
        compute_tensor_checksum(name, tensor) for bucket in buckets for name, tensor in bucket.tensors()
    )


def run_rank(rank, source, directory):
    """What both ranks do; rank 0 writes what it found."""
    directory = Path(directory)
    found = {}
    policy, optimizer = build(source)
    # One row per micro-batch, then a single one: 11 rows leave rank 1 an empty micro-batch. Parameters are gathered in
    # each micro-batch, or ("kept") once per update.
    for name, limits in (
        ("one", {"micro_batch_sequences": 1}),
        ("all", {"micro_batch_tokens": 10_000}),
        ("kept", {"micro_batch_sequences": 1}),
    ):
        policy.keep_gathered = name == "kept"
        metrics, gradients = update(policy, optimizer, 0.0, **limits)
        found[name] = {"loss": metrics.loss, "norm": metrics.gradient_norm, "tokens": metrics.num_tokens}
        if rank == 0:
            torch.save(gradients, directory / f"gradients-{name}.pt")
    update(policy, optimizer, 1e-2, seed=1, micro_batch_tokens=30)
    found["num_buckets"], found["checksum"] = checksum(policy, publish=rank == 0)
    (directory / "saved").mkdir(exist_ok=True)
    dist.barrier()
    writer = StateWriter(use_gpu=False)
    writer.start(directory / "saved", {"policy": StatePart(policy, optimizer)})
    records = writer.finish()
    found["records"] = [record.path for record in records]
    weights = gather_full_weights(policy)
    if rank == 0:
        torch.save(weights, directory / "weights.pt")
    metrics, _ = update(policy, optimizer, 1e-2, seed=2, micro_batch_tokens=30)
    found["next"] = {"loss": metrics.loss, "norm": metrics.gradient_norm}
    _, found["next_checksum"] = checksum(policy)
    half, _ = build(source, DType.BFLOAT16, recompute=True)
    update(half, build_optimizer(half, Training()), 0.0, micro_batch_tokens=10_000)
    _, found["half_checksum"] = checksum(half, torch.bfloat16)
    (directory / f"found-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def two_ranks(tiny_model, tmp_path_factory):
    """Everything two ranks found; they run once."""
    directory = tmp_path_factory.mktemp("two-ranks")
    run_ranks(run_rank, 2, tiny_model, str(directory))
    return directory, [json.loads((directory / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["one", "all", "kept"])
def test_gradient_does_not_depend_on_the_world_size(two_ranks, one_rank, tiny_model, name):
    directory, (rank_0, rank_1) = two_ranks
    assert rank_0[name] == rank_1[name]
    policy, optimizer = build(tiny_model)
    metrics, expected = update(policy, optimizer, 0.0, micro_batch_tokens=10_000)
    assert rank_0[name]["loss"] == pytest.approx(metrics.loss, rel=1e-5)
    assert rank_0[name]["norm"] == pytest.approx(metrics.gradient_norm, rel=1e-5)
    gradients = torch.load(directory / f"gradients-{name}.pt")
    assert_same_gradient(gradients, expected)


def test_only_publishers_build_buckets(two_ranks):
    _, (rank_0, rank_1) = two_ranks
    assert rank_0["num_buckets"] > 1  # the bucket size of the test splits the model
    assert rank_1["num_buckets"] == 0


def test_handed_over_weights_have_the_checksum_of_the_full_weights(two_ranks):
    directory, (rank_0, _) = two_ranks
    weights = torch.load(directory / "weights.pt")
    names = {clean_parameter_name(name): tensor for name, tensor in weights.items()}
    names.pop("lm_head.weight", None)  # tied: handed over once, as the embedding
    assert rank_0["checksum"] == combine_checksums(
        compute_tensor_checksum(name, tensor) for name, tensor in names.items()
    )


def test_recomputed_bfloat16_blocks_hand_over_every_weight(two_ranks, tiny_model):
    """The recomputation wrapper changes parameter names; engines must see the Hugging Face ones."""
    _, (rank_0, rank_1) = two_ranks
    model = load_causal_lm(tiny_model, dtype=torch.bfloat16)
    expected = combine_checksums(compute_tensor_checksum(name, tensor) for name, tensor in model.named_parameters())
    assert rank_0["half_checksum"] == rank_1["half_checksum"] == expected


def test_each_rank_records_its_own_files(two_ranks):
    directory, (rank_0, rank_1) = two_ranks
    assert not set(rank_0["records"]) & set(rank_1["records"])
    on_disk = {
        str(path.relative_to(directory / "saved")) for path in (directory / "saved").rglob("*") if path.is_file()
    }
    assert set(rank_0["records"]) | set(rank_1["records"]) == on_disk


def test_a_checkpoint_of_two_ranks_loads_on_one(two_ranks, one_rank, tiny_model):
    """Same weights, and the same next update: AdamW's moments and step count came along."""
    directory, (rank_0, _) = two_ranks
    policy, optimizer = build(tiny_model)
    load_state(directory / "saved", {"policy": StatePart(policy, optimizer)})
    assert checksum(policy)[1] == rank_0["checksum"]
    metrics, _ = update(policy, optimizer, 1e-2, seed=2, micro_batch_tokens=30)
    assert metrics.loss == pytest.approx(rank_0["next"]["loss"], rel=1e-4)
    assert metrics.gradient_norm == pytest.approx(rank_0["next"]["norm"], rel=1e-4)
    weights = gather_full_weights(policy)
    fresh_optimizer = build_optimizer(policy, Training())
    load_state(directory / "saved", {"policy": StatePart(policy, fresh_optimizer)})
    steps = {float(state["step"]) for state in fresh_optimizer.state.values()}
    assert steps == {4.0}
    assert not math.isclose(float(weights["causal_lm.model.norm.weight"].sum()), 0.0)


def test_one_rank_hands_over_its_weights(one_rank, tiny_model):
    policy, optimizer = build(tiny_model, recompute=True)
    update(policy, optimizer, 0.0, micro_batch_tokens=10_000)
    model = load_causal_lm(tiny_model)
    assert checksum(policy)[1] == combine_checksums(
        compute_tensor_checksum(name, tensor) for name, tensor in model.named_parameters()
    )


def test_the_export_has_the_logits_of_the_policy(two_ranks, tiny_model, tmp_path):
    directory, _ = two_ranks
    weights = torch.load(directory / "weights.pt")
    target = tmp_path / "export" / "step-3"
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    build_tokenizer().save_pretrained(source)
    export_policy(target, weights, source=str(source), revision=None, dtype=torch.float32)
    exported = load_causal_lm(str(target), attention="sdpa")
    expected = load_causal_lm(tiny_model, attention="sdpa")
    expected.load_state_dict({clean_parameter_name(name): tensor for name, tensor in weights.items()}, strict=False)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, expected(ids).logits)
    assert exported.generation_config.eos_token_id == [1, 2]
    assert not target.with_name("step-3.tmp").exists()
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(target).encode("1 + 2 =") == build_tokenizer().encode("1 + 2 =")
