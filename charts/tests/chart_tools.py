"""Paths and tools of the chart tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "rljob"


def find_tool(name: str, cache_pattern: str, make_command: str) -> str:
    """Path of a program; without it the test is skipped, and fails where CI=true says that it must be there."""
    cache = Path(os.environ.get("RLJOB_CACHE", Path.home() / ".cache" / "rljob")) / "bin"
    cached = sorted(cache.glob(cache_pattern))
    if cached:
        return str(cached[-1])
    if found := shutil.which(name):
        return found
    reason = f"{name} is neither on PATH nor in {cache}: run `{make_command}`"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def substitute_variables(expression: str, rate_interval: str = "5m") -> str:
    """A dashboard's expression as Grafana sends it with everything selected."""
    values = {"__rate_interval": rate_interval, "namespace": ".+", "name": ".+", "operator": ".+"}
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    return expression
