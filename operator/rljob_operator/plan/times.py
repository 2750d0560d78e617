"""Times of the API are RFC 3339 strings in whole seconds; the planner computes with aware datetimes."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(moment: datetime) -> str:
    """`2026-11-29T19:30:00Z`: UTC, whole seconds, as Kubernetes writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """An aware datetime; a time without a zone is UTC. Raises ValueError on anything else."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def compute_elapsed_seconds(start: datetime, now: datetime) -> float:
    """Seconds from `start` to `now`; 0 when the clock was set back meanwhile."""
    return max(0.0, (now - start).total_seconds())
