"""The process group of the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rljob_trainer.errors import TransientError

NCCL_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT_ONLY: Final = "2"
"""torch's default ends the process of the rank that waited in vain, and the healthy rank would be blamed for the one
that hangs. Aborting the communicator lets it say what it waited for: its next collective raises."""


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
    os.environ.setdefault(NCCL_ERROR_HANDLING, ABORT_ONLY)
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
