"""Kubernetes quantities as the integers Ray takes."""

from __future__ import annotations

from rljob_api.quantity import parse_quantity


def parse_bytes(text: str) -> int:
    """Whole bytes of a memory quantity, rounded down."""
    return int(parse_quantity(text))


def parse_whole_cpus(text: str) -> int:
    """Whole CPUs Ray may schedule on: rounded down, at least 1 (Ray counts in integers, `500m` must still start)."""
    return max(1, int(parse_quantity(text)))
