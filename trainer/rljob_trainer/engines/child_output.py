"""What an engine's child processes print: passed on, and the last lines kept for the error that ends the run."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

LINES_KEPT: Final = 40
CHUNK_BYTES: Final = 65_536


class ChildOutput:
    """A pipe that children started inside `capture` inherit as stdout and stderr.

    Their output still reaches this process's stderr. The pipe outlives `capture`: children keep writing to it.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._partial = b""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Whatever processes are started in here write to the pipe (and so does this process, meanwhile)."""
        reader, writer = os.pipe()
        saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._thread = threading.Thread(
            target=self._pump, args=(reader, os.dup(saved[2])), name="engine-output", daemon=True
        )
        self._thread.start()
        _flush()
        for fd in saved:
            os.dup2(writer, fd)
        os.close(writer)
        try:
            yield
        finally:
            _flush()
            for fd, copy in saved.items():
                os.dup2(copy, fd)
                os.close(copy)

    def last_lines(self) -> str:
        """The end of what was printed so far."""
        with self._lock:
            lines = [*self._lines, self._partial.decode(errors="replace")]
        return "\n".join(line for line in lines if line.strip())

    def drain(self, timeout_seconds: float) -> None:
        """Wait for the last words of children that have ended."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _pump(self, reader: int, target: int) -> None:
        try:
            while chunk := os.read(reader, CHUNK_BYTES):
                with suppress(OSError):  # our own stderr may be gone; the lines are still worth keeping
                    os.write(target, chunk)
                with self._lock:
                    *whole, self._partial = (self._partial + chunk).split(b"\n")
                    self._lines.extend(line.decode(errors="replace") for line in whole)
        finally:
            os.close(reader)
            os.close(target)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
