"""Stop requests from SIGTERM, SIGINT or `POST /v1/stop`: one signal, one deadline."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from rljob_trainer.errors import StopRequested

DEFAULT_DEADLINE_SECONDS: Final = 300.0


class StopSignal:
    """Thread-safe; the first request wins, a later one may only shorten the deadline."""

    def __init__(self, on_deadline: Callable[[], None]) -> None:
        """`on_deadline` runs in a thread of its own when a stop did not finish in time; it must end the process."""
        self._requested = threading.Event()
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._deadline = float("inf")
        self._on_deadline = on_deadline
        self.source = ""

    @property
    def is_requested(self) -> bool:
        """Whether somebody asked."""
        return self._requested.is_set()

    def request(self, source: str, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        """Ask the loop to stop; returns at once."""
        with self._lock:
            self._deadline = min(self._deadline, time.monotonic() + deadline_seconds)
            if self._requested.is_set():
                return
            self.source = source
            self._requested.set()
        threading.Thread(target=self._watch, name="stop-deadline", daemon=True).start()

    def raise_if_requested(self) -> None:
        """Raises StopRequested."""
        if self.is_requested:
            raise StopRequested(self.source)

    def finish(self) -> None:
        """The process ends by itself now; the deadline no longer matters."""
        self._finished.set()

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT ask for a stop. Call after `ray.init`, which installs its own SIGTERM handler."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # Not `request` in this thread: a handler may interrupt it while it holds the lock.
        name = signal.Signals(number).name
        threading.Thread(target=self.request, args=(name,), name="stop-request", daemon=True).start()

    def _watch(self) -> None:
        while not self._finished.wait(timeout=0.2):
            if time.monotonic() > self._deadline:
                self._on_deadline()
                return
