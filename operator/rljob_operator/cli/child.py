"""The trainer as a child process: signals are passed on once, its exit code is ours."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Child:
    """Turns the first stop signal into one SIGTERM, and Ctrl-C after that into a kill."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]) -> int:
        previous = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        try:
            # A group of its own: the terminal sends Ctrl-C to its whole foreground group, and the trainer would be
            # interrupted in the middle of a step besides being asked to stop.
            self._process = subprocess.Popen(command, env=environment, process_group=0, pass_fds=pass_fds)
            if self._is_stopping:
                self._process.terminate()
            return self._process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._announce("stopping: the trainer publishes a checkpoint first; Ctrl-C once more kills it")
            if self._process is not None:
                self._process.terminate()
        elif number == signal.SIGINT and self._process is not None and self._process.poll() is None:
            self._announce("killing the trainer: steps since the last checkpoint are lost")
            os.killpg(self._process.pid, signal.SIGKILL)


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    announce: Callable[[str], None],
    pass_fds: Sequence[int] = (),
) -> int:
    """Run to its end; a child killed by signal N gives 128 + N, as a shell would say."""
    returncode = _Child(announce).run(command, environment, pass_fds)
    return 128 - returncode if returncode < 0 else returncode
