"""A fake head: Ray's Jobs API and the trainer's progress server over real HTTP, with faults on demand.

Time does not pass by itself: every `GET /v1/progress` moves the training one step on, so tests do not depend on speed.
Each head answers below `/<namespace>/<ray cluster>/<port>`; `LoopbackAccess` sends the operator there.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from aiohttp import web

from rljob_api.contract import Progress, Result, TrainerPhase, TrainerState, Verdict, format_result_line
from rljob_api.names import ENV_ATTEMPT, ENV_RESUME_FLOOR_STEP, LABEL_JOB_UID, RAY_DASHBOARD_PORT, TRAINER_PORT
from rljob_api.v1alpha1.status import CheckpointStatus, ProgressStatus
from rljob_operator.adapters.access import DirectAccess, Head

_STOPPED_EXIT_CODE: Final = 143


@dataclass(frozen=True)
class Script:
    """How one attempt goes."""

    total_steps: int = 4
    checkpoint_every_steps: int = 2
    fail_at_step: int | None = None
    """End with `exit_code` when this step is reached."""
    exit_code: int = 0
    reason: str = "Completed"
    message: str = "the step target was reached"
    stays_pending: bool = False
    """Ray accepts the job and never starts it."""
    hangs_at_step: int | None = None
    """From this step on nothing moves and the heartbeat stands still."""


@dataclass
class Submission:
    """One Ray job."""

    body: dict[str, Any]
    script: Script
    attempt: int
    resumed_from_step: int
    status: str = "RUNNING"
    step: int = 0
    checkpoint_step: int = 0
    exit_code: int | None = None
    message: str = ""
    log: str = ""
    start_time: str = field(default_factory=lambda: _now())
    heartbeat_time: str = field(default_factory=lambda: _now())
    stop_requested: bool = False

    @property
    def is_running(self) -> bool:
        """The driver lives, and with it the trainer's server."""
        return self.status == "RUNNING"


@dataclass
class FakeHead:
    """One head pod's processes. Its job table dies with it."""

    token: str
    submissions: dict[str, Submission] = field(default_factory=dict)


Fault = Callable[[str, str], int | None]
"""(method, path below the port) -> HTTP status to answer with, 0 to drop the connection, None to behave."""


class FakeRay:
    """All heads of all clusters of a test."""

    def __init__(self) -> None:
        self.heads: dict[tuple[str, str], FakeHead] = {}
        self.checkpoints: dict[str, int] = {}
        """Newest checkpoint step by job UID: the volume survives heads."""
        self.scripts: Callable[[int], Script] = lambda attempt: Script()
        """Attempt -> how it goes."""
        self.fault: Fault = lambda method, path: None
        self.accepted: Counter[str] = Counter()
        """Submissions that started a driver, by submission id; 2 would be a second training run."""
        self.posts: Counter[str] = Counter()
        """POSTs by submission id, repeated ones included."""
        self.stop_requests: list[int] = []
        """Deadlines of `POST /v1/stop`, seconds."""
        self.base_url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free loopback port."""
        app = web.Application(client_max_size=16 * 1024**2)
        app.router.add_route("*", "/{namespace}/{cluster}/{port}/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def start_head(self, namespace: str, cluster: str, token: str) -> None:
        """The head pod came up: an empty job table."""
        self.heads[namespace, cluster] = FakeHead(token)

    def stop_head(self, namespace: str, cluster: str) -> None:
        """The head pod is gone."""
        self.heads.pop((namespace, cluster), None)

    def find_submission(self, submission_id: str) -> Submission | None:
        """Wherever it runs."""
        for head in self.heads.values():
            if submission_id in head.submissions:
                return head.submissions[submission_id]
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        fault = self.fault(request.method, path)
        head = self.heads.get((request.match_info["namespace"], request.match_info["cluster"]))
        if head is None or fault == 0:
            return _drop_connection(request)
        if fault is not None:
            return web.Response(status=fault, text=f"injected {fault}")
        if request.headers.get("X-Ray-Authorization") != f"Bearer {head.token}":
            return web.Response(status=401 if "X-Ray-Authorization" not in request.headers else 403, text="token")
        if int(request.match_info["port"]) == RAY_DASHBOARD_PORT:
            return await self._handle_jobs(request, head, path)
        if int(request.match_info["port"]) == TRAINER_PORT:
            return await self._handle_trainer(request, head, path)
        return _drop_connection(request)

    async def _handle_jobs(self, request: web.Request, head: FakeHead, path: str) -> web.StreamResponse:
        if request.method == "POST" and path == "/api/jobs/":
            return self._submit(head, await request.json())
        parts = path.removeprefix("/api/jobs/").split("/")
        submission = head.submissions.get(parts[0])
        if submission is None:
            return web.Response(status=404, text=f"Job {parts[0]} does not exist")
        match (request.method, parts[1:]):
            case ("GET", []):
                return web.json_response(_describe(parts[0], submission))
            case ("GET", ["logs"]):
                return web.json_response({"logs": submission.log})
            case ("POST", ["stop"]):
                if submission.status in ("PENDING", "RUNNING"):
                    submission.status, submission.message = "STOPPED", "Job was intentionally stopped."
                return web.json_response({"stopped": True})
            case _:
                return web.Response(status=405)

    def _submit(self, head: FakeHead, body: dict[str, Any]) -> web.Response:
        submission_id = body["submission_id"]
        self.posts[submission_id] += 1
        if submission_id in head.submissions:
            text = f"ValueError: Job with submission_id {submission_id} already exists. Please use a different one."
            return web.Response(status=500, text=text)
        environment = body["runtime_env"]["env_vars"]
        attempt, floor = int(environment[ENV_ATTEMPT]), int(environment[ENV_RESUME_FLOOR_STEP])
        script = self.scripts(attempt)
        resumed = max(self.checkpoints.get(body["metadata"][LABEL_JOB_UID], 0), floor)
        submission = Submission(body, script, attempt, resumed, step=resumed, checkpoint_step=resumed)
        submission.status = "PENDING" if script.stays_pending else "RUNNING"
        head.submissions[submission_id] = submission
        self.accepted[submission_id] += 1
        return web.json_response({"job_id": submission_id, "submission_id": submission_id})

    async def _handle_trainer(self, request: web.Request, head: FakeHead, path: str) -> web.StreamResponse:
        running = [submission for submission in head.submissions.values() if submission.is_running]
        if not running:
            return _drop_connection(request)
        submission = running[-1]
        match (request.method, path):
            case ("GET", "/v1/progress"):
                report = _build_progress(submission)
                self._advance(submission)
                return web.json_response(report.model_dump(mode="json", exclude_none=True))
            case ("POST", "/v1/stop"):
                self.stop_requests.append((await request.json())["deadlineSeconds"])
                submission.stop_requested = True
                return web.json_response({})
            case _:
                return web.Response(status=404)

    def _advance(self, submission: Submission) -> None:
        script = submission.script
        if submission.stop_requested:
            submission.checkpoint_step = submission.step
            self._end(submission, _STOPPED_EXIT_CODE, "Stopped", "stopped after a checkpoint")
            return
        if script.hangs_at_step is not None and submission.step >= script.hangs_at_step:
            return
        submission.step += 1
        submission.heartbeat_time = _now()
        if submission.step % script.checkpoint_every_steps == 0 or submission.step == script.total_steps:
            submission.checkpoint_step = submission.step
            self.checkpoints[submission.body["metadata"][LABEL_JOB_UID]] = submission.step
        if script.fail_at_step is not None and submission.step >= script.fail_at_step:
            self._end(submission, script.exit_code, script.reason, script.message)
        elif submission.step >= script.total_steps:
            self._end(submission, 0, "Completed", "the step target was reached")

    def _end(self, submission: Submission, exit_code: int, reason: str, message: str) -> None:
        uid = submission.body["metadata"][LABEL_JOB_UID]
        if submission.checkpoint_step:
            self.checkpoints[uid] = submission.checkpoint_step
        progress = _build_progress(submission)
        result = Result(verdict=Verdict(exit_code=exit_code, reason=reason, message=message), progress=progress)
        submission.log = f"step {submission.step}\n{format_result_line(result)}\n"
        submission.exit_code = exit_code
        submission.status = "SUCCEEDED" if exit_code == 0 else "FAILED"
        submission.message = (
            "Job finished successfully."
            if exit_code == 0
            else f"Job entrypoint command failed with exit code {exit_code}, last available logs:\n{submission.log}"
        )


class LoopbackAccess(DirectAccess):
    """Direct access whose every head is a path of one FakeRay."""

    def __init__(self, session: aiohttp.ClientSession, ray: FakeRay) -> None:
        super().__init__(session)
        self._ray = ray

    def build_url(self, head: Head, port: int, path: str) -> str:
        """See DirectAccess.build_url."""
        return f"{self._ray.base_url}/{head.namespace}/{head.ray_cluster}/{port}{path}"


def _build_progress(submission: Submission) -> Progress:
    uid = submission.body["metadata"][LABEL_JOB_UID]
    checkpoint = None
    if submission.checkpoint_step:
        path = f"/var/lib/rljob/step-{submission.checkpoint_step}"
        checkpoint = CheckpointStatus(step=submission.checkpoint_step, path=path, time=submission.heartbeat_time)
    return Progress(
        job_uid=uid,
        attempt=submission.attempt,
        state=TrainerState.STOPPING if submission.stop_requested else TrainerState.RUNNING,
        phase=TrainerPhase.TRAIN,
        heartbeat_time=submission.heartbeat_time,
        start_time=submission.start_time,
        resumed_from_step=submission.resumed_from_step or None,
        progress=ProgressStatus(
            step=submission.step,
            total_steps=submission.script.total_steps,
            reward_mean=0.5,
            tokens_per_second=1000.0,
            updated_time=submission.heartbeat_time,
        ),
        checkpoint=checkpoint,
    )


def _describe(submission_id: str, submission: Submission) -> dict[str, Any]:
    is_over = submission.status in ("SUCCEEDED", "FAILED", "STOPPED")
    is_failed = submission.status == "FAILED"
    return {
        "type": "SUBMISSION",
        "submission_id": submission_id,
        "status": submission.status,
        "entrypoint": submission.body["entrypoint"],
        "message": submission.message,
        "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR" if is_failed else None,
        "driver_exit_code": submission.exit_code if submission.status != "STOPPED" else None,
        "start_time": 1,
        "end_time": int(datetime.now(UTC).timestamp() * 1000) if is_over else None,
        "metadata": json.loads(json.dumps(submission.body["metadata"])),
    }


def _drop_connection(request: web.Request) -> web.Response:
    """What a client sees of a server that is not there."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
