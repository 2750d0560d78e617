"""Ends the processes of an engine when the actor that started them is killed.

vLLM's engine process does not watch its parent (0.24 to 0.33, `v1/engine/core.py`): without this, SIGKILL of the actor
leaves it, and its GPU memory, behind. The guard is a process that holds the other end of a pipe: end of file without a
farewell means that the actor is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_FAREWELL: Final = b"."
END_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05
KILLED_SECONDS: Final = 30.0
"""For the driver to free the memory of a GPU while its process ends."""
SHARED_PROCESSES: Final = (b"resource_tracker", b"torch_shm_manager")
"""Python's resource tracker and torch's manager of shared memory: started for an engine or before it, they serve this
process as much as the engine, and end with it. Without the manager no further tensor can be shared (broken pipe)."""


def list_descendants(pid: int) -> list[tuple[int, int]]:
    """(pid, start time in clock ticks) of all processes below `pid`; the pair outlives the reuse of a pid."""
    found: list[tuple[int, int]] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue  # that thread has ended
        for child in children:
            started = read_start_time(child)
            if started is not None and not any(name in _read_command_line(child) for name in SHARED_PROCESSES):
                found.append((child, started))
            found.extend(list_descendants(child))
    return found


def read_start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process started; None when it is gone or a zombie."""
    state, started = _read_state(Path(f"/proc/{pid}"))
    return None if state in "ZX" else started


def _read_state(directory: Path) -> tuple[str, int | None]:
    """Of a process (its first thread) or a thread in /proc: its letter, X when it is gone, and when it started."""
    try:
        fields = (directory / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", None
    return fields[0], int(fields[19])


def _read_command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def end_processes(processes: list[tuple[int, int]], timeout_seconds: float = END_SECONDS) -> list[int]:
    """SIGTERM, then SIGKILL after the time; returns the pids that had to be killed, when all have ended.

    A process has ended when its last thread has: the first one can be gone (a zombie) while another still holds memory
    of a GPU.
    """
    running = _signal_and_wait(processes, signal.SIGTERM, timeout_seconds)
    killed = sorted(pid for pid, _ in running)
    for pid, _ in _signal_and_wait(running, signal.SIGKILL, KILLED_SECONDS):
        print(f"process {pid} still runs {KILLED_SECONDS:.0f} s after SIGKILL", file=sys.stderr, flush=True)
    return killed


def _signal_and_wait(
    processes: list[tuple[int, int]], signal_number: int, timeout_seconds: float
) -> list[tuple[int, int]]:
    """Those that still run after the time."""
    running = [process for process in processes if _has_threads(*process)]
    for pid, _ in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)
    deadline = time.monotonic() + timeout_seconds
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        running = [process for process in running if _has_threads(*process)]
    return running


def _has_threads(pid: int, started: int) -> bool:
    """Whether any thread of this very process has not ended. A pidfd would say so too, but not every Python and every
    sandbox has them."""
    if _read_state(Path(f"/proc/{pid}"))[1] != started:
        return False
    return any(_read_state(task)[0] not in "ZX" for task in Path(f"/proc/{pid}/task").glob("*"))


class ChildGuard:
    """Watches over processes of this one until `release`."""

    def __init__(self, processes: list[tuple[int, int]]) -> None:
        arguments = [f"{pid}:{started}" for pid, started in processes]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rljob_trainer.engines.child_guard", *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a signal to the actor's process group must not end its guard first
        )

    def release(self) -> None:
        """The processes have ended, or are to live on."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.write(_FAREWELL)
                self._process.stdin.close()
            except BrokenPipeError:
                pass
            try:
                self._process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _main() -> None:
    processes = [(int(pid), int(started)) for pid, started in (item.split(":") for item in sys.argv[1:])]
    if sys.stdin.buffer.read(1) != _FAREWELL:
        end_processes(processes)


if __name__ == "__main__":
    _main()
