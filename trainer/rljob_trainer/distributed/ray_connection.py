"""Connecting to Ray: the cluster we were submitted to, or a local one of our own."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, Final

import ray

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_trainer.errors import ConfigurationError, TransientError

ENV_RAY_ADDRESS: Final = "RAY_ADDRESS"
LOG_LINES_SHOWN: Final = 20
LOCAL_START_ATTEMPTS: Final = 3


def count_usable_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def connect_ray(job: ResolvedJob) -> None:
    """Join the cluster at RAY_ADDRESS (set by Ray's job supervisor), or start a local Ray on loopback.

    A local Ray has as many CPUs as there are ranks at least: on a laptop the ranks take turns.

    Raises:
        ConfigurationError: a local run of a job for several nodes.
    """
    if os.environ.get(ENV_RAY_ADDRESS):
        ray.init(log_to_driver=True)
        return
    if job.layout.num_nodes > 1:
        raise ConfigurationError(
            f"spec.cluster.nodes: {job.layout.num_nodes} nodes, but this is a local run ({ENV_RAY_ADDRESS} is not "
            "set); use nodes: 1"
        )
    # Without these a laptop run reports usage and colours the log of every actor.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    _start_local_ray(job)


def _start_local_ray(job: ResolvedJob) -> None:
    """Ray gives its own processes 30 s to start, which a busy laptop can miss: try again before giving up."""
    for attempt in range(1, LOCAL_START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=max(count_usable_cpus(), job.layout.world_size),
                include_dashboard=False,
                log_to_driver=True,
                logging_level="WARNING",
                _node_ip_address="::1" if job.ip_family is IPFamily.IPV6 else "127.0.0.1",
            )
            return
        except Exception as error:
            # Ray raises a bare Exception here; its text is all that tells a late start from other failures.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt == LOCAL_START_ATTEMPTS:
                raise TransientError(
                    f"local Ray did not start in {LOCAL_START_ATTEMPTS} attempts: {error}; is the machine overloaded?"
                ) from error


def read_last_log_lines(node_id: str, address: str, pid: int) -> str:
    """The end of an actor's stdout and stderr, or where to find them."""
    worker: Any = ray._private.worker
    node = worker._global_node
    if node is None or node_id != ray.get_runtime_context().get_node_id():
        return f"its log: worker-*-{pid}.err in the Ray session's log directory on node {address}"
    lines: list[str] = []
    for suffix in ("out", "err"):
        for path in sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.{suffix}")):
            with path.open(errors="replace") as file:
                lines.extend(line.rstrip() for line in deque(file, LOG_LINES_SHOWN))
    shown = "\n".join(line for line in lines if not line.startswith(":"))
    return f"last lines of its log:\n{shown}" if shown else "its log is empty"
