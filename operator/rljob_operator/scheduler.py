"""Who is reconciled when: one entry per key, a heap of wake-ups, bounded concurrency, back-off after failures."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS: Final = 0.5
_MAX_BACKOFF_SECONDS: Final = 60.0


@dataclass(frozen=True, order=True)
class Key:
    """An RLJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass
class _Entry:
    due: float
    """Monotonic time of the next run; infinity: none wanted."""
    is_running: bool = False
    num_failures: int = 0
    not_before: float = 0.0
    """End of the back-off. Our own writes wake the key too: without it a failing key would spin."""


class Scheduler:
    """Runs `reconcile(key)` for woken keys.

    * Wake-ups of a key coalesce to the earliest; a key never runs twice at once: a wake-up during a run leads to one
      more run after it.
    * `reconcile` answers with the seconds until its next run, or None. Raising means: again, after an exponential
      back-off with jitter. Every run has a deadline.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
        *,
        concurrency: int = 16,
        run_deadline_seconds: float = 180.0,
        on_failure: Callable[[Key, BaseException], None] = lambda key, error: None,
    ) -> None:
        self._reconcile = reconcile
        self._concurrency = concurrency
        self._run_deadline_seconds = run_deadline_seconds
        self._on_failure = on_failure
        self._entries: dict[Key, _Entry] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._sequence = itertools.count()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self, key: Key, after_seconds: float = 0.0) -> None:
        """Run the key no later than in `after_seconds`."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(due=float("inf"))
        due = max(time.monotonic() + max(0.0, after_seconds), entry.not_before)
        if due >= entry.due:
            return
        entry.due = due
        heapq.heappush(self._heap, (due, next(self._sequence), key))
        self._changed.set()

    async def run(self) -> None:
        """Serve wake-ups until cancelled; running keys are cancelled and awaited then."""
        try:
            while True:
                delay = self._start_due()
                self._changed.clear()
                try:
                    async with asyncio.timeout(delay):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_queued(self) -> int:
        """Keys that are due and wait for a free slot."""
        now = time.monotonic()
        return sum(1 for entry in self._entries.values() if not entry.is_running and entry.due <= now)

    @property
    def num_running(self) -> int:
        """Keys being reconciled."""
        return len(self._tasks)

    def compute_overdue_seconds(self) -> float:
        """How late the most overdue key is that nobody works on; 0 when none is."""
        now = time.monotonic()
        return max((now - e.due for e in self._entries.values() if not e.is_running and e.due <= now), default=0.0)

    def _start_due(self) -> float | None:
        """Start what is due and fits; seconds until the next wake-up, or None."""
        now = time.monotonic()
        while self._heap:
            due, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is None or entry.due != due or entry.is_running:
                heapq.heappop(self._heap)  # superseded; a running key is pushed again when it ends
                continue
            if due > now:
                return due - now
            if len(self._tasks) >= self._concurrency:
                return None  # the end of a run sets `_changed`
            heapq.heappop(self._heap)
            self._start(key, entry)
        return None

    def _start(self, key: Key, entry: _Entry) -> None:
        entry.is_running, entry.due = True, float("inf")
        task = asyncio.create_task(self._run_once(key, entry), name=f"reconcile {key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_once(self, key: Key, entry: _Entry) -> None:
        delay: float | None = None
        try:
            async with asyncio.timeout(self._run_deadline_seconds):
                delay = await self._reconcile(key)
            entry.num_failures, entry.not_before = 0, 0.0
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, this key must be tried again and the others go on
            entry.num_failures += 1
            delay = compute_backoff_seconds(entry.num_failures) * random.uniform(0.8, 1.2)
            entry.not_before = time.monotonic() + delay
            entry.due = entry.not_before
            self._on_failure(key, error)
        finally:
            entry.is_running = False
            if delay is not None:
                entry.due = min(entry.due, time.monotonic() + delay)
            if entry.due == float("inf"):
                self._entries.pop(key, None)
            else:
                heapq.heappush(self._heap, (entry.due, next(self._sequence), key))
            task = asyncio.current_task()
            if task is not None:  # frees the slot before the loop looks for due keys
                self._tasks.discard(task)
            self._changed.set()


def compute_backoff_seconds(num_failures: int) -> float:
    """0.5 s, doubling to a minute."""
    return min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0 ** min(num_failures - 1, 20))
