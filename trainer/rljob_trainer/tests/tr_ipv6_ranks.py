"""Two ranks that meet at the IPv6 address argv[1], in a namespace that has no IPv4; prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rljob_trainer.distributed.network import choose_interface, is_local_address, set_interface
from rljob_trainer.distributed.process_group import Rendezvous, join_process_group, start_store

TIMEOUT_SECONDS = 60.0
WORLD_SIZE = 2


def list_ipv4_sockets() -> list[str]:
    """TCP sockets of IPv4 in this namespace, one line each."""
    return Path("/proc/net/tcp").read_text().splitlines()[1:]


def work(rank: int, rendezvous: Rendezvous, results: Any) -> None:
    torch.set_num_threads(1)
    interface = choose_interface(os.environ, None, rendezvous.host, spans_nodes=True)
    set_interface(interface)
    join_process_group(
        rendezvous,
        rank=rank,
        world_size=WORLD_SIZE,
        store=None,
        use_gpu=False,
        timeout_seconds=TIMEOUT_SECONDS,
        collective_timeout_seconds=TIMEOUT_SECONDS,
    )
    values_N = torch.arange(4.0) + 10 * rank
    dist.all_reduce(values_N)
    results.put(
        {
            "rank": rank,
            "interface": interface,
            "sum": values_N.tolist(),
            "ipv4_sockets": list_ipv4_sockets(),
            "has_ipv4_loopback": is_local_address("127.0.0.1"),
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    store, rendezvous = start_store(sys.argv[1], WORLD_SIZE, TIMEOUT_SECONDS)
    results = mp.get_context("fork").SimpleQueue()
    mp.start_processes(work, (rendezvous, results), nprocs=WORLD_SIZE, start_method="fork")
    print(json.dumps([results.get() for _ in range(WORLD_SIZE)]))
    del store


if __name__ == "__main__":
    main()
