"""Flattened weight buckets: one contiguous byte array per transfer instead of one object per tensor."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT_BYTES: Final = 64
DEFAULT_BUCKET_BYTES: Final = 256 * 2**20

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
DTYPES: Final[dict[str, torch.dtype]] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor inside a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors laid out in one byte array; plain numpy, so an object store maps it without a copy."""

    entries: list[TensorEntry]
    data: NDArray[np.uint8]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into `data`. Read-only memory is fine: receivers copy out of them."""
        for entry in self.entries:
            raw = self.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
            flat = (
                torch.frombuffer(raw, dtype=DTYPES[entry.dtype])
                if entry.num_bytes
                else torch.empty(0, dtype=DTYPES[entry.dtype])
            )
            yield entry.name, flat.view(entry.shape)


def build_bucket(tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copy tensors (any device) into one aligned byte array on the host."""
    entries: list[TensorEntry] = []
    sources: list[Tensor] = []
    offset = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        entries.append(TensorEntry(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], offset, num_bytes))
        sources.append(tensor)
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    data = torch.empty(offset, dtype=torch.uint8)
    for entry, source in zip(entries, sources, strict=True):
        target = data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes].view(source.dtype).view(entry.shape)
        target.copy_(source)
    return Bucket(entries, data.numpy())


def compute_tensor_checksum(name: str, tensor: Tensor) -> int:
    """CRC-32 of name and bytes, as stored (the dtype matters)."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(raw.data, zlib.crc32(name.encode()))


def combine_checksums(checksums: Iterable[int]) -> int:
    """One number from the checksums of all tensors, whatever their order."""
    combined = 0
    for checksum in checksums:
        combined ^= checksum
    return combined
