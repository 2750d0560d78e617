"""Tests that need an engine installed (`make test-engines`)."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(package: str) -> list[pytest.MarkDecorator]:
    """Marks of a class; without the package its tests are skipped, or fail where it is meant to be there."""
    is_missing = importlib.util.find_spec(package) is None
    if is_missing and os.environ.get("RLJOB_TEST_ENGINE", "").lower() == package:
        raise ModuleNotFoundError(f"{package} is not installed in the environment that is to test it")
    return [
        pytest.mark.engines,
        pytest.mark.timeout(1500),
        pytest.mark.skipif(is_missing, reason=f"{package} is not installed here; run `make test-engines`"),
    ]
