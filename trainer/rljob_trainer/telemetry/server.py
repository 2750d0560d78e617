"""Progress, stop, health and metrics over HTTP, from a thread of the driver."""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from pydantic import ValidationError

from rljob_api.contract import ResolvedJob, StopRequest
from rljob_api.names import ENV_RAY_AUTH_TOKEN
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.telemetry.metrics import build_registry
from rljob_trainer.telemetry.state import TelemetryState

START_SECONDS: Final = 30.0
_MAX_BODY_BYTES: Final = 64 * 1024


class ProgressServer:
    """`GET /v1/progress` and `POST /v1/stop` (with the bearer token of the cluster); `GET /healthz`, `GET /metrics`."""

    def __init__(self, job: ResolvedJob, state: TelemetryState, on_stop: Callable[[StopRequest], None]) -> None:
        """`on_stop` is called from the server's thread and must return at once. The token is RAY_AUTH_TOKEN's value at
        this moment; without it (or with an empty one) the two guarded routes are open."""
        self._state = state
        self._on_stop = on_stop
        self._token = os.environ.get(ENV_RAY_AUTH_TOKEN) or None
        self._registry = build_registry(state, job=job.name, namespace=job.namespace)
        self._requested_port = job.server.port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="progress-server", daemon=True)
        self._socket: socket.socket | None = None
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.port = 0

    def start(self) -> int:
        """Listens; returns the port.

        Raises:
            ConfigurationError: the port is taken.
        """
        self._socket = open_listening_socket(self._requested_port)
        self.port = int(self._socket.getsockname()[1])
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise TimeoutError(f"the progress server did not start within {START_SECONDS:g} s")
        if self._error is not None:
            raise self._error
        return self.port

    def stop(self) -> None:
        """Closes all connections and ends the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._error = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_get("/v1/progress", self._get_progress)
        application.router.add_post("/v1/stop", self._post_stop)
        application.router.add_get("/healthz", self._get_health)
        application.router.add_get("/metrics", self._get_metrics)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        assert self._socket is not None
        await web.SockSite(runner, self._socket).start()
        self._ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _get_progress(self, request: web.Request) -> web.Response:
        self._authorize(request)
        return web.json_response(text=self._state.build_progress().model_dump_json(exclude_none=True))

    async def _post_stop(self, request: web.Request) -> web.Response:
        self._authorize(request)
        body = await request.read()
        try:
            stop = StopRequest.model_validate_json(body) if body.strip() else StopRequest()
        except ValidationError as error:
            details = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()
            )
            message = f'{details}; send {{"deadlineSeconds": 300}}'
            raise web.HTTPBadRequest(text=json.dumps({"error": message}), content_type="application/json") from error
        self._on_stop(stop)
        return web.json_response(text=stop.model_dump_json(), status=202)

    async def _get_health(self, _: web.Request) -> web.Response:
        # Slow steps are healthy: a stalled run is judged by the operator from the heartbeat, with the job's own limit.
        if self._state.is_driver_alive:
            return web.Response(text="ok\n")
        return web.Response(text="the driver's loop has ended\n", status=503)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    def _authorize(self, request: web.Request) -> None:
        if self._token is None:
            return
        # Through the API server's pod proxy only the second header arrives, as with Ray's own dashboard.
        header = request.headers.get("Authorization") or request.headers.get("X-Ray-Authorization") or ""
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token.encode()):
            raise web.HTTPUnauthorized(
                text='{"error": "send the Ray token of this cluster as Authorization: Bearer <token>"}',
                content_type="application/json",
                headers={"WWW-Authenticate": "Bearer"},
            )


def open_listening_socket(port: int) -> socket.socket:
    """Listens on `::` for IPv6 and IPv4 alike, or on 0.0.0.0 where the kernel has no IPv6; port 0 takes a free one.

    Raises:
        ConfigurationError: the port is taken or not allowed.
    """
    try:
        listener = _listen(socket.AF_INET6, "::", port)
    except OSError as error:
        # No IPv6 at all (EAFNOSUPPORT), or disabled on every interface (EADDRNOTAVAIL); a taken port is neither.
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise _describe_port_error(port, error) from error
        try:
            listener = _listen(socket.AF_INET, "0.0.0.0", port)
        except OSError as second:
            raise _describe_port_error(port, second) from second
    return listener


def _listen(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _describe_port_error(port: int, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"server.port: cannot listen on {port}: {error.strerror}; use another port, or 0 for a free one"
    )
