"""Ray's Jobs API (2.60), reduced to what the planner asks.

Status codes as read in Ray's source and measured: a duplicate submission id is answered with 500 and the text
"already exists", an unknown id with 404 in plain text, a malformed submission with 400.
"""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from rljob_api.contract import find_result
from rljob_api.names import RAY_DASHBOARD_PORT
from rljob_operator.adapters.access import Access, Head, UnreachableError
from rljob_operator.plan.types import (
    RayJobFound,
    RayJobNotFound,
    RayJobRejected,
    RayJobUnreachable,
    RayJobView,
)

TERMINAL_STATUSES: Final = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})

_REQUEST_TIMEOUT_SECONDS: Final = 5.0
# Submitting waits for the head's job agent, which starts a few seconds after the dashboard.
_SUBMIT_TIMEOUT_SECONDS: Final = 20.0
# The endpoint has no "last n lines": the whole log crosses the wire once, when the job has ended.
_LOG_TIMEOUT_SECONDS: Final = 30.0
_LOG_BYTES_KEPT: Final = 512 * 1024
_LOG_TAIL_LENGTH: Final = 4096
_MESSAGE_LENGTH: Final = 4096


class RayJobs:
    """One method per question; none raises for an answer Ray can give."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def submit(self, head: Head, submission: dict[str, Any]) -> RayJobRejected | None:
        """POST /api/jobs/. None: it runs (or ran already under this id). Raises UnreachableError."""
        async with self._open(head, "POST", "/api/jobs/", submission, _SUBMIT_TIMEOUT_SECONDS) as response:
            text = await response.text()
            if response.status == 200 or (response.status == 500 and "already exists" in text):
                return None
            if response.status == 400:
                return RayJobRejected(_shorten(text))
            raise UnreachableError(f"submission {submission['submission_id']}: {response.status} {_shorten(text)}")

    async def get(self, head: Head, submission_id: str, *, with_log: bool) -> RayJobView:
        """The submission as the head sees it; the log is read once it has ended and `with_log` asks for it."""
        try:
            async with self._open(
                head, "GET", f"/api/jobs/{submission_id}", None, _REQUEST_TIMEOUT_SECONDS
            ) as response:
                text = await response.text()
                if response.status == 404:
                    return RayJobNotFound()
                if response.status != 200:
                    return RayJobUnreachable(f"GET /api/jobs/{submission_id}: {response.status} {_shorten(text)}")
            details = json.loads(text)
        except UnreachableError as error:
            return RayJobUnreachable(str(error))
        except ValueError as error:
            return RayJobUnreachable(f"GET /api/jobs/{submission_id}: not JSON: {error}")
        log, log_error = "", ""
        if with_log and details.get("status") in TERMINAL_STATUSES:
            try:
                log = await self._read_log_tail(head, submission_id)
            except UnreachableError as error:
                log_error = str(error)
        return _build_view(submission_id, details, log, log_error)

    async def stop(self, head: Head, submission_id: str) -> None:
        """POST /api/jobs/<id>/stop; an unknown id is stopped already. Raises UnreachableError."""
        async with self._open(
            head, "POST", f"/api/jobs/{submission_id}/stop", None, _REQUEST_TIMEOUT_SECONDS
        ) as response:
            if response.status not in (200, 404):
                raise UnreachableError(
                    f"stop of submission {submission_id}: {response.status} {_shorten(await response.text())}"
                )

    async def _read_log_tail(self, head: Head, submission_id: str) -> str:
        path = f"/api/jobs/{submission_id}/logs"
        async with self._open(head, "GET", path, None, _LOG_TIMEOUT_SECONDS) as response:
            if response.status != 200:
                raise UnreachableError(f"GET {path}: {response.status} {_shorten(await response.text())}")
            kept = bytearray()
            is_whole = True
            async for chunk in response.content.iter_chunked(64 * 1024):
                kept += chunk
                if len(kept) > 2 * _LOG_BYTES_KEPT:
                    del kept[:-_LOG_BYTES_KEPT]
                    is_whole = False
        try:
            return decode_log_tail(bytes(kept), is_whole=is_whole)
        except ValueError as error:
            raise UnreachableError(f"GET {path}: {error}") from error

    def _open(
        self, head: Head, method: str, path: str, body: Any, timeout_seconds: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._access.open(head, RAY_DASHBOARD_PORT, method, path, body=body, timeout_seconds=timeout_seconds)


def decode_log_tail(raw: bytes, *, is_whole: bool) -> str:
    r"""The text of `{"logs": "..."}`, or of its end when the beginning was thrown away.

    A log of gigabytes must not be held in memory, so only the end of the JSON document is kept. It is cut after the
    first `\n` escape, which is a character boundary whatever came before it. Raises ValueError.
    """
    if is_whole:
        logs = json.loads(raw).get("logs")
        return logs if isinstance(logs, str) else ""
    end = raw.rfind(b'"')
    start = raw.find(b"\\n")
    if end < 0 or start < 0 or start + 2 > end:
        raise ValueError("no line end in the last part of the log")
    text = json.loads(b'"' + raw[start + 2 : end] + b'"')
    return str(text)


def _build_view(submission_id: str, details: dict[str, Any], log: str, log_error: str) -> RayJobFound:
    message = str(details.get("message") or "")
    # On failure Ray puts the end of the log into the message: a second source when the log itself cannot be read.
    result = find_result(log) or find_result(message)
    end_time_ms = details.get("end_time")
    return RayJobFound(
        submission_id=submission_id,
        status=str(details.get("status") or "PENDING"),
        error_type=str(details.get("error_type") or ""),
        driver_exit_code=details.get("driver_exit_code"),
        message=message[-_MESSAGE_LENGTH:],
        end_time=datetime.fromtimestamp(end_time_ms / 1000, UTC) if end_time_ms else None,
        result=result,
        log_error="" if result is not None else log_error,
        log_tail=log[-_LOG_TAIL_LENGTH:],
    )


def _shorten(text: str) -> str:
    """The end of a traceback is what says something."""
    text = text.strip()
    return text if len(text) <= 500 else f"...{text[-500:]}"
