"""The API server client against a scripted HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from rljob_operator.adapters import kube as kube_module
from rljob_operator.adapters.kube import PODS, RAY_CLUSTERS, RLJOBS, SECRETS, Kube, KubeError, RateLimiter, make_client

Answer = Callable[[web.Request], web.StreamResponse]


def answer(status: int, body: object = None, **headers: str) -> Answer:
    return lambda request: web.json_response(body or {}, status=status, headers=headers)


def refuse(status: int, reason: str, message: str) -> Answer:
    return answer(status, {"kind": "Status", "reason": reason, "message": message, "code": status})


class Server:
    """Answers in order, the last one for ever; records what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.headers: list[dict[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path, dict(request.query), body))
        self.headers.append(dict(request.headers))
        step = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        result = step(request)
        return await result if asyncio.iscoroutine(result) else result


@asynccontextmanager
async def connect(server: Server, **options: object) -> AsyncIterator[Kube]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    configuration.api_key["BearerToken"] = "Bearer secret"
    client = make_client(configuration, "test/1")
    try:
        yield Kube(client, **options)
    finally:
        await client.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch):
    """Retries are decided, not slept through."""
    delays: list[float] = []
    real_sleep = asyncio.sleep

    async def record(delay: float) -> None:
        if delay > 0:  # libraries sleep for 0 to yield
            delays.append(delay)
        await real_sleep(0)

    monkeypatch.setattr(kube_module.asyncio, "sleep", record)
    return delays


CLUSTER = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "a-1", "namespace": "ns"},
    "spec": {"x": None},
}


async def test_apply_is_a_forced_server_side_apply_of_the_document_as_it_is():
    server = Server(answer(201, CLUSTER))
    async with connect(server) as kube:
        assert await kube.apply(CLUSTER) == CLUSTER
    method, path, query, body = server.requests[0]
    assert (method, path) == ("PATCH", "/apis/ray.io/v1/namespaces/ns/rayclusters/a-1")
    assert query == {"fieldManager": "rljob-operator", "force": "true"}
    assert json.loads(body) == CLUSTER
    assert server.headers[0]["Content-Type"] == "application/apply-patch+yaml"
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.headers[0]["User-Agent"] == "test/1"


async def test_status_is_applied_to_the_very_object_it_was_computed_from():
    server = Server(answer(200))
    async with connect(server) as kube:
        await kube.apply_status(RLJOBS, "ns", "a", resource_version="7", uid="u", status={"phase": "Running"})
    _, path, _, body = server.requests[0]
    assert path == "/apis/rljob.io/v1alpha1/namespaces/ns/rljobs/a/status"
    assert json.loads(body)["metadata"] == {"name": "a", "namespace": "ns", "resourceVersion": "7", "uid": "u"}


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 408])
async def test_transient_answers_are_repeated(status: int, no_waiting: list[float]):
    server = Server(answer(status), answer(status), answer(200, CLUSTER))
    async with connect(server) as kube:
        assert await kube.apply(CLUSTER) == CLUSTER
    assert len(server.requests) == 3
    assert len(no_waiting) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_definite_answers_are_not_repeated(status: int):
    server = Server(refuse(status, "Why", "because"))
    async with connect(server) as kube:
        with pytest.raises(KubeError, match="because") as caught:
            await kube.apply(CLUSTER)
    assert len(server.requests) == 1
    assert (caught.value.status, caught.value.reason) == (status, "Why")


async def test_retry_after_is_honoured_within_limits(no_waiting: list[float]):
    server = Server(answer(429, **{"Retry-After": "3"}), answer(429, **{"Retry-After": "3600"}), answer(200, CLUSTER))
    async with connect(server) as kube:
        await kube.apply(CLUSTER)
    assert no_waiting[0] >= 3
    assert no_waiting[1] <= 5


async def test_it_gives_up_after_four_tries_and_says_what_it_tried():
    server = Server(refuse(503, "ServiceUnavailable", "etcd is away"))
    async with connect(server) as kube:
        with pytest.raises(KubeError, match=r"PATCH /apis/ray\.io/v1/namespaces/ns/rayclusters/a-1: 503.*etcd is away"):
            await kube.apply(CLUSTER)
    assert len(server.requests) == 4


async def test_a_server_that_does_not_answer_ends_in_an_error_with_the_deadline_in_it():
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    async with connect(Server(hang), request_timeout_seconds=0.05) as kube:
        with pytest.raises(KubeError, match=r"no answer within 0\.05 s") as caught:
            await kube.get(PODS, "ns", "a")
        never.set()
    assert caught.value.status == 0
    assert caught.value.is_transient


async def test_a_refused_connection_is_transient():
    async with connect(Server(answer(200))) as kube:
        kube._client.configuration.host = "http://127.0.0.1:1"
        with pytest.raises(KubeError) as caught:
            await kube.get(PODS, "ns", "a")
    assert caught.value.is_transient


async def test_lists_follow_every_page():
    pages = [
        {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a"}}]},
        {"metadata": {}, "items": [{"metadata": {"name": "b"}}]},
    ]
    server = Server(answer(200, pages[0]), answer(200, pages[1]))
    async with connect(server) as kube:
        items = await kube.list_all(PODS, "ns", "rljob.io/job=tiny,rljob.io/job-uid=u")
    assert [item["metadata"]["name"] for item in items] == ["a", "b"]
    assert server.requests[0][2]["labelSelector"] == "rljob.io/job=tiny,rljob.io/job-uid=u"
    assert server.requests[1][2]["continue"] == "next"


async def test_absent_objects_are_none_and_deleting_them_again_is_fine():
    async with connect(Server(refuse(404, "NotFound", "no"))) as kube:
        assert await kube.get(SECRETS, "ns", "a") is None
        assert await kube.delete(SECRETS, "ns", "a") is False


async def test_delete_is_in_the_background_and_spares_a_namesake():
    server = Server(answer(200), refuse(409, "Conflict", "uid"))
    async with connect(server) as kube:
        assert await kube.delete(RLJOBS, "ns", "a", uid="u") is True
        assert await kube.delete(RLJOBS, "ns", "a", uid="u") is False
    options = json.loads(server.requests[0][3])
    assert (options["propagationPolicy"], options["preconditions"]) == ("Background", {"uid": "u"})


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        (answer(200, {"resources": [{"name": "rayclusters"}, {"name": "rayclusters/status"}]}), True),
        (answer(200, {"resources": [{"name": "rayjobs"}]}), False),
        (refuse(404, "NotFound", "no"), False),
    ],
)
async def test_whether_a_kind_is_served(reply: Answer, want: bool):
    async with connect(Server(reply)) as kube:
        assert await kube.is_served(RAY_CLUSTERS) is want


async def test_requests_are_reported_with_verb_kind_and_status():
    seen: list[tuple[str, str, int]] = []
    server = Server(answer(500), answer(200, CLUSTER))
    async with connect(server, observe=lambda *request: seen.append(request)) as kube:
        await kube.apply(CLUSTER)
        await kube.apply_status(RLJOBS, "ns", "a", resource_version="7", uid="u", status={})
    assert seen == [("apply", "RayCluster", 500), ("apply", "RayCluster", 200), ("apply", "RLJob/status", 200)]


async def test_beyond_the_burst_requests_wait_in_order(no_waiting: list[float]):
    limiter = RateLimiter(requests_per_second=10, burst=2)
    for _ in range(5):
        await limiter.acquire()
    assert len(no_waiting) == 3
    assert no_waiting == sorted(no_waiting)
    assert no_waiting[-1] <= 0.3
