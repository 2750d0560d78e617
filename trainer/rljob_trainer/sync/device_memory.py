"""A flat GPU buffer that another process on the same node can map: one CUDA-IPC handle and where it lives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions


@dataclass(frozen=True)
class DeviceMemory:
    """Picklable without touching the GPU; mapped by `open`, or by the engine's own process through `reduction`.

    torch counts receivers in shared memory: the sender may drop its tensor at any time, and the allocator reuses the
    memory only after the receiver has let go. Each handle is opened exactly once.
    """

    gpu_uuid: str
    """As NVML names it, without a prefix: device indices differ between processes."""
    num_bytes: int
    arguments: tuple[Any, ...]
    """Of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""

    def reduction(self, device: int | str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(function, arguments)` for a `__reduce__` whose unpickling maps the bytes as a uint8 tensor.

        Args:
            device: index of the GPU in the process that unpickles; SGLang's patched torch also takes `gpu_uuid`.
        """
        bound = inspect.signature(_REBUILD).bind(*self.arguments)
        bound.arguments["storage_device"] = device
        return _REBUILD, bound.args

    def open(self, device_index: int) -> Tensor:
        """The bytes as a uint8 tensor in this process.

        Raises:
            RuntimeError: `device_index` is another GPU, or the sender is gone.
        """
        found = get_gpu_uuid(device_index)
        if found != self.gpu_uuid:
            raise RuntimeError(f"weight bucket lives on GPU {self.gpu_uuid}, but device {device_index} is GPU {found}")
        function, arguments = self.reduction(device_index)
        tensor: Tensor = function(*arguments)
        return tensor


_REBUILD = reductions.rebuild_cuda_tensor
"""Kept before engines patch the module."""


def share_device_memory(bytes_: Tensor) -> DeviceMemory:
    """Export a flat uint8 CUDA tensor. What its stream still writes is waited for first.

    The memory must come from plain cudaMalloc: `expandable_segments` and memory savers have no such handle.
    """
    assert bytes_.is_cuda, bytes_.device
    assert bytes_.dtype is torch.uint8, bytes_.dtype
    torch.cuda.current_stream(bytes_.device).synchronize()
    _, arguments = reductions.reduce_tensor(bytes_)
    return DeviceMemory(get_gpu_uuid(bytes_.device.index), bytes_.numel(), arguments)


def get_gpu_uuid(device_index: int) -> str:
    """UUID of a visible GPU."""
    return str(torch.cuda.get_device_properties(device_index).uuid)
