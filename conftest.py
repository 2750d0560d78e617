"""Order of the whole test run."""

import pytest

LONG_FIRST = ("slow", "ray", "integration")
"""Markers of long files, the longest kind first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: the processes of a parallel run then end at about the same time, none with a file left over."""
    rank_by_file = {item.path: len(LONG_FIRST) for item in items}
    for item in items:
        for rank, marker in enumerate(LONG_FIRST):
            if item.get_closest_marker(marker):
                rank_by_file[item.path] = min(rank_by_file[item.path], rank)
    items.sort(key=lambda item: rank_by_file[item.path])
