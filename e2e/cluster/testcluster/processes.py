"""Long-running processes of a cluster that outlive the command which started them.

A process is remembered by pid **and** kernel start time, so that a recycled pid is never taken for it, nor killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from testcluster.config import ClusterConfig
from testcluster.errors import ClusterError, wait_until

_LOG_TAIL_LINES = 15


def start_ticks(pid: int) -> int | None:
    """Kernel start time of a living process in clock ticks since boot; ``None`` if there is none (or a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program name in parentheses may itself hold blanks and parentheses; fields are counted after the last one.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


@dataclasses.dataclass(frozen=True)
class Component:
    """One process to keep: what to run and how to see that it serves.

    ``probe`` returns ``None`` when the component serves, otherwise why not.
    """

    name: str
    argv: list[str]
    probe: Callable[[], str | None]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    deadline_seconds: float = 180


def _record_path(config: ClusterConfig, name: str) -> Path:
    return config.run_dir / "pids" / f"{name}.json"


def _read_record(config: ClusterConfig, name: str) -> dict[str, object] | None:
    path = _record_path(config, name)
    return json.loads(path.read_text()) if path.exists() else None


def living_pid(config: ClusterConfig, name: str) -> int | None:
    """Pid of the component that an earlier command started, if it still lives."""
    record = _read_record(config, name)
    if record is None:
        return None
    pid, ticks = int(str(record["pid"])), record["start_ticks"]
    # No start time on record: it ended before one could be read.
    return pid if ticks is not None and start_ticks(pid) == ticks else None


def log_tail(config: ClusterConfig, name: str, num_lines: int = _LOG_TAIL_LINES) -> str:
    path = config.log_dir / f"{name}.log"
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def _spawn(config: ClusterConfig, component: Component) -> None:
    config.log_dir.mkdir(parents=True, exist_ok=True)
    record = _record_path(config, component.name)
    record.parent.mkdir(parents=True, exist_ok=True)
    with (config.log_dir / f"{component.name}.log").open("ab") as log:
        process = subprocess.Popen(
            component.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(component.env),
            cwd="/",
            start_new_session=True,
        )
    ticks = start_ticks(process.pid)
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": process.pid, "start_ticks": ticks, "argv": component.argv}))
    temporary.replace(record)


def ensure_running(config: ClusterConfig, component: Component) -> bool:
    """Start the component unless it runs with the same arguments, and wait until it serves; True if started.

    Raises:
        ClusterError: it ended or does not serve by its deadline; carries the end of its log.
    """
    record = _read_record(config, component.name)
    started = False
    if living_pid(config, component.name) is not None and record is not None and record["argv"] != component.argv:
        stop(config, component.name)
    if living_pid(config, component.name) is None:
        _spawn(config, component)
        started = True

    def check() -> str | None:
        if living_pid(config, component.name) is None:
            raise ClusterError(f"{component.name} ended; its log ends with:\n{log_tail(config, component.name)}")
        return component.probe()

    try:
        wait_until(component.name, check, component.deadline_seconds)
    except ClusterError as error:
        if "its log ends with" in str(error):
            raise
        raise ClusterError(f"{error}\n{component.name}'s log ends with:\n{log_tail(config, component.name)}") from None
    return started


def kill_and_wait(pids: list[int], deadline_seconds: float = 10) -> None:
    """SIGKILL processes and wait until they are gone.

    Raises:
        ClusterError: some survive; names them.
    """
    ticks = {pid: start_ticks(pid) for pid in pids}
    for pid, tick in ticks.items():
        if tick is not None:
            _signal(pid, signal.SIGKILL)

    def check() -> str | None:
        left = [pid for pid, tick in ticks.items() if tick is not None and start_ticks(pid) == tick]
        return f"pids {left}" if left else None

    wait_until("killed processes to end", check, deadline_seconds)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def stop(config: ClusterConfig, name: str, grace_seconds: float = 10) -> None:
    """SIGTERM, then SIGKILL after ``grace_seconds``; forgets the process."""
    pid = living_pid(config, name)
    if pid is not None:
        _signal(pid, signal.SIGTERM)

        def gone() -> str | None:
            return None if living_pid(config, name) is None else f"pid {pid} ignores SIGTERM"

        try:
            wait_until(name, gone, grace_seconds)
        except ClusterError:
            kill_and_wait([pid])
    _record_path(config, name).unlink(missing_ok=True)


def kill(config: ClusterConfig, name: str) -> None:
    """SIGKILL at once and forget: for a cluster whose state is thrown away."""
    pid = living_pid(config, name)
    if pid is not None:
        kill_and_wait([pid])
    _record_path(config, name).unlink(missing_ok=True)


def recorded_components(config: ClusterConfig) -> list[str]:
    folder = config.run_dir / "pids"
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
