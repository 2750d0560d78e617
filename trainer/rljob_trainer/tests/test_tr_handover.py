"""Weight hand-over: trainer shards of every family to an engine, bucket by bucket."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tr_families import FAMILIES
from tr_ranks import run_ranks

from rljob_api.v1alpha1.model import DType
from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.engines.native import NativeEngine
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sharding import shard_policy
from rljob_trainer.sync.buckets import combine_checksums, compute_size, compute_tensor_checksum, plan_buckets
from rljob_trainer.sync.device_memory import DeviceMemory
from rljob_trainer.sync.gather import gather_buckets, gather_tensors

BUCKET_BYTES = 4000
CASES = [f"{family}-{'tied' if tied else 'untied'}" for family in FAMILIES for tied in (True, False)]


def hand_over(rank, root):
    """Train nothing, but move the weights away from those on disk; rank 0 writes what engine and trainer have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for case in CASES:
        source = str(root / case)
        policy = PolicyModel(load_causal_lm(source))
        shard_policy(policy, mesh, DType.BFLOAT16, recompute_blocks=False)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.to_local().mul_(1.1)
        buckets = list(gather_buckets(policy, torch.bfloat16, publish=rank == 0, bucket_bytes=BUCKET_BYTES))
        again = list(gather_buckets(policy, torch.bfloat16, publish=rank == 0, bucket_bytes=10**9))
        tensors = [
            (name, tensor.dtype, compute_tensor_checksum(name, tensor))
            for name, tensor in gather_tensors(policy, torch.bfloat16)
        ]
        if rank != 0:
            assert not buckets, "only ranks that publish build buckets"
            continue
        engine = NativeEngine()
        engine.start(EngineSettings(source, None, "BFloat16", "cpu", (2,)))
        before = engine.checksum()
        engine.begin_update(1)
        for bucket in buckets:
            engine.update([bucket])
        model = load_causal_lm(source)
        expected = combine_checksums(
            compute_tensor_checksum(name, (parameter.detach() * 1.1).bfloat16())
            for name, parameter in model.named_parameters()
        )
        found[case] = {
            "version": engine.end_update(),
            "before": before,
            "engine": engine.checksum(),
            "trainer": combine_checksums(
                compute_tensor_checksum(name, tensor) for bucket in again for name, tensor in bucket.tensors()
            ),
            "expected": expected,
            "one by one": combine_checksums(checksum for _, dtype, checksum in tensors if dtype is torch.bfloat16),
            "dtypes": sorted({entry.dtype for bucket in buckets for entry in bucket.entries}),
            "num_buckets": [len(buckets), len(again)],
        }
        engine.stop()
    if rank == 0:
        (root / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(request, tmp_path_factory):
    """Results of all families; one rank casts its shards in the copy, several gather them."""
    root = tmp_path_factory.mktemp("handover")
    for case in CASES:
        family, tied = case.split("-")
        torch.manual_seed(0)
        FAMILIES[family](tied == "tied").save_pretrained(root / case)
    run_ranks(hand_over, request.param, root)
    return json.loads((root / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_engine_and_trainer_have_the_same_checksum(found, case):
    result = found[case]
    assert result["engine"] == result["trainer"] == result["one by one"] == result["expected"]
    assert result["engine"] != result["before"]
    assert result["version"] == 1
    assert result["dtypes"] == ["bfloat16"], "nothing travels in float32"
    assert result["num_buckets"][0] > 2
    assert result["num_buckets"][1] == 1


def test_buckets_hold_whole_tensors_in_order():
    shapes = [("a", (10,)), ("b", (100,)), ("c", (3, 5)), ("large", (1000,)), ("d", ()), ("e", (0, 4))]
    buckets = plan_buckets(shapes, torch.float32, bucket_bytes=600)
    assert [[entry.name for entry in entries] for entries in buckets] == [["a", "b", "c"], ["large"], ["d", "e"]]
    assert [compute_size(entries) for entries in buckets] == [64 + 448 + 60, 4000, 64]
    assert all(entry.offset_bytes % 64 == 0 for entries in buckets for entry in entries)


def test_a_handle_names_the_receivers_own_device():
    arguments = tuple(f"argument {index}" for index in range(15))
    memory = DeviceMemory("GPU-uuid", 8, arguments)
    function, for_index = memory.reduction(3)
    assert function is torch.multiprocessing.reductions.rebuild_cuda_tensor
    assert for_index == (*arguments[:6], 3, *arguments[7:])
    assert memory.reduction("GPU-uuid")[1][6] == "GPU-uuid"
