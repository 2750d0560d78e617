"""The trainer's own server on the head pod: progress and the polite stop."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from rljob_api.contract import Progress, StopRequest
from rljob_api.names import TRAINER_PORT
from rljob_operator.adapters.access import Access, Head, UnreachableError
from rljob_operator.plan.types import TrainerUnreachable

_TIMEOUT_SECONDS: Final = 5.0


class TrainerClient:
    """`GET /v1/progress` and `POST /v1/stop`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def get_progress(self, head: Head) -> Progress | TrainerUnreachable:
        """What the driver reports; anything but a valid report is "unreachable" with the reason."""
        try:
            async with self._access.open(
                head, TRAINER_PORT, "GET", "/v1/progress", timeout_seconds=_TIMEOUT_SECONDS
            ) as response:
                text = await response.text()
                if response.status != 200:
                    return TrainerUnreachable(f"GET /v1/progress: {response.status} {text[:300]}")
            return Progress.model_validate_json(text)
        except UnreachableError as error:
            return TrainerUnreachable(str(error))
        except ValidationError as error:
            return TrainerUnreachable(f"GET /v1/progress: the report does not follow the contract: {error}"[:1000])

    async def request_stop(self, head: Head, deadline_seconds: int) -> None:
        """Ask for a checkpoint and exit code 143. Raises UnreachableError."""
        body = StopRequest(deadline_seconds=deadline_seconds).model_dump(mode="json")
        async with self._access.open(
            head, TRAINER_PORT, "POST", "/v1/stop", body=body, timeout_seconds=_TIMEOUT_SECONDS
        ) as response:
            if response.status >= 300:
                raise UnreachableError(f"POST /v1/stop: {response.status} {(await response.text())[:300]}")
