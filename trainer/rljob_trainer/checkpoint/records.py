"""Files of a checkpoint as their writers saw them."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint directory."""
    num_bytes: int
    crc32: int


def compute_file_record(root: Path, path: Path) -> FileRecord:
    """Size and CRC-32 of a file, after flushing it to disk."""
    crc = 0
    num_bytes = 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(16 * 2**20):
            crc = zlib.crc32(block, crc)
            num_bytes += len(block)
    return FileRecord(str(path.relative_to(root)), num_bytes, crc)
