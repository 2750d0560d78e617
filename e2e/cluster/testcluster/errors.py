"""The one error type of the test cluster and the waiting loop that raises it."""

from __future__ import annotations

import time
from collections.abc import Callable


class ClusterError(RuntimeError):
    """Something about the test cluster failed; the message names the culprit and what to do."""


def wait_until(what: str, check: Callable[[], str | None], deadline_seconds: float, poll_seconds: float = 0.2) -> None:
    """Call ``check`` until it returns ``None``; a string is the reason why not yet.

    Raises:
        ClusterError: the deadline passed; names ``what`` and the last reason.
    """
    deadline = time.monotonic() + deadline_seconds
    while True:
        reason = check()
        if reason is None:
            return
        if time.monotonic() >= deadline:
            raise ClusterError(f"{what}: not there after {deadline_seconds:.0f} s: {reason}")
        time.sleep(poll_seconds)
