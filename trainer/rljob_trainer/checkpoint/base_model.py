"""Which base model a checkpoint of adapters belongs to: adapters on other weights are noise."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Final

from rljob_trainer.errors import CheckpointError

SAMPLE_BYTES: Final = 2**20


def fingerprint_model(source: str, revision: str | None) -> str:
    """Identity of the weights, whatever their path: names, sizes, and first and last MiB of all safetensors files.

    A hub id without a local directory stands for itself.
    """
    directory = Path(source)
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        return f"{source}@{revision or 'main'}"
    crc = 0
    for path in files:
        size = path.stat().st_size
        crc = zlib.crc32(f"{path.name}:{size};".encode(), crc)
        with path.open("rb") as file:
            crc = zlib.crc32(file.read(SAMPLE_BYTES), crc)
            file.seek(max(0, size - SAMPLE_BYTES))
            crc = zlib.crc32(file.read(SAMPLE_BYTES), crc)
    return f"crc32:{crc:08x}"


def check_base_model(saved: str, current: str, *, path: Path, source: str) -> None:
    """Compare fingerprints; `saved` is empty where the checkpoint holds a whole model.

    Raises:
        CheckpointError: the checkpoint's adapters were trained on other weights, or there are none in it.
    """
    if not saved:
        raise CheckpointError(
            f"spec.model.lora: {path} is a checkpoint of a whole model, not of adapters; remove spec.model.lora, or "
            "use another spec.checkpoint.storage.path"
        )
    if saved != current:
        raise CheckpointError(
            f"spec.model.source: the adapters in {path} were trained on a base model with fingerprint {saved}, "
            f"{source} has {current}; use the base model that the run started with"
        )
