"""The API server: server-side apply and reads on plain documents, with deadlines, retries and a request budget.

`kubernetes.aio` supplies configuration, authentication and TLS. Documents stay plain dicts: its models drop fields
that a newer server knows, and discovery would cost a dozen requests for the eight kinds used here.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import load_incluster_config, load_kube_config

from rljob_api.names import FIELD_MANAGER, GROUP

Document = dict[str, Any]

_MAX_ATTEMPTS: Final = 4
_MAX_RETRY_DELAY_SECONDS: Final = 5.0
_LIST_PAGE_SIZE: Final = 500
_APPLY_PATCH: Final = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Resource:
    """Where a kind lives on the API server."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """`group/version`, or `version` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of the collection or of one object."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{quote(namespace)}" if namespace else ""
        parts = [part for part in (name, subresource) if part]
        return f"{root}{scope}/{self.plural}" + "".join(f"/{quote(part)}" for part in parts)


RLJOBS: Final = Resource(GROUP, "v1alpha1", "rljobs", "RLJob")
RAY_CLUSTERS: Final = Resource("ray.io", "v1", "rayclusters", "RayCluster")
PODS: Final = Resource("", "v1", "pods", "Pod")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
EVENTS: Final = Resource("", "v1", "events", "Event")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")

_BY_KIND: Final = {
    (resource.api_version, resource.kind): resource
    for resource in (RLJOBS, RAY_CLUSTERS, PODS, SECRETS, CONFIG_MAPS, NETWORK_POLICIES, EVENTS, LEASES)
}


def resource_of(document: Mapping[str, Any]) -> Resource:
    """The resource of a document. Raises KeyError for a kind the operator does not own."""
    return _BY_KIND[document["apiVersion"], document["kind"]]


class KubeError(Exception):
    """The API server refused or could not be reached. `status` 0 means that no answer came."""

    def __init__(
        self, status: int, reason: str, message: str, request: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(f"{request}: {status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_not_found(self) -> bool:
        """404."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """409: read again, decide again."""
        return self.status == 409

    @property
    def is_refused(self) -> bool:
        """400, 403, 405, 413 or 422: repeating the same request cannot help."""
        return self.status in (400, 403, 405, 413, 422)

    @property
    def is_transient(self) -> bool:
        """No answer, 408, 429 or 5xx: worth repeating."""
        return self.status in (0, 408, 429) or self.status >= 500


RequestObserver = Callable[[str, str, int], None]
"""Called with (verb, kind, HTTP status) after every request; status 0 when no answer came."""


class RateLimiter:
    """Token bucket in front of the API server, so that a thousand jobs at once do not flood it."""

    def __init__(self, requests_per_second: float, burst: int) -> None:
        self._rate = requests_per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._updated = time.monotonic()

    async def acquire(self) -> None:
        """Wait for a token. A waiter takes its token on arrival, so waiters are served in order."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        self._updated = now
        self._tokens -= 1.0
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


class Kube:
    """Verbs the operator needs, on plain documents. Every request has a deadline; transient failures are retried."""

    def __init__(
        self,
        client: ApiClient,
        *,
        request_timeout_seconds: float = 15.0,
        limiter: RateLimiter | None = None,
        observe: RequestObserver = lambda verb, kind, status: None,
    ) -> None:
        self._client = client
        self._timeout_seconds = request_timeout_seconds
        self._limiter = limiter
        self._observe = observe

    async def get(self, resource: Resource, namespace: str, name: str) -> Document | None:
        """One object, or None when it (or its kind) does not exist."""
        try:
            return await self._call("get", resource, "GET", resource.path(namespace, name))
        except KubeError as error:
            if error.is_not_found:
                return None
            raise

    async def list_all(self, resource: Resource, namespace: str | None, label_selector: str = "") -> list[Document]:
        """Every object that matches, paged. A kind that is not installed raises KubeError 404."""
        items: list[Document] = []
        token = ""
        while True:
            query = {"limit": str(_LIST_PAGE_SIZE), "labelSelector": label_selector, "continue": token}
            page = await self._call("list", resource, "GET", resource.path(namespace), query=query)
            items += page.get("items") or []
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return items

    async def apply(self, document: Document) -> Document:
        """Server-side apply with force: this operator owns the fields it renders."""
        resource = resource_of(document)
        metadata = document["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._call(
            "apply", resource, "PATCH", path, query=_APPLY, body=document, content_type=_APPLY_PATCH
        )

    async def apply_status(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        resource_version: str,
        uid: str,
        status: Document,
        is_progress: bool = False,
    ) -> Document:
        """Replace our part of the status by server-side apply.

        `is_progress` only marks the request's URI: the server ignores it, and its audit log, which shows no bodies,
        then tells progress from transitions.

        The resource version makes a status computed from an outdated object fail with 409, the UID one that was
        computed for a deleted namesake.
        """
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": resource_version, "uid": uid},
            "status": status,
        }
        path = resource.path(namespace, name, "status")
        query = {**_APPLY, "content": "progress"} if is_progress else _APPLY
        return await self._call(
            "apply", resource, "PATCH", path, query=query, body=body, content_type=_APPLY_PATCH, subresource="status"
        )

    async def create(self, document: Document) -> Document:
        """POST; 409 AlreadyExists is the caller's to judge."""
        resource = resource_of(document)
        namespace = document["metadata"]["namespace"]
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("create", resource, "POST", resource.path(namespace), query=query, body=document)

    async def replace(self, document: Document, *, timeout_seconds: float | None = None) -> Document:
        """PUT with the document's resource version; 409 when somebody else wrote in between. Not retried."""
        resource = resource_of(document)
        metadata = document["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call(
            "update", resource, "PUT", path, query=query, body=document, max_attempts=1, timeout_seconds=timeout_seconds
        )

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Document) -> Document:
        """JSON merge patch."""
        query = {"fieldManager": FIELD_MANAGER}
        path = resource.path(namespace, name)
        return await self._call(
            "patch", resource, "PATCH", path, query=query, body=patch, content_type="application/merge-patch+json"
        )

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str | None = None) -> bool:
        """Delete in the background; False when it was gone already (or has another UID than asked for)."""
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("delete", resource, "DELETE", resource.path(namespace, name), body=options)
        except KubeError as error:
            if error.is_not_found or (uid is not None and error.is_conflict):
                return False
            raise
        return True

    async def is_served(self, resource: Resource) -> bool:
        """Whether the API server knows the kind."""
        try:
            found = await self._call("discover", resource, "GET", f"/apis/{resource.group}/{resource.version}")
        except KubeError as error:
            if error.is_not_found:
                return False
            raise
        return any(entry.get("name") == resource.plural for entry in found.get("resources") or [])

    async def request(self, method: str, path: str, body: Any) -> Document:
        """Any other request, once. For tools; the operator has a method per verb. Raises KubeError."""
        return await self._call_once(f"{method} {path}", method, path, body, "application/json", self._timeout_seconds)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        timeout_seconds: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A raw request (the pod proxy); any status is the caller's to judge.

        Raises aiohttp.ClientError or TimeoutError.
        """
        async with asyncio.timeout(timeout_seconds):
            response = await self._send(method, path, body, "application/json", timeout_seconds, headers)
            try:
                yield response
            finally:
                response.release()

    async def _call(
        self,
        verb: str,
        resource: Resource,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        subresource: str = "",
        max_attempts: int = _MAX_ATTEMPTS,
        timeout_seconds: float | None = None,
    ) -> Document:
        parameters = {key: value for key, value in (query or {}).items() if value}
        url = f"{path}?{urlencode(parameters)}" if parameters else path
        kind = f"{resource.kind}/{subresource}" if subresource else resource.kind
        for attempt in range(1, max_attempts + 1):
            if self._limiter is not None:
                await self._limiter.acquire()
            try:
                document = await self._call_once(
                    f"{method} {path}", method, url, body, content_type, timeout_seconds or self._timeout_seconds
                )
            except KubeError as error:
                self._observe(verb, kind, error.status)
                if not error.is_transient or attempt == max_attempts:
                    raise
                await asyncio.sleep(_compute_retry_delay_seconds(attempt, error.retry_after_seconds))
                continue
            self._observe(verb, kind, 200)
            return document
        raise AssertionError("unreachable")

    async def _call_once(
        self, request: str, method: str, url: str, body: Any, content_type: str, timeout_seconds: float
    ) -> Document:
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._send(method, url, body, content_type, timeout_seconds, {})
                text = await response.read()
        except TimeoutError as error:
            raise KubeError(0, "Timeout", f"no answer within {timeout_seconds:g} s", request) from error
        except (aiohttp.ClientError, OSError) as error:
            raise KubeError(0, type(error).__name__, str(error), request) from error
        except ApiException as error:
            raise KubeError(error.status or 0, error.reason or "", str(error.body or ""), request) from error
        document = _parse(text)
        if 200 <= response.status < 300:
            return document
        raise KubeError(
            response.status,
            str(document.get("reason") or response.reason or ""),
            str(document.get("message") or text[:500].decode(errors="replace")),
            request,
            _parse_retry_after(response.headers.get("Retry-After")),
        )

    async def _send(
        self,
        method: str,
        url: str,
        body: Any,
        content_type: str,
        timeout_seconds: float,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        request = await self._client.param_serialize(
            method,
            url,
            header_params={"Accept": "application/json", "Content-Type": content_type, **headers},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=timeout_seconds))
        response: aiohttp.ClientResponse = answer.response
        return response


_APPLY: Final = {"fieldManager": FIELD_MANAGER, "force": "true"}


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """Credentials: the kubeconfig when given, else the pod's service account (its token is re-read every minute).

    Raises kubernetes.aio.config.ConfigException.
    """
    configuration = Configuration()
    if kubeconfig is not None:
        await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    else:
        load_incluster_config(client_configuration=configuration)
    return configuration


def make_client(configuration: Configuration, user_agent: str) -> ApiClient:
    """A client; close it with `await client.close()`."""
    client = ApiClient(configuration)
    client.user_agent = user_agent
    return client


def _parse(text: bytes) -> Document:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _parse_retry_after(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:  # the HTTP-date form; the API server sends seconds
        return None


def _compute_retry_delay_seconds(attempt: int, retry_after_seconds: float | None) -> float:
    """Exponential with full jitter; never earlier than the server asked for, within the limit."""
    delay = random.uniform(0.5, 1.0) * 0.2 * 2.0**attempt
    return min(_MAX_RETRY_DELAY_SECONDS, max(delay, retry_after_seconds or 0.0))
