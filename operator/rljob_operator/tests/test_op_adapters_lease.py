"""Leader election against an in-memory Lease with resource versions, and faults."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from rljob_operator.adapters.kube import KubeError, Resource
from rljob_operator.adapters.lease import LeadershipLostError, Lease, LeaseTimes

TIMES = LeaseTimes(lease_seconds=0.6, renew_deadline_seconds=0.4, retry_seconds=0.05)


class FakeKube:
    """One Lease with optimistic locking."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.is_down = False
        self.hangs = False

    async def _check(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.is_down:
            raise KubeError(0, "ClientConnectorError", "refused", "GET lease")

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        await self._check()
        return copy.deepcopy(self.lease)

    async def create(self, document: dict[str, Any]) -> None:
        await self._check()
        if self.lease is not None:
            raise KubeError(409, "AlreadyExists", "lease", "POST lease")
        self.lease = copy.deepcopy(document)
        self.lease["metadata"]["resourceVersion"] = 1

    async def replace(self, document: dict[str, Any], *, timeout_seconds: float | None = None) -> None:
        await self._check()
        assert self.lease is not None
        if document["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "lease", "PUT lease")
        self.lease = copy.deepcopy(document)
        self.lease["metadata"]["resourceVersion"] += 1

    @property
    def holder(self) -> str | None:
        return None if self.lease is None else self.lease["spec"]["holderIdentity"]


class Candidate:
    def __init__(self, kube: FakeKube, identity: str, times: LeaseTimes = TIMES) -> None:
        self.lease = Lease(kube, namespace="ns", name="l", identity=identity, times=times)  # type: ignore[arg-type]
        self.leads = asyncio.Event()
        self.ended = asyncio.Event()
        self.finish = asyncio.Event()
        self.task = asyncio.create_task(self.lease.run(self._lead))

    async def _lead(self) -> None:
        self.leads.set()
        try:
            await self.finish.wait()
        finally:
            await asyncio.sleep(0)  # a clean-up that needs the loop
            self.ended.set()

    async def stop(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def wait(event: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await event.wait()


async def test_only_one_leads_and_a_graceful_stop_hands_over_at_once():
    kube = FakeKube()
    first = Candidate(kube, "first", LeaseTimes(lease_seconds=3600, renew_deadline_seconds=10, retry_seconds=0.02))
    await wait(first.leads)
    second = Candidate(kube, "second", LeaseTimes(lease_seconds=3600, renew_deadline_seconds=10, retry_seconds=0.02))
    await asyncio.sleep(0.1)
    assert not second.leads.is_set()
    await first.stop()
    assert first.ended.is_set(), "the work was awaited before the Lease was released"
    await wait(second.leads)  # far sooner than the lease of an hour
    assert kube.holder == "second"
    assert kube.lease is not None
    assert kube.lease["spec"]["leaseTransitions"] == 1
    await second.stop()
    assert kube.holder == ""


async def test_a_crashed_leader_is_succeeded_after_its_lease():
    kube = FakeKube()
    first = Candidate(kube, "first")
    await wait(first.leads)
    kube_of_the_dead = copy.copy(kube)
    first.lease._kube = kube_of_the_dead  # its writes reach nobody any more
    second = Candidate(kube, "second")
    await wait(second.leads)
    assert kube.holder == "second"
    first.task.cancel()
    await second.stop()
    await asyncio.gather(first.task, return_exceptions=True)


@pytest.mark.parametrize("fault", ["is_down", "hangs"])
async def test_a_leader_that_cannot_renew_stops_working_and_says_so(fault: str):
    kube = FakeKube()
    leader = Candidate(kube, "first")
    await wait(leader.leads)
    setattr(kube, fault, True)
    with pytest.raises(LeadershipLostError, match=r"could not be renewed for 0\.4 s"):
        await asyncio.wait_for(leader.task, 20)
    assert leader.ended.is_set(), "the work was cancelled and awaited"
    assert not leader.lease.is_leader


async def test_a_leader_that_was_replaced_stops_working():
    kube = FakeKube()
    leader = Candidate(kube, "first", LeaseTimes(lease_seconds=60, renew_deadline_seconds=40, retry_seconds=0.02))
    await wait(leader.leads)
    assert kube.lease is not None
    kube.lease["spec"]["holderIdentity"] = "second"
    kube.lease["metadata"]["resourceVersion"] += 1
    with pytest.raises(LeadershipLostError, match="taken over"):
        await asyncio.wait_for(leader.task, 20)
    assert kube.holder == "second", "a lost Lease is not released"


async def test_short_outages_are_survived():
    kube = FakeKube()
    leader = Candidate(kube, "first")
    await wait(leader.leads)
    for _ in range(3):
        kube.is_down = True
        await asyncio.sleep(0.1)
        kube.is_down = False
        await asyncio.sleep(0.15)
    assert not leader.task.done()
    await leader.stop()


async def test_an_error_of_the_work_comes_out_and_the_lease_is_released():
    kube = FakeKube()

    async def lead() -> None:
        raise RuntimeError("broken")

    lease = Lease(kube, namespace="ns", name="l", identity="first", times=TIMES)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="broken"):
        await lease.run(lead)
    assert kube.holder == ""


async def test_a_candidate_trusts_its_own_clock_not_the_holders():
    kube = FakeKube()
    await kube.create(
        {
            "metadata": {"name": "l", "namespace": "ns"},
            "spec": {"holderIdentity": "skewed", "leaseDurationSeconds": 3600, "renewTime": "1999-01-01T00:00:00.0Z"},
        }
    )
    candidate = Candidate(kube, "first")
    await asyncio.sleep(0.3)
    assert not candidate.leads.is_set(), "the record looks long expired only to a clock that runs ahead"
    candidate.task.cancel()
    await asyncio.gather(candidate.task, return_exceptions=True)


def test_default_times_leave_room_for_two_requests_before_the_deadline_and_for_the_deadline_before_the_lease():
    times = LeaseTimes()
    assert 2 * times.request_seconds <= times.renew_deadline_seconds < times.lease_seconds
