"""Weights straight into shards: each rank holds its own rows, and host memory never sees the whole model."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from tr_families import FAMILIES, SHAPE
from transformers import Qwen2Config, Qwen2ForCausalLM

from rljob_api.v1alpha1.model import DType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.loading import get_tensor_name, load_sharded_policy, load_sharded_value_model
from rljob_trainer.models.policy import load_causal_lm
from rljob_trainer.models.sharding import shard_policy

CPU = torch.device("cpu")
WORLD_SIZE, RANK = 3, 1
FIELD = "spec.model.source"


@contextmanager
def one_of_three():
    """A rank whose peers exist in name only: nothing here needs them. Models are saved before: only rank 0 would."""
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (WORLD_SIZE,))
    finally:
        dist.destroy_process_group()


def load(source, *, recompute=False):
    with one_of_three() as mesh:
        return load_sharded_policy(
            str(source),
            None,
            field=FIELD,
            device=CPU,
            shard=lambda policy: shard_policy(policy, mesh, DType.FLOAT32, recompute_blocks=recompute),
        )


def assert_holds_its_rows(module, expected, skip=()):
    seen = set()
    for name, parameter in torch.nn.Module.named_parameters(module):
        tensor_name = get_tensor_name(name)
        seen.add(tensor_name)
        if tensor_name not in skip:
            rows = torch.chunk(expected[tensor_name], WORLD_SIZE)
            own = rows[RANK] if len(rows) > RANK else expected[tensor_name][:0]
            assert torch.equal(parameter.to_local(), own), name
    assert seen - set(skip) == set(expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_rank_reads_its_own_rows_of_every_tensor(tmp_path, family, tied):
    torch.manual_seed(0)
    FAMILIES[family](tied).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()  # several files
    policy, why_whole = load(tmp_path, recompute=tied)
    assert why_whole is None
    whole = load_causal_lm(str(tmp_path))
    assert_holds_its_rows(policy, dict(whole.named_parameters()))
    assert (policy.causal_lm.lm_head.weight is policy.causal_lm.model.embed_tokens.weight) == tied
    buffers = dict(policy.named_buffers())
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[f"causal_lm.{name}"], buffer), name
    assert not policy.causal_lm.training
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_weights_in_pickles_are_loaded_whole_and_it_says_why(tmp_path):
    torch.manual_seed(0)
    model = FAMILIES["qwen2"](True)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    policy, why_whole = load(tmp_path)
    assert "no model.safetensors" in why_whole
    assert_holds_its_rows(policy, dict(model.named_parameters()))


def test_a_critic_starts_with_a_head_of_zeros(tmp_path):
    torch.manual_seed(0)
    model = FAMILIES["qwen2"](True)
    model.save_pretrained(tmp_path)
    with one_of_three() as mesh:
        critic, why_whole = load_sharded_value_model(
            str(tmp_path),
            None,
            field=FIELD,
            device=CPU,
            shard=lambda critic: shard_policy(critic, mesh, DType.FLOAT32, recompute_blocks=False),
        )
    assert why_whole is None
    assert_holds_its_rows(critic, dict(model.named_parameters()), skip={"score.weight", "score.bias"})
    assert all(not parameter.to_local().any() for parameter in critic.classifier.score.parameters())


def rewrite(path: Path, change) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_weights_that_do_not_fit_are_refused(tmp_path):
    FAMILIES["qwen2"](True).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(weights, lambda tensors: tensors.update({name: torch.zeros(3, 4)}))
    with pytest.raises(ConfigurationError, match=r"spec\.model\.source.*down_proj.*\[3, 4\].*\[32, 48\]"):
        load(tmp_path)
    rewrite(weights, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigurationError, match=r"lack 1 tensors.*down_proj"):
        load(tmp_path)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match=r"spec\.model\.source.*model\.safetensors"):
        load(tmp_path)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigurationError, match="git lfs pull"):
        load(tmp_path)


MEASURE = """
import json, sys, threading
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from rljob_api.v1alpha1.model import DType
from rljob_trainer.models.loading import load_sharded_policy
from rljob_trainer.models.policy import load_causal_lm
from rljob_trainer.models.sharding import shard_policy

def read_anonymous_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

def measure(load):
    before = peak = read_anonymous_bytes()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, read_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = load()
    done.set()
    watcher.join()
    return max(peak, read_anonymous_bytes()) - before

dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
mesh = init_device_mesh("cpu", (8,))
shard = lambda policy: shard_policy(policy, mesh, DType.FLOAT32, recompute_blocks=False)
def load():
    return load_sharded_policy(sys.argv[1], None, field="", device=torch.device("cpu"), shard=shard)
load()  # imports and thread pools
print(json.dumps({"sharded": measure(load), "whole": measure(lambda: load_causal_lm(sys.argv[1]))}))
"""


def test_the_peak_of_host_memory_is_the_shard_and_one_tensor(tmp_path):
    """The kernel's account of anonymous memory, in a process of its own (pages of the mapped file can be dropped)."""
    shape = SHAPE | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    sizes = [parameter.numel() for parameter in model.parameters()]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads(done.stdout.splitlines()[-1])
    float32, bfloat16 = 4, 2
    slack = 12 * 2**20  # allocator and interpreter
    assert peaks["sharded"] <= sum(sizes) / 8 * float32 + max(sizes) * bfloat16 + slack
    assert peaks["whole"] >= 0.8 * sum(sizes) * float32  # the bound above would catch a rank that loads everything
