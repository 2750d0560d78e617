"""How long a retry waits."""

from __future__ import annotations

from typing import Final

MAX_BACKOFF_SECONDS: Final = 600


def compute_backoff_seconds(base_seconds: int, retries_without_progress: int) -> int:
    """base x 2^(n-1) seconds before the n-th retry in a row without a newer checkpoint, at most ten minutes.

    A base above ten minutes is the user's own choice and is kept. n < 1 counts as 1.
    """
    # 2^20 seconds is far above the limit for any base >= 1, and keeps the power small.
    doublings = min(max(retries_without_progress, 1) - 1, 20)
    return int(min(base_seconds * 2**doublings, max(base_seconds, MAX_BACKOFF_SECONDS)))
