"""The conformance suite on a GPU, and what an engine really gives back when it is offloaded."""

from __future__ import annotations

import pytest
from engine_conformance import EngineConformance, generate, get_tokens, make_requests
from engine_traits import Traits, make_settings
from tr_gpu import ENGINE_ARGS, needs_gpus, read_used_bytes
from tr_tiny import ARCHITECTURES, save_tiny_model

from rljob_api.v1alpha1.model import DType
from rljob_api.v1alpha1.rollout import Engine
from rljob_trainer.engines.actor import create_adapter
from rljob_trainer.engines.contract import MemoryTag

GIB = 2**30
NUM_CYCLES = 5
NOISE_BYTES = 64 * 2**20
POOL_TOKENS = 2_000_000


def pytest_generate_tests(metafunc):
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", metafunc.cls.traits.architectures)


class TestSGLang(EngineConformance):
    """Weights come from host memory here; device memory is handed over in test_tr_gpu_handover.py."""

    pytestmark = needs_gpus(1, "sglang")
    traits = Traits(
        "SGLang",
        lambda: create_adapter(Engine.SGLANG),
        architectures=tuple(ARCHITECTURES),
        settings={"device": "cuda", "memory_fraction": 0.5, "engine_args": ENGINE_ARGS},
        dtype=DType.BFLOAT16,  # its kernels know no float32
        tolerance=0.05,
        model_options={"initializer_range": 0.1},  # small logits, which bfloat16 rounds by little
        forgets_offloaded_weights=True,
        no_seeds="SGLang has seeds per request in its deterministic mode only, which is not what is trained with",
    )


class TestNative(EngineConformance):
    pytestmark = needs_gpus(1)
    traits = Traits(
        "Native",
        lambda: create_adapter(Engine.NATIVE),
        architectures=tuple(ARCHITECTURES),
        settings={"device": "cuda"},
        tolerance=1e-4,
        has_processes=False,
    )


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_gpus(1, "sglang"), id="SGLang")])
def test_offload_gives_its_memory_back_each_time(mark, tmp_path):
    """Alone on its GPU. Repeated calls change nothing, cycles leave nothing behind, CUDA graphs still work."""
    empty = read_used_bytes()[0]
    engine = create_adapter(Engine.SGLANG)
    arguments = ENGINE_ARGS | {"max_total_tokens": POOL_TOKENS}
    model = str(save_tiny_model(tmp_path / "model", num_hidden_layers=8))
    engine.start(make_settings(model, dtype="BFloat16", device="cuda", memory_fraction=0.5, engine_args=arguments))
    try:
        # Two layers of keys and values of one head of 32 in bfloat16, for each token of the pool.
        pool_bytes = 8 * 2 * 32 * 2 * POOL_TOKENS
        before = get_tokens(generate(engine, make_requests(), temperature=0.0))
        loaded, freed = read_used_bytes()[0], []
        assert loaded > empty + pool_bytes
        for cycle in range(NUM_CYCLES):
            engine.offload([MemoryTag.KV_CACHE])
            engine.offload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
            freed.append(loaded - read_used_bytes()[0])
            engine.offload([MemoryTag.WEIGHTS])
            assert loaded - read_used_bytes()[0] == freed[-1], "a repeated call"
            engine.onload([MemoryTag.WEIGHTS])
            engine.onload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
            assert abs(read_used_bytes()[0] - loaded) < NOISE_BYTES, f"cycle {cycle}"
        assert min(freed) > 0.95 * pool_bytes
        assert max(freed) - min(freed) < NOISE_BYTES
        print(f"loaded {(loaded - empty) / GIB:.2f} GiB, offload frees {min(freed) / GIB:.2f} GiB in each cycle")
        for _ in range(2):
            engine.offload(list(MemoryTag))
        engine.onload(list(MemoryTag))
        # The weights come back as garbage until the next update: SGLang keeps no copy of them.
        assert engine.health().offloaded == ()
        assert set(before) == {request.uid for request in make_requests()}
    finally:
        engine.stop()
    assert read_used_bytes()[0] - empty < NOISE_BYTES
