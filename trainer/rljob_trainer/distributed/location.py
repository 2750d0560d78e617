"""Where an actor runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import ray


@dataclass(frozen=True)
class ActorLocation:
    """Node, GPUs and process; ranks are numbered by (address, node, GPU)."""

    address: str
    """Bare node IP."""
    node_id: str
    gpu_ids: tuple[str, ...]
    hostname: str
    pid: int

    @property
    def sort_key(self) -> tuple[str, str, list[tuple[int, str]], int]:
        """GPU ids sort as numbers ("10" after "9"); without GPUs the process decides."""
        return (self.address, self.node_id, [(len(gpu), gpu) for gpu in self.gpu_ids], self.pid)

    def describe(self, name: str) -> str:
        """`rank 3 (node fd00::17, GPU 3, host worker-1, pid 77)`."""
        gpu = f", GPU {','.join(self.gpu_ids)}" if self.gpu_ids else ""
        return f"{name} (node {self.address}{gpu}, host {self.hostname}, pid {self.pid})"


def locate_this_actor() -> ActorLocation:
    """For the actor that calls it."""
    return ActorLocation(
        address=ray.util.get_node_ip_address(),
        node_id=ray.get_runtime_context().get_node_id(),
        gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
        hostname=socket.gethostname(),
        pid=os.getpid(),
    )
