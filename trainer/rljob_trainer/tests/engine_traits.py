"""What the conformance suite is told of an engine, and the settings it starts engines with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rljob_api.v1alpha1.model import DType
from rljob_trainer.engines.contract import EngineAdapter, EngineSettings
from rljob_trainer.models.policy import TORCH_DTYPES

STOP_IDS: Final = (1, 2)
MAX_SEQUENCE_TOKENS: Final = 128


@dataclass(frozen=True)
class Traits:
    """What differs between engines, and why a test is left out."""

    name: str
    make: Callable[[], EngineAdapter]
    architectures: tuple[str, ...]
    """Of `tr_tiny.ARCHITECTURES`, for the hand-over in bfloat16; each starts an engine."""
    tolerance: float = 2e-5
    """Of log-probabilities against Hugging Face, in `dtype`."""
    has_processes: bool = True
    """False: the engine is its actor, whose death the whole-run tests cover."""
    no_seeds: str | None = None
    """Why equal requests do not give equal samples; comparisons are then made with greedy ones."""
    dtype: DType = DType.FLOAT32
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of every engine, for example its device."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """Of the tiny model's config."""
    forgets_offloaded_weights: bool = False
    """They are garbage until the next hand-over, as on GPUs, where no copy is kept."""
    no_checksum: str | None = None
    """Why the weights in use cannot be read back."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    def make_settings(self, model: str, **overrides: Any) -> EngineSettings:
        return make_settings(model, **({"dtype": self.dtype.value} | dict(self.settings) | overrides))


def make_settings(model: str, **overrides: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model_source": model,
        "model_revision": None,
        "dtype": "Float32",
        "device": "cpu",
        "stop_token_ids": STOP_IDS,
        "max_concurrent_samples": 64,
        "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        "num_threads": 1,
    }
    return EngineSettings(**(values | overrides))
