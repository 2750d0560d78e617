"""The Http reward: a server that scores samples, asked from one thread with bounded concurrency.

Contract with the server: `POST` of `{"prompt", "response", "answer", "fields"}`, answered by `{"score": number}` or
`{"score": null}` (further numbers are metrics); with `batchSamples` above 1 of `{"samples": [...]}`, answered by
`{"scores": [...]}` in the same order, each a number, null, or a mapping with `score`.

Connection failures, 429 and 5xx are repeated until `timeoutSeconds`, as `Retry-After` says or with growing delays;
every other status is final. Redirects are not followed: a POST would arrive as a GET, and the credentials elsewhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
from yarl import URL

from rljob_trainer.rewards.functions import FunctionPlan
from rljob_trainer.rewards.outcome import BadReturnError, FailureKind, Score, ScoreFailure, ScoreRequest, read_score
from rljob_trainer.telemetry.writers import to_strict_json

BATCH_LINGER_SECONDS: Final = 0.02
"""How long a batch that is not full waits for more samples."""
FIRST_DELAY_SECONDS: Final = 0.25
LONGEST_DELAY_SECONDS: Final = 8.0
MAX_ANSWER_BYTES: Final = 16 * 2**20
CLOSE_SECONDS: Final = 10.0

Outcome = Score | ScoreFailure


class _RequestFailedError(Exception):
    """A request is given up."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _RepeatableError(Exception):
    """A request failed in a way that may go away."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass
class _Item:
    request: ScoreRequest
    outcome: concurrent.futures.Future[Outcome]


class HttpScorer:
    """Asks the servers of all Http functions; one thread with an event loop. Thread-safe."""

    def __init__(self, plans: Sequence[FunctionPlan], environment: dict[str, str]) -> None:
        """`environment` holds the credentials that `authorizationEnv` names (checked by `plan_functions`)."""
        self._loop = asyncio.new_event_loop()
        self._functions = {plan.name: _HttpFunction(plan, environment) for plan in plans}
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-http", daemon=True)
        self._thread.start()

    def submit(self, plan: FunctionPlan, request: ScoreRequest) -> concurrent.futures.Future[Outcome]:
        """Hand over one sample; returns at once."""
        item = _Item(request, concurrent.futures.Future())
        self._loop.call_soon_threadsafe(self._functions[plan.name].put, item)
        return item.outcome

    def close(self) -> None:
        """Gives up what is still open."""
        if self._loop.is_closed():
            return
        closing = asyncio.run_coroutine_threadsafe(self._close_all(), self._loop)
        try:
            closing.result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close_all(self) -> None:
        for function in self._functions.values():
            await function.close()


class _HttpFunction:
    """One server; everything but the constructor runs in the event loop."""

    def __init__(self, plan: FunctionPlan, environment: dict[str, str]) -> None:
        options = plan.options
        self._plan = plan
        self._url = options["url"]
        self._shown_url = strip_credentials(options["url"])
        self._batch_samples: int = options["batch_samples"]
        self._max_requests: int = options["max_concurrent_requests"]
        variable = options["authorization_env"]
        self._headers = {} if variable is None else {"Authorization": environment[variable]}
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    def put(self, item: _Item) -> None:
        """Queue a sample; the first one starts the workers."""
        if not self._tasks:
            self._tasks = [asyncio.get_running_loop().create_task(self._work()) for _ in range(self._max_requests)]
        self._queue.put_nowait(item)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait().outcome.cancel()
        if self._session is not None:
            await self._session.close()

    async def _work(self) -> None:
        while True:
            items = await self._take_batch()
            try:
                outcomes = await self._score(items)
            except asyncio.CancelledError:
                for item in items:
                    item.outcome.cancel()
                raise
            for item, outcome in zip(items, outcomes, strict=True):
                # Cancelled from another thread: nobody waits for it any more.
                if item.outcome.set_running_or_notify_cancel():
                    item.outcome.set_result(outcome)

    async def _take_batch(self) -> list[_Item]:
        """At least one sample, and what else comes within moments."""
        items = [await self._take_wanted()]
        while len(items) < self._batch_samples:
            try:
                items.append(await asyncio.wait_for(self._take_wanted(), BATCH_LINGER_SECONDS))
            except TimeoutError:
                break
        return items

    async def _take_wanted(self) -> _Item:
        """The next sample that was not given up, as those of a failed batch are."""
        while True:
            item = await self._queue.get()
            if not item.outcome.cancelled():
                return item

    async def _score(self, items: list[_Item]) -> list[Outcome]:
        try:
            answer = await self._request_until_deadline(items)
            return self._read_answer(answer, len(items))
        except _RequestFailedError as error:
            message = f"{self._shown_url}: {error}"
            return [ScoreFailure(error.kind, self._plan.name, message)] * len(items)
        except Exception as error:  # noqa: BLE001 - a worker that dies would leave its samples without an answer
            message = f"{self._shown_url}: {type(error).__name__}: {error}"
            return [ScoreFailure(FailureKind.EXCEPTION, self._plan.name, message)] * len(items)

    async def _request_until_deadline(self, items: list[_Item]) -> Any:
        """The server's JSON answer, repeated while it may help."""
        samples = [build_sample(item.request) for item in items]
        body = json.dumps(samples[0] if self._batch_samples == 1 else {"samples": samples}, allow_nan=False)
        limit = self._plan.timeout_seconds
        deadline = time.monotonic() + limit
        delay, attempt, last_problem = FIRST_DELAY_SECONDS, 0, "no connection"
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                    return await self._post(body)
            except TimeoutError:
                problem = last_problem if attempt > 1 else "no answer"
                raise _RequestFailedError(
                    FailureKind.TIMEOUT, f"{problem} within timeoutSeconds = {limit:g} (attempt {attempt})"
                ) from None
            except _RepeatableError as error:
                last_problem = str(error)
                wait = error.retry_after_seconds
                if wait is None:
                    # Spread, so that requests refused together do not come back together.
                    wait = delay * random.uniform(0.5, 1.5)
                    delay = min(2 * delay, LONGEST_DELAY_SECONDS)
                if time.monotonic() + wait >= deadline:
                    asked = f", and asks to wait {wait:g} s" if error.retry_after_seconds is not None else ""
                    raise _RequestFailedError(
                        FailureKind.HTTP,
                        f"{last_problem}{asked}; given up after {attempt} attempts, timeoutSeconds = {limit:g}",
                    ) from None
                await asyncio.sleep(wait)

    async def _post(self, body: str) -> Any:
        if self._session is None:
            # The pool's limit of 100 connections would undercut maxConcurrentRequests.
            connector = aiohttp.TCPConnector(limit=self._max_requests)
            self._session = aiohttp.ClientSession(
                connector=connector, trust_env=True, timeout=aiohttp.ClientTimeout(total=None)
            )
        headers = {"Content-Type": "application/json"} | self._headers
        try:
            async with self._session.post(
                self._url, data=body.encode(), headers=headers, allow_redirects=False
            ) as response:
                data = bytearray()
                async for chunk in response.content.iter_chunked(2**16):
                    data += chunk
                    if len(data) > MAX_ANSWER_BYTES:
                        raise _RequestFailedError(
                            FailureKind.BAD_RETURN, f"answered more than {MAX_ANSWER_BYTES // 2**20} MiB"
                        )
        except aiohttp.ClientConnectionError as error:
            raise _RepeatableError(f"{type(error).__name__}: {describe_error(error)}") from None
        except aiohttp.ClientPayloadError as error:
            raise _RepeatableError(f"the answer broke off: {describe_error(error)}") from None
        except aiohttp.InvalidURL as error:
            raise _RequestFailedError(FailureKind.HTTP, "is no address that can be asked") from error
        return read_body(response.status, data.decode("utf-8", "replace"), response.headers.get("Retry-After"))

    def _read_answer(self, answer: Any, num_samples: int) -> list[Outcome]:
        entries: Any
        if self._batch_samples == 1:
            entries = [answer]
        else:
            entries = answer.get("scores") if isinstance(answer, dict) else None
            if not isinstance(entries, list):
                raise _RequestFailedError(
                    FailureKind.BAD_RETURN, f'answered {json.dumps(answer)[:200]}; a batch needs {{"scores": [...]}}'
                )
            if len(entries) != num_samples:
                raise _RequestFailedError(
                    FailureKind.BAD_RETURN, f"answered {len(entries)} scores for {num_samples} samples"
                )
        return [self._read_entry(entry) for entry in entries]

    def _read_entry(self, entry: Any) -> Outcome:
        if self._batch_samples == 1 and not isinstance(entry, dict):
            message = f'{self._shown_url}: answered {json.dumps(entry)[:200]}; it must be {{"score": number or null}}'
            return ScoreFailure(FailureKind.BAD_RETURN, self._plan.name, message)
        try:
            return read_score(entry)
        except BadReturnError as error:
            return ScoreFailure(FailureKind.BAD_RETURN, self._plan.name, f"{self._shown_url}: {error}")


def build_sample(request: ScoreRequest) -> dict[str, Any]:
    """What the server gets of a sample; values JSON does not know become null or text."""
    sample: dict[str, Any] = to_strict_json(
        {
            "prompt": request.prompt,
            "response": request.response,
            "answer": request.answer,
            "fields": dict(request.fields),
        }
    )
    return sample


def read_body(status: int, text: str, retry_after: str | None) -> Any:
    """The JSON document of a good answer.

    Raises:
        _RepeatableError: 429 or 5xx. _RequestFailedError: another status, or no JSON.
    """
    shown = " ".join(text.split())[:200]
    if status == 429 or status >= 500:
        raise _RepeatableError(f"HTTP {status}: {shown}", parse_retry_after(retry_after))
    if status != 200:
        hint = "; give the final address, redirects are not followed" if 300 <= status < 400 else ""
        raise _RequestFailedError(FailureKind.HTTP, f"HTTP {status}: {shown}{hint}")
    try:
        return json.loads(text)
    except ValueError:
        raise _RequestFailedError(FailureKind.BAD_RETURN, f"answered no JSON: {shown!r}") from None


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (a number or a date, RFC 9110); None for none or nonsense."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def strip_credentials(url: str) -> str:
    """The address without user, password and query, for messages."""
    try:
        return str(URL(url).with_user(None).with_query(None).with_fragment(None))
    except ValueError:
        return "its url"


def describe_error(error: BaseException) -> str:
    """Text of a connection error; some carry none."""
    return str(error) or "the connection was closed"
