"""One writer at a time for the cache and for a cluster's run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import wait_until


@contextlib.contextmanager
def exclusive(path: Path, deadline_seconds: float) -> Iterator[None]:
    """Hold the lock file ``path`` (created if missing) for the body.

    Raises:
        ClusterError: another process holds it past the deadline; the message carries that process's pid.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:

        def take() -> str | None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"held by process {path.read_text().strip() or '?'}"
            return None

        wait_until(f"lock {path}", take, deadline_seconds, poll_seconds=0.5)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield
