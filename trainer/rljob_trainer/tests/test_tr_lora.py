"""Adapters on two real FSDP2 ranks and on one: what is trained, handed over, saved, exported, and used as reference."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tr_job import build_job
from tr_ranks import run_ranks
from tr_tiny import make_loss, make_rows, save_byte_model

from rljob_api.v1alpha1.model import DType, LoRA
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.checkpoint.base_model import check_base_model, fingerprint_model
from rljob_trainer.checkpoint.export import export_policy
from rljob_trainer.checkpoint.state import StatePart, StateWriter, gather_full_weights, load_state
from rljob_trainer.errors import CheckpointError, ConfigurationError
from rljob_trainer.memory_plan import build_memory_request, read_model_shape
from rljob_trainer.models.loading import load_sharded_policy
from rljob_trainer.models.lora import adapters_off, add_adapters, initialise_adapters, merge_state
from rljob_trainer.models.packed_batch import pack_sequences
from rljob_trainer.models.policy import PolicyModel, load_causal_lm, load_config
from rljob_trainer.models.sharding import clean_parameter_name, shard_policy
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.sync.buckets import combine_checksums, compute_tensor_checksum
from rljob_trainer.sync.gather import gather_buckets
from rljob_trainer.update import Ranks, apply_update

CPU = torch.device("cpu")
LORA = LoRA(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "down_proj"])
BUCKET_BYTES = 20_000


def all_reduce(values, operation=dist.ReduceOp.SUM):
    dist.all_reduce(values, op=operation)
    return values


def build(source, lora=LORA, recompute=False, seed=7):
    """As a rank builds it: on the meta device, adapters, shards, weights from the files."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(policy):
        if lora is not None:
            add_adapters(policy, lora)
        shard_policy(policy, mesh, DType.FLOAT32, recompute_blocks=recompute)

    policy, why_whole = load_sharded_policy(source, None, field="spec.model.source", device=CPU, shard=shard)
    assert why_whole is None
    if lora is not None:
        initialise_adapters(policy, seed)
    return policy, build_optimizer(policy, Training())


def update(policy, optimizer, learning_rate, seed):
    rows = make_rows(9, seed=seed)
    plan = plan_batches([row.num_tokens for row in rows], dist.get_world_size(), micro_batch_tokens=30)
    batch = MiniBatch(split_rows(rows, plan)[dist.get_rank()], *count_trainable(rows), learning_rate)
    seen = []
    handle = optimizer.register_step_pre_hook(
        lambda *_: seen.extend(name for name, p in policy.named_parameters() if p.grad is not None)
    )
    ranks = Ranks(dist.get_world_size(), all_reduce, lambda values: all_reduce(values, dist.ReduceOp.MAX))
    metrics = apply_update(
        policy,
        optimizer,
        batch,
        make_loss(),
        gradient_clip=1e9,
        ranks=ranks,
        device=CPU,
        on_micro_batch=lambda: None,
    )
    handle.remove()
    return metrics, seen


def checksum(policy):
    buckets = list(gather_buckets(policy, torch.float32, publish=True, bucket_bytes=BUCKET_BYTES))
    return combine_checksums(
        compute_tensor_checksum(name, tensor) for bucket in buckets for name, tensor in bucket.tensors()
    )


def parts(policy, optimizer):
    return {"policy": StatePart(policy, optimizer, trainable_only=True)}


@torch.no_grad()
def log_probs(policy):
    rows = make_rows(4)
    pack = pack_sequences([row.prompt_ids for row in rows], [row.response_ids for row in rows], CPU)
    return policy(pack, temperature=1.0)[0]


def run_rank(rank, source, directory):
    directory = Path(directory)
    policy, optimizer = build(source)
    _, seen = update(policy, optimizer, 1e-2, 1)
    with adapters_off(policy):
        base = log_probs(policy).tolist()
    update(policy, optimizer, 1e-2, 2)
    found = {"with_gradient": seen, "base": base, "adapted": log_probs(policy).tolist(), "checksum": checksum(policy)}
    weights = gather_full_weights(policy)
    if rank == 0:
        torch.save(weights, directory / "weights.pt")
        torch.save(merge_state(policy, weights), directory / "merged.pt")
    (directory / "saved").mkdir(exist_ok=True)
    dist.barrier()
    writer = StateWriter(use_gpu=False)
    writer.start(directory / "saved", parts(policy, optimizer))
    writer.finish()
    following, _ = update(policy, optimizer, 1e-2, 3)
    found["next"] = [following.loss, following.gradient_norm]
    (directory / f"found-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(save_byte_model(tmp_path_factory.mktemp("lora") / "model"))


@pytest.fixture(scope="module")
def two_ranks(source, tmp_path_factory):
    """What two ranks found; they run once."""
    directory = tmp_path_factory.mktemp("lora-ranks")
    run_ranks(run_rank, 2, source, str(directory))
    return directory, [json.loads((directory / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def test_adapters_start_as_the_base_model(one_rank, source):
    policy, _ = build(source)
    plain = PolicyModel(load_causal_lm(source))
    assert torch.equal(log_probs(policy), log_probs(plain))
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * len(LORA.target_modules)  # A and B in each of two layers
    assert all("lora_" in name for name in trained)
    first = [parameter for name, parameter in policy.named_parameters() if "lora_A" in name]
    assert all(parameter.to_local().abs().max() > 0 for parameter in first)


def test_gradients_reach_adapters_only(two_ranks):
    _, found = two_ranks
    for rank in found:
        assert len(rank["with_gradient"]) == 12
        assert all("lora_" in name for name in rank["with_gradient"])


def test_the_base_is_what_it_was_and_is_the_reference(two_ranks, source):
    directory, (rank_0, _) = two_ranks
    weights = torch.load(directory / "weights.pt")
    plain = PolicyModel(load_causal_lm(source))
    for name, tensor in weights.items():
        if "lora_" not in name:
            assert torch.equal(tensor, plain.get_parameter(name.replace("base_layer.", ""))), name
    expected = log_probs(plain)
    assert torch.allclose(torch.tensor(rank_0["base"]), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(torch.tensor(rank_0["adapted"]), expected, rtol=1e-3, atol=1e-3)


def test_engines_get_the_merged_weights(two_ranks, source):
    """Names, shapes and values of a plain model, which computes what the adapted policy computes."""
    directory, found = two_ranks
    merged = {clean_parameter_name(name): tensor for name, tensor in torch.load(directory / "merged.pt").items()}
    merged.pop("lm_head.weight", None)  # tied
    expected = combine_checksums(compute_tensor_checksum(name, tensor) for name, tensor in merged.items())
    assert [rank["checksum"] for rank in found] == [expected] * 2
    plain = PolicyModel(load_causal_lm(source))
    missing, unexpected = plain.causal_lm.load_state_dict(merged, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    assert torch.allclose(log_probs(plain), torch.tensor(found[0]["adapted"]), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_holds_adapters_only_and_continues_at_another_world_size(two_ranks, one_rank, source):
    from torch.distributed.checkpoint import FileSystemReader

    directory, (rank_0, _) = two_ranks
    keys = FileSystemReader(directory / "saved" / "state").read_metadata().state_dict_metadata
    weights = [key for key in keys if key.startswith("policy.model.")]
    assert len(weights) == 12
    assert all("lora_" in key for key in weights)
    policy, optimizer = build(source, recompute=True, seed=99)  # another start: it must come from the checkpoint
    load_state(directory / "saved", parts(policy, optimizer))
    assert checksum(policy) == rank_0["checksum"]
    metrics, _ = update(policy, optimizer, 1e-2, 3)
    assert [metrics.loss, metrics.gradient_norm] == pytest.approx(rank_0["next"], rel=1e-4)


def test_a_checkpoint_of_adapters_is_no_checkpoint_of_the_whole_model(two_ranks, one_rank, source):
    directory, _ = two_ranks
    policy, optimizer = build(source, lora=None)
    with pytest.raises(CheckpointError):
        load_state(directory / "saved", {"policy": StatePart(policy, optimizer)})


def test_the_reference_pass_does_not_switch_the_adapters_gradients_off(one_rank, source):
    """FSDP2 keeps what it sees in the first forward pass."""
    policy, optimizer = build(source)
    with adapters_off(policy):
        log_probs(policy)
    _, seen = update(policy, optimizer, 1e-2, 1)
    assert len(seen) == 12


def test_the_export_is_a_plain_model_with_the_merged_weights(two_ranks, source, tmp_path):
    directory, (rank_0, _) = two_ranks
    target = tmp_path / "export"
    export_policy(target, torch.load(directory / "merged.pt"), source=source, revision=None, dtype=torch.float32)
    exported = PolicyModel(load_causal_lm(str(target)))
    assert torch.allclose(log_probs(exported), torch.tensor(rank_0["adapted"]), rtol=1e-4, atol=1e-5)
    assert not any("lora" in path.name or "adapter" in path.name for path in target.iterdir())


def test_all_linear_layers_of_the_blocks_are_the_default(source):
    policy = PolicyModel(load_causal_lm(source))
    add_adapters(policy, LoRA(rank=2))
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in policy.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_unknown_target_modules_are_named_with_those_that_exist(source):
    policy = PolicyModel(load_causal_lm(source))
    with pytest.raises(ConfigurationError, match=r"targetModules: \['query'\].*down_proj, gate_proj"):
        add_adapters(policy, LoRA(rank=2, target_modules=["q_proj", "query"]))


def test_adapters_know_the_weights_they_belong_to(source, tmp_path):
    fingerprint = fingerprint_model(source, None)
    shutil.copytree(source, tmp_path / "moved")
    assert fingerprint_model(str(tmp_path / "moved"), None) == fingerprint
    check_base_model(fingerprint, fingerprint, path=tmp_path, source=source)
    weights = tmp_path / "moved" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    other = fingerprint_model(str(tmp_path / "moved"), None)
    with pytest.raises(CheckpointError, match=r"spec\.model\.source: the adapters in .* were trained on"):
        check_base_model(fingerprint, other, path=tmp_path, source=source)
    with pytest.raises(CheckpointError, match=r"spec\.model\.lora: .* whole model"):
        check_base_model("", fingerprint, path=tmp_path, source=source)
    assert fingerprint_model("owner/name", "v1") == "owner/name@v1"


@pytest.mark.parametrize(
    ("spec", "trained", "frozen"),
    [
        ({}, 1, 0),
        ({"lora": {"rank": 8}}, 0, 1),
        ({"algorithm": {"kl": {"placement": "Loss"}}}, 1, 1),
        ({"lora": {"rank": 8}, "algorithm": {"kl": {"placement": "Loss"}}}, 0, 1),
        (
            {
                "lora": {"rank": 8},
                "algorithm": {"kl": {"placement": "Loss"}},
                "reference": {"source": "other"},
            },
            0,
            2,
        ),
        ({"lora": {"rank": 8}, "algorithm": {"type": "PPO"}}, 1, 1),
    ],
)
def test_the_memory_plan_knows_what_is_trained(spec, trained, frozen, source, tmp_path):
    """The base of adapters needs no gradients, no moments and no second copy as the reference."""
    job = build_job(run_directory=str(tmp_path), **spec)
    shape = read_model_shape(load_config(source))
    request = build_memory_request(job, shape, 2**36, chunk_tokens=2048, bucket_bytes=2**20)
    assert (request.num_models, request.num_frozen_models) == (trained, frozen)
