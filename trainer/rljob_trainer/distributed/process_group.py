"""The process group of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rljob_trainer.errors import TransientError


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

    Raises:
        TransientError: rank 0 cannot be reached, or not all ranks came in time.
    """
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
