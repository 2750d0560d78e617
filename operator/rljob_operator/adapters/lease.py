"""Leader election on a coordination.k8s.io Lease (15 s lease, 10 s renew deadline, 2 s retry).

Why not `kubernetes.aio.leaderelection` (read at 37.0.2): its requests have no deadline shorter than the lease
(5 minutes by default), an aiohttp error or time-out escapes `run()` while the leader's task goes on, the task is
cancelled but not awaited, nothing releases the Lease on shutdown, and local time is written with a "Z".

Rules, as in client-go: a candidate trusts only its own monotonic clock (it watches how long the record has not moved,
clock skew between nodes is harmless); the leader stops when it could not renew for the renew deadline, which is
shorter than the lease; a request never lasts longer than half the renew deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rljob_operator.adapters.kube import LEASES, Kube, KubeError

logger = logging.getLogger(__name__)


class LeadershipLostError(Exception):
    """Another replica may lead now: the process must exit."""


@dataclass(frozen=True)
class LeaseTimes:
    """Timing in seconds. Raises ValueError for times that let two replicas lead at once."""

    lease_seconds: float = 15.0
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_seconds > self.renew_deadline_seconds > 2 * self.retry_seconds > 0:
            raise ValueError(
                f"lease {self.lease_seconds:g} s, renew deadline {self.renew_deadline_seconds:g} s and retry "
                f"{self.retry_seconds:g} s: the lease must be longer than the renew deadline, and that longer than two "
                "retries, for example 15, 10 and 2"
            )

    @property
    def request_seconds(self) -> float:
        """Longest request: two must fit into the renew deadline."""
        return self.renew_deadline_seconds / 2


class Lease:
    """One candidate."""

    def __init__(
        self, kube: Kube, *, namespace: str, name: str, identity: str, times: LeaseTimes | None = None
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        self._seen_record: dict[str, Any] | None = None
        self._seen_time = 0.0
        self.is_leader = False
        """Whether this process leads right now."""

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait for the Lease, run `lead` while holding it, release it.

        `lead` is cancelled and awaited when the Lease is lost, and LeadershipLostError raised. Whatever ends `lead`
        (return, exception, cancellation of this call) releases the Lease first.
        """
        await self._acquire()
        logger.info("Acquired Lease %s/%s as %s", self._namespace, self._name, self._identity)
        self.is_leader = True
        leading = asyncio.ensure_future(_as_coroutine(lead))
        renewing = asyncio.create_task(self._renew())
        try:
            done, _ = await asyncio.wait({leading, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if renewing in done and leading not in done:
                await renewing
            elif leading in done:
                await leading
        finally:
            await _cancel_and_wait(leading)
            await _cancel_and_wait(renewing)
            was_lost = not self.is_leader
            self.is_leader = False
            if not was_lost:
                await self._release()

    async def _acquire(self) -> None:
        while not await self._try(self._take_or_renew):  # noqa: ASYNC110 - the event happens on another machine
            await asyncio.sleep(self._times.retry_seconds)

    async def _renew(self) -> None:
        last_renewal = time.monotonic()
        while True:
            await asyncio.sleep(self._times.retry_seconds)
            if await self._try(self._take_or_renew):
                last_renewal = time.monotonic()
            elif time.monotonic() - last_renewal > self._times.renew_deadline_seconds:
                self.is_leader = False
                raise LeadershipLostError(
                    f"Lease {self._namespace}/{self._name} could not be renewed for "
                    f"{self._times.renew_deadline_seconds:g} s"
                )
            elif self._is_held_by_another():
                self.is_leader = False
                raise LeadershipLostError(f"Lease {self._namespace}/{self._name} was taken over")

    async def _try(self, step: Callable[[], Awaitable[bool]]) -> bool:
        try:
            async with asyncio.timeout(self._times.request_seconds):
                return await step()
        except (KubeError, TimeoutError) as error:
            if not (isinstance(error, KubeError) and error.is_conflict):
                logger.warning("Lease %s/%s: %s", self._namespace, self._name, str(error) or type(error).__name__)
            return False

    async def _take_or_renew(self) -> bool:
        document = await self._kube.get(LEASES, self._namespace, self._name)
        if document is None:
            await self._kube.create(self._build(None))
            return True
        record = document.get("spec") or {}
        if record != self._seen_record:
            self._seen_record, self._seen_time = record, time.monotonic()
        holder = record.get("holderIdentity") or ""
        # The holder's own lease duration counts: it may run with other settings than we do.
        lease_seconds = float(record.get("leaseDurationSeconds") or self._times.lease_seconds)
        if holder not in ("", self._identity) and time.monotonic() - self._seen_time < lease_seconds:
            return False
        # The resource version in the document makes a lost race a 409.
        await self._kube.replace(self._build(document), timeout_seconds=self._times.request_seconds)
        return True

    def _is_held_by_another(self) -> bool:
        holder = (self._seen_record or {}).get("holderIdentity") or ""
        return holder not in ("", self._identity)

    async def _release(self) -> None:
        """Give the Lease back, so that a standby takes over at once. Best effort, with a deadline."""

        async def release() -> bool:
            document = await self._kube.get(LEASES, self._namespace, self._name)
            if document is None or (document.get("spec") or {}).get("holderIdentity") != self._identity:
                return True
            document["spec"]["holderIdentity"] = ""
            await self._kube.replace(document, timeout_seconds=self._times.request_seconds)
            return True

        # Shielded: the usual caller is being cancelled.
        if await asyncio.shield(asyncio.ensure_future(self._try(release))):
            logger.info("Released Lease %s/%s", self._namespace, self._name)

    def _build(self, current: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        record = (current or {}).get("spec") or {}
        is_renewal = record.get("holderIdentity") == self._identity
        transitions = int(record.get("leaseTransitions") or 0)
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": (current or {}).get("metadata") or {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._times.lease_seconds)),
                "acquireTime": record.get("acquireTime", now) if is_renewal else now,
                "renewTime": now,
                "leaseTransitions": transitions if is_renewal or current is None else transitions + 1,
            },
        }


async def _as_coroutine(lead: Callable[[], Awaitable[None]]) -> None:
    await lead()


async def _cancel_and_wait(task: asyncio.Future[None]) -> None:
    if task.done():
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
