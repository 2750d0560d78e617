"""Order of the whole test run."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: two processes then end at about the same time, not one with the longest file."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)
