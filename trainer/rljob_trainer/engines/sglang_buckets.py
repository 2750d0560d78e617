"""Weight buckets in SGLang's `flattened_bucket` format: one payload per tensor parallel rank.

A payload is a pickle of `{"flattened_tensor": uint8 (num_bytes,), "metadata": [FlattenedTensorMetadata, ...]}` that the
scheduler unpickles with an allow-list: classes of ours are refused, so it holds only torch's and SGLang's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rljob_trainer.errors import EngineDied
from rljob_trainer.sync.buckets import DTYPES, Bucket, TensorEntry
from rljob_trainer.sync.device_memory import DeviceMemory

LOAD_FORMAT: Final = "flattened_bucket"


class _Rebuilt:
    """Pickles as a call: what is unpickled is the tensor."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def serialize_buckets(buckets: Sequence[Bucket], tensor_parallel_size: int) -> tuple[list[bytes], list[Tensor]]:
    """(payload per rank, tensors that must live until the engine has answered).

    Host buckets are copied into named shared memory once, which every rank on this machine maps; device buckets travel
    as the handle they carry.

    Args:
        buckets: one for all ranks, or one per rank, living on that rank's GPU.
        tensor_parallel_size: ranks of the replica.

    Raises:
        EngineDied: another number of buckets.
    """
    if len(buckets) not in (1, tensor_parallel_size):
        raise EngineDied(
            f"SGLang engine: weight update with {len(buckets)} buckets for {tensor_parallel_size} ranks; hand over one "
            "for all, or one per rank"
        )
    if len(buckets) == 1 and tensor_parallel_size > 1 and isinstance(buckets[0].data, DeviceMemory):
        raise EngineDied(
            f"SGLang engine: one device bucket for {tensor_parallel_size} ranks: a handle is opened exactly once, so "
            "each rank needs its own"
        )
    kept: list[Tensor] = []
    payloads = [_serialize(bucket, kept) for bucket in buckets]
    if len(payloads) == 1:
        # Named shared memory counts its readers: each payload is made anew.
        payloads += [_serialize(buckets[0], kept) for _ in range(tensor_parallel_size - 1)]
    return payloads, kept


def _serialize(bucket: Bucket, kept: list[Tensor]) -> bytes:
    data = bucket.data
    if isinstance(data, DeviceMemory):
        _, arguments = data.reduction(data.gpu_uuid)
        # Looked up now: SGLang may have replaced it, and pickle refuses a function that its name does not lead to.
        flat: Any = _Rebuilt(reductions.rebuild_cuda_tensor, arguments)
    else:
        flat = torch.empty(data.size, dtype=torch.uint8).share_memory_()
        flat.numpy()[:] = data
        kept.append(flat)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": [_describe(entry) for entry in bucket.entries]})
    return buffer.getvalue()


def _describe(entry: TensorEntry) -> Any:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    return FlattenedTensorMetadata(
        name=entry.name,
        shape=torch.Size(entry.shape),
        dtype=DTYPES[entry.dtype],
        start_idx=entry.offset_bytes,
        end_idx=entry.offset_bytes + entry.num_bytes,
        numel=entry.num_bytes,
    )
