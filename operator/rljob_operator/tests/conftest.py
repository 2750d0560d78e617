"""Fixtures of the operator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest_asyncio

from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.envtest_fixtures import envtest  # noqa: F401 - fixture

if TYPE_CHECKING:
    from rljob_operator.testing.world import World


@pytest_asyncio.fixture
async def world(envtest: Envtest) -> AsyncIterator[World]:  # noqa: F811
    """A fresh namespace with a fake KubeRay and fake heads."""
    from rljob_operator.testing.world import open_world  # kopf and aiohttp only where they are needed

    async with open_world(envtest) as opened:
        yield opened
