"""The memory plan: numbers against measurements, and what it decides."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen2Config

from rljob_trainer.memory_plan import GIB, MemoryRequest, ModelShape, plan_memory, read_model_shape

QWEN_05B = ModelShape(24, 896, 4864, 14, 2, 64, 151_936, is_tied=True)
LLAMA_8B = ModelShape(32, 4096, 14_336, 32, 8, 128, 128_256, is_tied=False)
H200 = int(139.8 * GIB)


def request(model=QWEN_05B, **overrides):
    values = {
        "model": model,
        "device_bytes": H200,
        "world_size": 1,
        "tensor_parallel_size": 1,
        "memory_fraction": 0.4,
        "micro_batch_tokens": 32_768,
        "chunk_tokens": 2048,
        "bucket_bytes": 2 * GIB,
    }
    return MemoryRequest(**(values | overrides))


@pytest.mark.parametrize(
    ("config", "shape", "num_parameters"),
    [
        (
            Qwen2Config(
                vocab_size=151_936,
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            ),
            QWEN_05B,
            494_032_768,
        ),
        (
            LlamaConfig(
                vocab_size=128_256,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                tie_word_embeddings=False,
            ),
            LLAMA_8B,
            8_030_261_248,
        ),
    ],
)
def test_shapes_are_read_from_configs(config, shape, num_parameters):
    assert read_model_shape(config) == shape
    assert shape.num_parameters == pytest.approx(num_parameters, rel=1e-3)  # biases and norms are left out


def test_flops_of_a_token():
    """6 N + 6 layers x width x S: 3.03 GFLOP for Qwen2-0.5B at 512 tokens."""
    assert QWEN_05B.compute_flops_per_token(512) == pytest.approx(6 * 494e6 + 6 * 24 * 896 * 512, rel=1e-3)


def test_the_measured_update_fits_the_estimate():
    """One H200, 32,768 tokens, everything kept: torch reports 52.7 GiB, without the context of the process."""
    assert plan_memory(request()).trainer_peak / GIB == pytest.approx(52.7, rel=0.05)


def test_a_small_model_keeps_everything():
    plan = plan_memory(request())
    assert (plan.recompute_blocks, plan.keep_gathered, plan.keep_logits, plan.offload_engine) == (
        False,
        True,
        True,
        False,
    )
    assert plan.fits


def test_what_costs_least_is_given_up_first():
    """From plenty of memory to little; every choice is the first in the order that fits."""
    choices = []
    for gib in (140, 105, 95, 80, 60, 30):
        plan = plan_memory(request(device_bytes=gib * GIB, memory_fraction=0.5))
        choices.append((plan.recompute_blocks, plan.offload_engine, plan.keep_gathered, plan.keep_logits))
    assert choices[0] == (False, False, True, True)
    assert choices == sorted(choices, key=lambda choice: (choice[0], choice[1], not choice[2], not choice[3]))
    assert choices[-1][0]
    assert choices[-1][1]


def test_turns_are_taken_where_the_engine_fills_the_card():
    plan = plan_memory(request(memory_fraction=0.8))
    assert plan.offload_engine
    assert not plan.recompute_blocks
    assert "engine offloaded while training" in plan.describe()


def test_without_an_engine_nothing_is_offloaded():
    plan = plan_memory(request(memory_fraction=0.0))
    assert not plan.offload_engine
    assert plan.engine_weights == plan.engine_kv_cache == 0
    assert "engines have other GPUs" in plan.describe()


def test_what_cannot_fit_says_so():
    """Masters and moments of 8B are 96 GB: not on one card beside an engine, but on four."""
    assert not plan_memory(request(LLAMA_8B)).fits
    assert plan_memory(request(LLAMA_8B, world_size=8, micro_batch_tokens=8192)).fits


@pytest.mark.parametrize("recompute", [True, False])
def test_an_explicit_choice_is_kept(recompute):
    assert plan_memory(request(recompute_blocks=recompute)).recompute_blocks is recompute


def test_offloaded_state_leaves_the_plan():
    plan = plan_memory(request(LLAMA_8B, offload_optimizer=True, offload_parameters=True))
    assert plan.optimizer == plan.parameters == 0
    whole = plan_memory(request(LLAMA_8B, num_models=2, num_frozen_models=1))
    assert whole.parameters == 3 * plan_memory(request(LLAMA_8B)).parameters
    assert whole.optimizer == 2 * plan_memory(request(LLAMA_8B)).optimizer


def test_shards_shrink_with_the_world_and_weights_with_tensor_parallelism():
    one, four = plan_memory(request()), plan_memory(request(world_size=4, tensor_parallel_size=2))
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=1e-6)
    assert four.engine_weights == pytest.approx(one.engine_weights / 2, rel=1e-6)
    assert replace(four, optimizer=0).trainer_peak < one.trainer_peak
