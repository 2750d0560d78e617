"""Ray's Jobs API and the trainer's server, against the fake head over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from rljob_api.contract import Progress
from rljob_operator.adapters.access import DirectAccess, Head, ProxyAccess, UnreachableError
from rljob_operator.adapters.kube import Kube, make_client
from rljob_operator.adapters.ray_jobs import RayJobs, decode_log_tail
from rljob_operator.adapters.trainer import TrainerClient
from rljob_operator.plan.types import RayJobFound, RayJobNotFound, RayJobUnreachable, TrainerUnreachable
from rljob_operator.testing.fake_ray import FakeRay, LoopbackAccess, Script

HEAD = Head(namespace="ns", ray_cluster="tiny-1", pod_name="tiny-1-head", token="secret")
SUBMISSION = {
    "entrypoint": "python -m rljob_trainer",
    "submission_id": "u-1",
    "runtime_env": {"env_vars": {"RLJOB_ATTEMPT": "1", "RLJOB_RESUME_FLOOR_STEP": "0"}},
    "metadata": {"rljob.io/job": "tiny", "rljob.io/job-uid": "u"},
}


class Clients:
    def __init__(self, ray: FakeRay, session: aiohttp.ClientSession) -> None:
        access = LoopbackAccess(session, ray)
        self.ray, self.jobs, self.trainer = ray, RayJobs(access), TrainerClient(access)


@pytest_asyncio.fixture
async def clients() -> AsyncIterator[Clients]:
    ray = FakeRay()
    await ray.start()
    ray.start_head("ns", "tiny-1", "secret")
    async with aiohttp.ClientSession() as session:
        yield Clients(ray, session)
    await ray.stop()


async def test_a_repeated_submission_is_success_and_trains_once(clients: Clients):
    assert await clients.jobs.submit(HEAD, SUBMISSION) is None
    assert await clients.jobs.submit(HEAD, SUBMISSION) is None
    assert clients.ray.posts["u-1"] == 2
    assert clients.ray.accepted["u-1"] == 1


async def test_a_malformed_submission_is_rejected_for_good(clients: Clients):
    clients.ray.fault = lambda method, path: 400 if method == "POST" else None
    rejection = await clients.jobs.submit(HEAD, SUBMISSION)
    assert rejection is not None
    assert "injected" in rejection.message


@pytest.mark.parametrize("status", [0, 401, 403, 500, 503])
async def test_other_answers_to_a_submission_are_worth_repeating(clients: Clients, status: int):
    clients.ray.fault = lambda method, path: status
    with pytest.raises(UnreachableError):
        await clients.jobs.submit(HEAD, SUBMISSION)


async def test_a_finished_job_carries_its_exit_code_and_the_trainers_verdict(clients: Clients):
    message = "spec.data.train[0]: /data/train.jsonl does not exist"
    clients.ray.scripts = lambda attempt: Script(fail_at_step=1, exit_code=65, reason="InvalidData", message=message)
    await clients.jobs.submit(HEAD, SUBMISSION)
    assert isinstance(await clients.trainer.get_progress(HEAD), Progress)
    job = await clients.jobs.get(HEAD, "u-1", with_log=True)
    assert isinstance(job, RayJobFound)
    assert (job.status, job.driver_exit_code, job.error_type) == ("FAILED", 65, "JOB_ENTRYPOINT_COMMAND_ERROR")
    assert job.result is not None
    assert job.result.verdict.message == message
    assert job.end_time is not None


async def test_the_log_is_not_read_while_the_job_runs(clients: Clients):
    paths: list[str] = []
    clients.ray.fault = lambda method, path: paths.append(path)
    await clients.jobs.submit(HEAD, SUBMISSION)
    job = await clients.jobs.get(HEAD, "u-1", with_log=True)
    assert isinstance(job, RayJobFound)
    assert (job.status, job.result) == ("RUNNING", None)
    assert not any(path.endswith("/logs") for path in paths)


async def test_an_unreadable_log_is_told_apart_from_one_without_a_result(clients: Clients):
    clients.ray.scripts = lambda attempt: Script(total_steps=1)
    await clients.jobs.submit(HEAD, SUBMISSION)
    await clients.trainer.get_progress(HEAD)
    clients.ray.fault = lambda method, path: 500 if path.endswith("/logs") else None
    job = await clients.jobs.get(HEAD, "u-1", with_log=True)
    assert isinstance(job, RayJobFound)
    assert (job.status, job.result) == ("SUCCEEDED", None)
    assert "500" in job.log_error
    clients.ray.fault = lambda method, path: None
    submission = clients.ray.find_submission("u-1")
    assert submission is not None
    submission.log = "a foreign trainer prints no result line\n"
    job = await clients.jobs.get(HEAD, "u-1", with_log=True)
    assert isinstance(job, RayJobFound)
    assert (job.result, job.log_error) == (None, "")


async def test_an_unknown_job_is_not_found_and_a_dead_head_unreachable(clients: Clients):
    assert isinstance(await clients.jobs.get(HEAD, "u-9", with_log=False), RayJobNotFound)
    await clients.jobs.stop(HEAD, "u-9")
    clients.ray.stop_head("ns", "tiny-1")
    assert isinstance(await clients.jobs.get(HEAD, "u-1", with_log=False), RayJobUnreachable)
    assert isinstance(await clients.trainer.get_progress(HEAD), TrainerUnreachable)
    with pytest.raises(UnreachableError):
        await clients.jobs.stop(HEAD, "u-1")
    with pytest.raises(UnreachableError):
        await clients.trainer.request_stop(HEAD, 60)


async def test_a_wrong_token_is_unreachable_with_the_status_in_it(clients: Clients):
    head = Head("ns", "tiny-1", None, "wrong")
    job = await clients.jobs.get(head, "u-1", with_log=False)
    assert isinstance(job, RayJobUnreachable)
    assert "403" in job.error


async def test_a_report_that_breaks_the_contract_is_unreachable_with_the_field_in_it(clients: Clients):
    await clients.jobs.submit(HEAD, SUBMISSION)
    clients.ray.fault = lambda method, path: 200 if path == "/v1/progress" else None
    answer = await clients.trainer.get_progress(HEAD)
    assert isinstance(answer, TrainerUnreachable)
    assert "contract" in answer.error


async def test_stop_carries_its_deadline(clients: Clients):
    await clients.jobs.submit(HEAD, SUBMISSION)
    await clients.trainer.request_stop(HEAD, 45)
    assert clients.ray.stop_requests == [45]


async def test_direct_access_goes_to_the_head_service():
    async with aiohttp.ClientSession() as session:
        url = DirectAccess(session, "corp.example").build_url(HEAD, 8265, "/api/jobs/")
    assert url == "http://tiny-1-head-svc.ns.svc.corp.example:8265/api/jobs/"


@given(text=st.text(), keep=st.integers(min_value=0, max_value=400))
def test_the_end_of_a_cut_log_is_the_end_of_the_log(text: str, keep: int):
    raw = json.dumps({"logs": text}).encode()
    tail = raw[len(raw) - min(keep, len(raw)) :]
    try:
        decoded = decode_log_tail(tail, is_whole=False)
    except ValueError:
        # Only when no whole line is in the part that was kept: its cut-off first line may be a broken escape.
        assert b"\\n" not in tail[:-2]
        return
    assert text.endswith(decoded)


def test_a_whole_log_is_decoded_as_json():
    raw = json.dumps({"logs": "grüße\n\\n \U0001f600\n"}).encode()
    assert decode_log_tail(raw, is_whole=True) == "grüße\n\\n \U0001f600\n"


async def test_a_log_larger_than_what_is_kept_still_yields_the_result(clients: Clients):
    clients.ray.scripts = lambda attempt: Script(total_steps=1)
    await clients.jobs.submit(HEAD, SUBMISSION)
    await clients.trainer.get_progress(HEAD)
    submission = clients.ray.find_submission("u-1")
    assert submission is not None
    submission.log = "step\n" * 600_000 + submission.log
    job = await clients.jobs.get(HEAD, "u-1", with_log=True)
    assert isinstance(job, RayJobFound)
    assert job.result is not None
    assert len(job.log_tail) <= 4096


class ProxyServer:
    """The API server's pod proxy."""

    def __init__(self, status: int = 200, text: str = '{"status": "RUNNING"}') -> None:
        self.status, self.text = status, text
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        self.headers = dict(request.headers)
        return web.Response(status=self.status, text=self.text)


@asynccontextmanager
async def open_proxy(server: ProxyServer) -> AsyncIterator[ProxyAccess]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    configuration.api_key["BearerToken"] = "Bearer of-the-operator"
    client = make_client(configuration, "test")
    yield ProxyAccess(Kube(client))
    await client.close()
    await runner.cleanup()


async def test_proxy_access_goes_to_the_head_pod_and_keeps_both_tokens_apart():
    server = ProxyServer()
    async with open_proxy(server) as access:
        job = await RayJobs(access).get(HEAD, "u-1", with_log=False)
    assert isinstance(job, RayJobFound)
    assert server.paths == ["/api/v1/namespaces/ns/pods/tiny-1-head:8265/proxy/api/jobs/u-1"]
    assert server.headers["Authorization"] == "Bearer of-the-operator"
    assert server.headers["X-Ray-Authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_pod_that_the_proxy_cannot_reach_is_unreachable(status: int):
    async with open_proxy(ProxyServer(status, "dial tcp 10.0.0.7:8090: connection refused")) as access:
        answer = await TrainerClient(access).get_progress(HEAD)
    assert isinstance(answer, TrainerUnreachable)
    assert "connection refused" in answer.error


async def test_without_a_head_pod_the_proxy_has_nowhere_to_go():
    async with open_proxy(ProxyServer()) as access:
        job = await RayJobs(access).get(Head("ns", "tiny-1", None, "secret"), "u-1", with_log=False)
    assert isinstance(job, RayJobUnreachable)
    assert "no head pod" in job.error
