"""/healthz, /readyz and /metrics, on IPv6 and IPv4 alike."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

logger = logging.getLogger(__name__)

_HEARTBEAT_SECONDS: Final = 1.0
MAX_HEARTBEAT_AGE_SECONDS: Final = 30.0
"""A loop that slept longer than this is stuck in something that blocks."""
MAX_OVERDUE_SECONDS: Final = 300.0
"""A reconcile that nobody started for so long is lost."""


class Health:
    """Why the process should be restarted, if it should.

    Waiting for the Lease and having nothing to do are healthy: only a late heartbeat of the event loop or a due
    wake-up that nobody serves is not.
    """

    def __init__(self, *, compute_overdue_seconds: Callable[[], float] = lambda: 0.0) -> None:
        self._compute_overdue_seconds = compute_overdue_seconds
        self._last_heartbeat = time.monotonic()

    async def beat(self) -> None:
        """Keep the heartbeat; runs for the life of the process."""
        while True:
            self._last_heartbeat = time.monotonic()
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    def find_problem(self) -> str | None:
        """What is wrong, or None."""
        age = time.monotonic() - self._last_heartbeat
        if age > MAX_HEARTBEAT_AGE_SECONDS:
            return f"the event loop's heartbeat is {age:.0f} s old (limit {MAX_HEARTBEAT_AGE_SECONDS:.0f} s)"
        overdue = self._compute_overdue_seconds()
        if overdue > MAX_OVERDUE_SECONDS:
            return f"a reconcile is overdue by {overdue:.0f} s (limit {MAX_OVERDUE_SECONDS:.0f} s)"
        return None


def build_health_app(health: Health) -> web.Application:
    """/healthz: 200 or 500 with the reason. /readyz: 200 as soon as the process serves (a standby is ready)."""

    async def healthz(request: web.Request) -> web.Response:
        problem = health.find_problem()
        return web.Response(status=500, text=problem) if problem else web.Response(text="ok")

    async def readyz(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app


def build_metrics_app(registry: CollectorRegistry) -> web.Application:
    """/metrics in the Prometheus text format."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


async def serve(app: web.Application, port: int) -> web.AppRunner:
    """Serve on every address of both families; `await runner.cleanup()` ends it. Raises OSError (port taken)."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, open_dual_stack_socket(port)).start()
    return runner


def open_dual_stack_socket(port: int) -> socket.socket:
    """A listening socket on `::` that takes IPv4 as well; on `0.0.0.0` where the kernel has no IPv6.

    By hand, because asyncio makes every `::` socket IPv6-only.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("0.0.0.0", port), backlog=128)
