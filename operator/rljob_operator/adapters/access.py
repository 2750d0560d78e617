"""How the operator reaches a job's head: directly, or through the API server's pod proxy.

KubeRay's head Service is headless, and the API server cannot proxy to a headless Service; so the proxy goes to the
head pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from rljob_operator.adapters.kube import PODS, Kube


@dataclass(frozen=True)
class Head:
    """A head pod and the token that opens it."""

    namespace: str
    ray_cluster: str
    pod_name: str | None
    """None while the head pod is not known."""
    token: str


class UnreachableError(Exception):
    """The head did not answer in time, or refused the connection."""


class Access(Protocol):
    """Opens an HTTP request to a port of a head pod."""

    def open(
        self, head: Head, port: int, method: str, path: str, *, body: Any = None, timeout_seconds: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The response, body unread. Raises UnreachableError; any status is the caller's to judge."""
        ...


class DirectAccess:
    """Straight to the head Service's name: the operator runs inside the cluster network."""

    def __init__(self, session: aiohttp.ClientSession, cluster_domain: str = "cluster.local") -> None:
        self._session = session
        self._cluster_domain = cluster_domain

    def build_url(self, head: Head, port: int, path: str) -> str:
        """URL of a port of the head."""
        return f"http://{head.ray_cluster}-head-svc.{head.namespace}.svc.{self._cluster_domain}:{port}{path}"

    @asynccontextmanager
    async def open(
        self, head: Head, port: int, method: str, path: str, *, body: Any = None, timeout_seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """See Access.open."""
        url = self.build_url(head, port, path)
        async with (
            _translate_errors(url, timeout_seconds),
            asyncio.timeout(timeout_seconds),
            self._session.request(
                method,
                url,
                json=body,
                headers=_build_auth_headers(head.token, direct=True),
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            ) as response,
        ):
            yield response


class ProxyAccess:
    """Through the API server: the operator runs outside the cluster network, or a NetworkPolicy stands in between."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    @asynccontextmanager
    async def open(
        self, head: Head, port: int, method: str, path: str, *, body: Any = None, timeout_seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """See Access.open."""
        if head.pod_name is None:
            raise UnreachableError(f"RayCluster {head.ray_cluster} has no head pod yet")
        url = f"{PODS.path(head.namespace)}/{head.pod_name}:{port}/proxy{path}"
        headers = _build_auth_headers(head.token, direct=False)
        async with (
            _translate_errors(url, timeout_seconds),
            self._kube.stream(method, url, headers=headers, body=body, timeout_seconds=timeout_seconds) as response,
        ):
            # The API server's own words for "the pod does not answer".
            if response.status in (502, 503, 504):
                raise UnreachableError(f"{url}: {response.status} {(await response.text())[:300]}")
            yield response


def _build_auth_headers(token: str, *, direct: bool) -> dict[str, str]:
    """Ray reads `Authorization` first, then `X-Ray-Authorization`; the API server keeps the first for itself."""
    if not token:
        return {}
    headers = {"X-Ray-Authorization": f"Bearer {token}"}
    if direct:
        headers["Authorization"] = f"Bearer {token}"
    return headers


@asynccontextmanager
async def _translate_errors(url: str, timeout_seconds: float) -> AsyncIterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise UnreachableError(f"{url}: no answer within {timeout_seconds:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error
