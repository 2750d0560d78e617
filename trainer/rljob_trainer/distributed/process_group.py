"""The process group of the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, TCPStore

from rljob_trainer.errors import TransientError

NCCL_VARIABLES: Final = {
    # torch's default ends the process of a rank whose collective is late, and the healthy rank would be blamed for the
    # one that hangs. 2 aborts the communicator instead: its next collective raises and says what it waited for.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Before that torch would tell all ranks to dump what they know, through the store in rank 0 (where rank 0 hangs, it
    # would hang too), and then wait for four times this long, by default a minute.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}
BROKEN_COLLECTIVES: Final = (
    "Timed out waiting",
    "Connection closed by peer",
    "Connection reset by peer",
    "collective operation timeout",
    "communicator was aborted",
)
"""What gloo and NCCL say on a healthy rank whose peer is dead or hangs; they have no exception type for it."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet: rank 0's node IP (bare, also for IPv6) and the port its store took."""

    host: str
    port: int


def start_store(host: str, world_size: int, timeout_seconds: float) -> tuple[TCPStore, Rendezvous]:
    """Rank 0's store on a free port; the kernel picks the port, so nothing can take it in between."""
    store = TCPStore(
        host, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False
    )
    return store, Rendezvous(host, store.port)


def join_process_group(
    rendezvous: Rendezvous,
    *,
    rank: int,
    world_size: int,
    store: TCPStore | None,
    use_gpu: bool,
    timeout_seconds: float,
    collective_timeout_seconds: float,
) -> None:
    """Initialise gloo (CPU tensors) and, on GPUs, NCCL for device tensors.

    A collective on a GPU that is not done within `collective_timeout_seconds` is aborted, not the process.

    Raises:
        TransientError: rank 0 cannot be reached, or not all ranks came in time.
    """
    for name, value in NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        if store is None:
            store = TCPStore(
                rendezvous.host,
                rendezvous.port,
                world_size,
                is_master=False,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout_seconds),
        )
    except (RuntimeError, dist.DistError) as error:
        raise TransientError(
            f"rank {rank} of {world_size} could not meet the others at {rendezvous.host} port {rendezvous.port} within "
            f"{timeout_seconds:.0f} s: {error}"
        ) from error


def is_broken_collective(error: BaseException) -> bool:
    """Whether a rank fails only because another one is dead or hangs."""
    return isinstance(error, dist.DistError) or any(marker in str(error) for marker in BROKEN_COLLECTIVES)


def check_collectives(device: torch.device, rank: int) -> None:
    """After work on `device`: wait for its end, and whether every collective of it was carried out. An aborted one
    raises nothing by itself: what it should have filled is garbage, and only the next one fails.

    Raises:
        TransientError: one was aborted at its deadline.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    get_error = getattr(_find_backend(device), "get_error", None)  # gloo has none: its collectives raise
    if get_error is not None and get_error() == ErrorType.TIMEOUT:
        raise TransientError(f"rank {rank}: collective operation timeout: another rank is late or hangs")


def _find_backend(device: torch.device) -> Any:
    group = dist.group.WORLD
    assert group is not None, "join_process_group comes first"
    return group._get_backend(device)
