"""A reverse proxy in front of the test API server that answers some writes with errors, as a bad day would."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import yaml
from aiohttp import web

from rljob_operator.testing.envtest import Envtest

WRITE_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOP_HEADERS: Final = frozenset({"host", "connection", "transfer-encoding", "content-length", "content-encoding"})


@dataclass(frozen=True)
class InjectedFault:
    """An answer instead of the API server's."""

    status: int
    """HTTP status; 0 drops the connection."""
    reaches_server: bool = False
    """The request is carried out first and only its answer is lost."""
    retry_after_seconds: float | None = None


class FaultProxy:
    """Forwards everything, watches included, except what `decide` answers for."""

    def __init__(self, environment: Envtest, decide: Callable[[str, str], InjectedFault | None]) -> None:
        self._environment = environment
        self._decide = decide
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.injected: Counter[int] = Counter()
        """Faults so far, by status."""

    async def start(self, kubeconfig: Path) -> None:
        """Listen on a free loopback port and write a kubeconfig that leads there."""
        context = ssl.create_default_context(cafile=str(self._environment.ca_path))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=16 * 1024**2)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._write_kubeconfig(kubeconfig, f"http://127.0.0.1:{self._runner.addresses[0][1]}")

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _write_kubeconfig(self, path: Path, server: str) -> None:
        config = yaml.safe_load(self._environment.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": server}
        path.write_text(yaml.safe_dump(config))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self._decide(request.method, request.path)
        if fault is None:
            return await self._forward(request)
        self.injected[fault.status] += 1
        if fault.reaches_server:
            await self._forward(request, discard=True)
        if fault.status == 0:
            return _drop(request)
        headers = {} if fault.retry_after_seconds is None else {"Retry-After": str(fault.retry_after_seconds)}
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Injected", "code": fault.status}
        return web.json_response(body, status=fault.status, headers=headers)

    async def _forward(self, request: web.Request, *, discard: bool = False) -> web.StreamResponse:
        assert self._session is not None, "start() first"
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_HEADERS}
        body = await request.read() or None  # b"" would make aiohttp add a content type that the API server refuses
        async with self._session.request(
            request.method, self._environment.server + request.raw_path, headers=headers, data=body
        ) as upstream:
            if discard:
                await upstream.read()
                return web.Response()
            answer = web.StreamResponse(status=upstream.status)
            for key, value in upstream.headers.items():
                if key.lower() not in _HOP_HEADERS:
                    answer.headers[key] = value
            await answer.prepare(request)
            with suppress(ConnectionError):
                async for chunk in upstream.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
            return answer


def _drop(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
