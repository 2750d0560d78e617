"""Feeds one tracker from a thread: an outage delays or loses its numbers, never a step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rljob_trainer.telemetry.trackers.base import Tracker, TrackerRecord

MAX_ROWS: Final = 2000
"""Rows kept for a tracker that does not answer; beyond it the oldest are lost, and counted."""
FIRST_DELAY_SECONDS: Final = 2.0
LONGEST_DELAY_SECONDS: Final = 300.0
CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits for a tracker."""


@dataclass(frozen=True)
class TrackedRow:
    """Numbers of one step."""

    kind: str
    step: int
    values: Mapping[str, float]


class TrackerFeed:
    """One tracker and its thread."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        record: TrackerRecord,
        *,
        save: Callable[[], None],
        warn: Callable[[str], None],
        count_failure: Callable[[str], None],
        first_delay_seconds: float = FIRST_DELAY_SECONDS,
    ) -> None:
        """`warn` prints a line, `count_failure` counts by name; both are called from the thread."""
        self._name, self._tracker, self._record = name, tracker, record
        self._save, self._warn, self._count_failure = save, warn, count_failure
        self._first_delay_seconds = first_delay_seconds
        self._rows: deque[TrackedRow] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._give_up = threading.Event()
        self._succeeded = False
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, row: TrackedRow) -> None:
        """Hand over a row; returns at once."""
        with self._changed:
            if row.step <= self._record.logged.get(row.kind, -1):
                return  # an earlier attempt logged it before the checkpoint that this one repeats from
            if len(self._rows) >= MAX_ROWS:
                self._rows.popleft()
                self._num_lost += 1
            self._rows.append(row)
            self._changed.notify()

    def close(self, *, succeeded: bool, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait until everything is handed over, at most `timeout_seconds`."""
        with self._changed:
            self._is_closing, self._succeeded = True, succeeded
            self._changed.notify()
        self._thread.join(timeout_seconds)
        self._give_up.set()
        with self._changed:
            num_left = len(self._rows) + self._num_lost
            self._changed.notify()
        if self._thread.is_alive() or num_left:
            self._warn(
                f"tracker {self._name}: {num_left} rows did not reach it within {timeout_seconds:g} s of the end; "
                "metrics.jsonl has them"
            )

    def _run(self) -> None:
        is_open = False
        num_failures = 0
        while (row := self._wait_for_row()) is not None:
            try:
                if not is_open:
                    self._tracker.open()
                    is_open = True
                self._tracker.log(row.step, row.values)
            except Exception as error:  # noqa: BLE001 - libraries raise what they like; training goes on
                num_failures += 1
                self._report_failure(error, is_first=num_failures == 1)
                exponent = 0 if self._is_closing else num_failures - 1
                self._give_up.wait(min(self._first_delay_seconds * 2.0**exponent, LONGEST_DELAY_SECONDS))
                continue
            if num_failures:
                self._warn(f"tracker {self._name} takes metrics again")
                num_failures = 0
            with self._changed:
                if self._rows and self._rows[0] is row:
                    self._rows.popleft()
                self._record.logged[row.kind] = max(row.step, self._record.logged.get(row.kind, -1))
            self._save_record()
        self._close_tracker(is_open)

    def _wait_for_row(self) -> TrackedRow | None:
        """The oldest row; None when the run has ended and nothing is left, or when time is up."""
        with self._changed:
            while not self._rows and not self._is_closing:
                self._changed.wait(timeout=60.0)
            return self._rows[0] if self._rows and not self._give_up.is_set() else None

    def _report_failure(self, error: Exception, *, is_first: bool) -> None:
        self._count_failure(self._name)
        if is_first:
            self._warn(
                f"tracker {self._name} does not take metrics, training goes on without it: {type(error).__name__}: "
                f"{str(error).strip()[:300]}; trying again"
            )

    def _save_record(self) -> None:
        try:
            self._save()
        except OSError as error:
            self._count_failure(self._name)
            self._warn(f"tracker {self._name}: what it has cannot be noted: {error}; a resumed run may log it twice")

    def _close_tracker(self, is_open: bool) -> None:
        try:
            self._tracker.close(succeeded=self._succeeded)
        except Exception as error:  # noqa: BLE001 - as above
            if is_open:
                self._count_failure(self._name)
                self._warn(f"tracker {self._name} did not end its run: {type(error).__name__}: {error}")
