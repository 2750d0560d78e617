"""The engines that pass `engine_conformance`.

Native runs with all tests. The others need an environment of their own (`make test-engines`) and are skipped elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("engine_conformance")

from engine_conformance import (  # noqa: E402
    EngineConformance,
    compute_expected_log_probs,
    flatten_log_probs,
    generate,
    hand_over,
    make_requests,
    read_weights,
)
from engine_environment import needs  # noqa: E402
from engine_traits import Traits, make_settings  # noqa: E402
from tr_tiny import ARCHITECTURES, save_architecture  # noqa: E402

from rljob_api.v1alpha1.rollout import Engine  # noqa: E402
from rljob_trainer.engines.actor import create_adapter  # noqa: E402
from rljob_trainer.engines.contract import EngineAdapter, EngineSettings  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", metafunc.cls.traits.architectures)


class TestNative(EngineConformance):
    traits = Traits(
        "Native", lambda: create_adapter(Engine.NATIVE), architectures=tuple(ARCHITECTURES), has_processes=False
    )


class TestVLLM(EngineConformance):
    pytestmark = needs("vllm")
    traits = Traits(
        "VLLM",
        lambda: create_adapter(Engine.VLLM),
        architectures=("qwen2-untied", "qwen3-tied", "llama3-untied"),
    )

    @pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 4,
        reason="four processes of an engine take minutes to start on fewer than 4 cores",
    )
    def test_two_tensor_parallel_ranks_share_a_bucket(
        self, start: Callable[[EngineSettings], EngineAdapter], tmp_path: Path
    ) -> None:
        sources = [str(save_architecture(tmp_path / str(seed), "llama3-untied", seed=seed)) for seed in (0, 1)]
        engine = start(make_settings(sources[0], tensor_parallel_size=2))
        assert hand_over(engine, read_weights(sources[1]), 1) == 1
        groups = generate(engine, make_requests())
        expected = compute_expected_log_probs(sources[1], groups, 1.0, torch.float32)
        np.testing.assert_allclose(flatten_log_probs(groups), expected, rtol=2e-5, atol=2e-5)


class TestSGLang(EngineConformance):
    pytestmark = needs("sglang")
    traits = Traits(
        "SGLang",
        lambda: create_adapter(Engine.SGLANG),
        architectures=tuple(ARCHITECTURES),
        no_seeds="SGLang has seeds per request in its deterministic mode only, which its CPU build has not",
    )
