"""What tests on GPUs share: when they run, how engines are started there, what is in use."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any, Final

import pytest
import torch

ENGINE_ARGS: Final[dict[str, Any]] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    # Kernels of our own that need NVLink multicast or a compiler are not what is tested.
    "disable_custom_all_reduce": True,
    "max_total_tokens": 8192,
    "cuda_graph_bs_decode": [1, 4, 16, 64],
}
"""Of SGLang: works in every build of it, starts fast, and leaves room for other tests on the same GPU (the pool is
small, so that `memoryFraction` only says how much others may take while it starts)."""
SETTLE_SECONDS: Final = 240.0
"""For the driver to take back the memory of processes that have ended; and for tests that began beside this one."""
SETTLE_BYTES: Final = 64 * 2**20


def needs_gpus(count: int = 1, package: str | None = None) -> list[pytest.MarkDecorator]:
    """Marks of tests for `count` GPUs and, perhaps, an engine."""
    found = torch.cuda.device_count()
    is_missing = package is not None and importlib.util.find_spec(package) is None
    return [
        pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, this machine has {found}"),
        pytest.mark.skipif(is_missing, reason=f"{package} is not installed here"),
        pytest.mark.timeout(900),
    ]


def list_gpu_indices() -> list[int]:
    """NVML indices of the visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [int(index) for index in visible.split(",")] if visible else list(range(torch.cuda.device_count()))


def read_used_bytes() -> list[int]:
    """Used memory of each visible GPU, as the driver reports it."""
    import pynvml

    pynvml.nvmlInit()
    return [
        int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used)
        for index in list_gpu_indices()
    ]


def list_gpu_pids() -> set[int]:
    """Processes that hold a context on a visible GPU."""
    import pynvml

    pynvml.nvmlInit()
    return {
        int(process.pid)
        for index in list_gpu_indices()
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
    }


def wait_until_freed(before_bytes: list[int], pids_before: set[int]) -> None:
    """Until every GPU is as empty as it was, and holds no process that was not there.

    Raises:
        AssertionError: it still is not, with what is left.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        pids, used = list_gpu_pids() - pids_before, read_used_bytes()
        left = [now - before for now, before in zip(used, before_bytes, strict=True)]
        if not pids and all(bytes_ <= SETTLE_BYTES for bytes_ in left):
            return
        assert time.monotonic() < deadline, f"left on the GPUs: processes {pids}, bytes {left}"
        time.sleep(0.5)
