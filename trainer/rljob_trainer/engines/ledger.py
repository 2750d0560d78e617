"""Which weights a hand-over must bring: names, shapes and dtype are checked before an engine sees a bucket.

Engines fuse parameters (q, k, v into one) and skip what they do not know; a misspelt or missing tensor would be a
silent fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoModelForCausalLM

from rljob_trainer.errors import EngineDied
from rljob_trainer.models.policy import load_config
from rljob_trainer.sync.buckets import DTYPE_NAMES, TensorEntry


class WeightLedger:
    """Book-keeping of one engine's weight versions and of the hand-over in progress."""

    def __init__(self, engine: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """`engine` is what messages call it; `shapes` by Hugging Face name, tied parameters once."""
        self._engine = engine
        self._shapes = dict(shapes)
        self._dtype = DTYPE_NAMES[dtype]
        self._missing: set[str] = set()
        self._pending_version: int | None = None
        self.version = 0
        """Of the weights in use."""

    def begin(self, version: int) -> None:
        """Open a hand-over; one that failed before is forgotten.

        Raises:
            EngineDied: the version does not grow.
        """
        if version <= self.version:
            raise EngineDied(f"{self._engine}: weight version {version} does not follow {self.version}")
        self._pending_version = version
        self._missing = set(self._shapes)

    def receive(self, entries: Sequence[TensorEntry]) -> None:
        """Check the tensors of a bucket and tick them off.

        Raises:
            EngineDied: no hand-over is open; an unknown name, another shape or another dtype.
        """
        if self._pending_version is None:
            raise EngineDied(f"{self._engine}: update without begin_update")
        for entry in entries:
            shape = self._shapes.get(entry.name)
            if shape is None:
                raise EngineDied(f"{self._engine}: weight update names {entry.name!r}, which the model does not have")
            if shape != tuple(entry.shape) or entry.dtype != self._dtype:
                raise EngineDied(
                    f"{self._engine}: weight {entry.name!r} arrives as {tuple(entry.shape)} {entry.dtype}, "
                    f"the model has {shape} {self._dtype}"
                )
            self._missing.discard(entry.name)

    def check_complete(self) -> int:
        """The version that `commit` will make current.

        Raises:
            EngineDied: no hand-over is open, or parameters are missing.
        """
        if self._pending_version is None:
            raise EngineDied(f"{self._engine}: end_update without begin_update")
        if self._missing:
            raise EngineDied(
                f"{self._engine}: weight update lacks {len(self._missing)} parameters, "
                f"for example {min(self._missing)!r}"
            )
        return self._pending_version

    def commit(self) -> int:
        """Close the hand-over; the new version."""
        self.version, self._pending_version = self.check_complete(), None
        return self.version


def read_parameter_shapes(source: str, revision: str | None) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name, tied parameters once, without reading weights.

    Raises:
        ConfigurationError: the model cannot be read.
    """
    config = load_config(source, revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
