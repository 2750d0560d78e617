"""TensorBoard event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

DIRECTORY: Final = "tensorboard"


class TensorBoardTracker:
    """Appends to `<run directory>/tensorboard`; every attempt adds a file, TensorBoard shows them as one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / DIRECTORY
        self._writer: Any = None

    def open(self) -> None:
        """Loads the library here, not in the loop's thread."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self._directory))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Flushed, so that a killed driver loses nothing."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, succeeded: bool) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
