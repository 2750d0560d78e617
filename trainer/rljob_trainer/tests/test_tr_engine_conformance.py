"""The engines that pass `engine_conformance`.

Native runs with all tests. The others need an environment of their own (`make test-engines`) and are skipped elsewhere.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("engine_conformance")

from engine_conformance import EngineConformance, Traits  # noqa: E402
from engine_environment import needs  # noqa: E402
from tr_tiny import ARCHITECTURES  # noqa: E402

from rljob_api.v1alpha1.rollout import Engine  # noqa: E402
from rljob_trainer.engines.actor import create_adapter  # noqa: E402


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


class TestSGLang(EngineConformance):
    pytestmark = needs("sglang")
    traits = Traits(
        "SGLang",
        lambda: create_adapter(Engine.SGLANG),
        architectures=("qwen2-untied", "qwen3-tied", "llama3-untied"),
        no_seeds="SGLang has seeds per request in its deterministic mode only, which its CPU build has not",
    )
