"""A two-node SGLang replica (TP 2) on one host: each node is a process, inside an outer gloo group.

Usage: tr_sglang_node.py HOST MODEL DIRECTORY. Starts both nodes, which meet at HOST, and waits for them. Each writes
what it saw to DIRECTORY/node-<rank>.json. At the end node 1's scheduler is killed while node 0 generates.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=600)
DEATH_SECONDS = 120.0


@dataclass(frozen=True)
class Node:
    rank: int
    host: str
    outer_port: int
    inner_port: int
    model: str
    directory: str


def run_node(node: Node) -> None:
    import torch.distributed as dist

    from rljob_trainer.distributed.network import GLOO_VARIABLE, find_interface, set_interface

    set_interface(find_interface(node.host))
    dist.init_process_group(
        "gloo", init_method=f"tcp://[{node.host}]:{node.outer_port}", rank=node.rank, world_size=2, timeout=TIMEOUT
    )
    from rljob_trainer.engines.child_guard import list_descendants, read_start_time
    from rljob_trainer.engines.contract import EngineSettings
    from rljob_trainer.engines.sglang import SGLangEngine

    del os.environ[GLOO_VARIABLE]  # engine actors are other processes than ranks, and find it out for themselves
    engine = SGLangEngine()
    engine.start(
        EngineSettings(
            model_source=node.model,
            model_revision=None,
            dtype="Float32",
            device="cpu",
            stop_token_ids=(1, 2),
            max_concurrent_samples=8,
            max_sequence_tokens=128,
            tensor_parallel_size=2,
            num_nodes=2,
            node_rank=node.rank,
            rendezvous=f"[{node.host}]:{node.inner_port}",
            host=node.host,
            num_threads=1,
        )
    )
    family = list_descendants(os.getpid())
    try:
        report = live_and_die(node, engine)
    finally:
        engine.stop()  # else its processes keep this one from ending
    report["num_left"] = sum(read_start_time(pid) == started for pid, started in family)
    Path(node.directory, f"node-{node.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def live_and_die(node: Node, engine: Any) -> dict[str, Any]:
    """What the node saw."""
    import pytest
    import torch.distributed as dist

    from rljob_trainer.engines.contract import GenerateRequest, SamplingParams
    from rljob_trainer.errors import EngineDied
    from rljob_trainer.models.policy import load_causal_lm
    from rljob_trainer.sync.buckets import build_bucket

    engine.health()
    report: dict[str, Any] = {"interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    requests = [GenerateRequest(f"p{index}", [3 + index, 4, 5], 2, 42, 1) for index in range(3)]
    if node.rank == 0:

        def run(key: str) -> None:
            groups = engine.generate(requests, SamplingParams(8, 1.0))
            report[key] = [
                [[sample.token_ids, sample.log_probs.tolist(), sample.weight_version] for sample in group.samples]
                for group in sorted(groups, key=lambda group: group.uid)
            ]

        run("before")
        policy = load_causal_lm(node.model)
        engine.begin_update(1)
        engine.update([build_bucket((name, value.detach() * 1.5) for name, value in policy.named_parameters())])
        report["version"] = engine.end_update()
        run("after")
    else:
        with pytest.raises(EngineDied, match="node 1 of this replica only lends its GPUs"):
            engine.begin_update(1)
    dist.barrier()  # node 1 serves until node 0 is done, and the outer group still works
    report["num_ipv4_sockets"] = len(Path("/proc/net/tcp").read_text().splitlines()) - 1
    deadline = time.monotonic() + DEATH_SECONDS
    try:
        if node.rank == 1:
            for pid in engine._require_started().engine.get_all_child_pids():
                os.kill(pid, signal.SIGKILL)
        while time.monotonic() < deadline:
            if node.rank == 0:
                list(engine.generate(requests, SamplingParams(100, 1.0)))
            engine.health()
    except EngineDied as error:
        report["death"] = str(error)
    return report


def main() -> None:
    from rljob_trainer.distributed.network import find_free_port

    ports = [str(find_free_port(sys.argv[1])) for _ in range(2)]
    nodes = [subprocess.Popen([sys.executable, *sys.argv, str(rank), *ports]) for rank in (0, 1)]
    try:
        codes = [node.wait(timeout=TIMEOUT.total_seconds()) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    if any(codes):
        raise SystemExit(f"the nodes ended with {codes}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main()
    else:
        host, model, directory, rank, outer_port, inner_port = sys.argv[1:]
        run_node(Node(int(rank), host, int(outer_port), int(inner_port), model, directory))
