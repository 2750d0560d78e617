"""Before the operator ends an attempt for `NoProgress`: where the driver, the ranks and the engines are, in the log.

The operator measures the same silence with the same limit, but begins later (when it sees a heartbeat) and then sends
SIGTERM, which leaves the driver its grace period: the stacks are in the log by then. A local run has no operator; there
they say where a run hangs that nothing ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import ray
from ray.exceptions import RayError

from rljob_trainer.distributed.waiting import PROBE_GROUP, Actor
from rljob_trainer.stacks import format_stacks

COLLECT_SECONDS: Final = 10.0
"""For the answers of all ranks and engines together."""
LOOK_SECONDS: Final = 1.0


class Silence:
    """Decides when a silence has lasted too long: once for each."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._heartbeat: float | None = None
        self._since = 0.0
        self._is_told = False

    def is_too_long(self, heartbeat: float, now: float) -> bool:
        """`heartbeat` is only compared for equality; `now` is monotonic, in seconds."""
        if heartbeat != self._heartbeat:
            self._heartbeat, self._since, self._is_told = heartbeat, now, False
        if self._is_told or now - self._since < self._limit_seconds:
            return False
        self._is_told = True
        return True


class StallWatch:
    """A context with a thread that writes all stacks when no heartbeat came for `limit_seconds`."""

    def __init__(
        self,
        limit_seconds: float,
        *,
        get_heartbeat: Callable[[], float],
        get_actors: Callable[[], Sequence[Actor]],
        write: Callable[[str], None],
    ) -> None:
        """`get_heartbeat` gives the time of the newest one; `get_actors` the ranks and engines there are by now."""
        self._limit_seconds = limit_seconds
        self._get_heartbeat, self._get_actors, self._write = get_heartbeat, get_actors, write
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        # Stacks that are being collected belong before the result line.
        self._thread.join(timeout=COLLECT_SECONDS)

    def _watch(self) -> None:
        silence = Silence(self._limit_seconds)
        while not self._finished.wait(timeout=LOOK_SECONDS):
            if silence.is_too_long(self._get_heartbeat(), time.monotonic()):
                self._write(
                    f"no progress for {self._limit_seconds:.0f} s (spec.failurePolicy.stallTimeoutSeconds); the stacks "
                    "of the driver, the ranks and the engines follow"
                )
                self._write(f"stacks of the driver:\n{format_stacks()}")
                for text in collect_stacks(self._get_actors(), COLLECT_SECONDS):
                    self._write(text)


def collect_stacks(actors: Sequence[Actor], timeout_seconds: float) -> list[str]:
    """The stacks of each actor, asked beside what it does. Actors with the same stacks share one entry; who gives no
    answer in time is named as well.

    Args:
        actors: with a method `format_stacks`, and a concurrency group for it.
        timeout_seconds: for all of them together.
    """
    references = {actor.handle.format_stacks.options(concurrency_group=PROBE_GROUP).remote(): actor for actor in actors}
    answered: list[ray.ObjectRef] = []
    if references:
        answered, _ = ray.wait(list(references), num_returns=len(references), timeout=timeout_seconds)
    labels: dict[str, list[str]] = {}
    for reference, actor in references.items():
        if reference not in answered:
            text = (
                f"no answer within {timeout_seconds:.0f} s: the process is stopped, its node is gone, or native code "
                "holds Python's lock"
            )
        else:
            try:
                text = ray.get(reference, timeout=timeout_seconds)
            except RayError as error:
                text = f"{type(error).__name__}: {error}"
        labels.setdefault(text, []).append(actor.label)
    return [f"stacks of {', '.join(names)}:\n{text}" for text, names in labels.items()]
