"""Real ranks over gloo on loopback, forked from a server that has torch imported already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rljob_trainer.distributed.process_group import Rendezvous, join_process_group, start_store

TIMEOUT_SECONDS = 300.0
# What tests of ranks import: done once, not in each rank.
PRELOADED = [
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.qwen2.modeling_qwen2",
    "rljob_trainer.checkpoint.export",
    "rljob_trainer.checkpoint.state",
    "rljob_trainer.models.loading",
    "rljob_trainer.inputs",
    "rljob_trainer.update",
]


def run_ranks(function: Callable[..., None], world_size: int, *arguments: Any, use_gpu: bool = False) -> None:
    """Call `function(rank, *arguments)` in `world_size` processes that have met; raises what one of them raises.

    With `use_gpu` each has its own GPU, and NCCL.
    """
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    store, rendezvous = start_store("127.0.0.1", world_size, TIMEOUT_SECONDS)
    mp.start_processes(
        _enter, (function, world_size, rendezvous, arguments, use_gpu), nprocs=world_size, start_method="forkserver"
    )
    del store


def _enter(
    rank: int,
    function: Callable[..., None],
    world_size: int,
    rendezvous: Rendezvous,
    arguments: tuple[Any, ...],
    use_gpu: bool,
) -> None:
    torch.set_num_threads(1)
    if use_gpu:
        torch.cuda.set_device(rank)
    join_process_group(
        rendezvous,
        rank=rank,
        world_size=world_size,
        store=None,
        use_gpu=use_gpu,
        timeout_seconds=TIMEOUT_SECONDS,
        collective_timeout_seconds=TIMEOUT_SECONDS,
    )
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
