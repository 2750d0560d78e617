"""Bad days of the API server, and two operators at once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from rljob_operator.adapters.lease import LeaseTimes
from rljob_operator.testing.envtest import apply_crd, find_rljob_crd, start_envtest
from rljob_operator.testing.fault_proxy import WRITE_METHODS, FaultProxy, InjectedFault
from rljob_operator.testing.world import World, find_condition, open_world

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Long enough for a busy machine: the hand-over under test does not wait for it.
LEASE_TIMES = LeaseTimes(lease_seconds=60, renew_deadline_seconds=40, retry_seconds=0.3)


async def assert_one_cluster_and_one_run(world: World) -> None:
    uid = (await world.get_job())["metadata"]["uid"]
    assert dict(world.ray.accepted) == {f"{uid}-1": 1}
    assert world.envtest.list_created(resource="rayclusters", namespace=world.namespace) == ["tiny-1"]


async def test_one_conflict_on_a_status_write_changes_nothing(world: World, tmp_path: Path):
    """kuberay #756: the submission was repeated after a conflict. Every second status write is refused with 409."""
    num_writes = 0

    def decide(method: str, path: str) -> InjectedFault | None:
        nonlocal num_writes
        if method != "PATCH" or not path.endswith("/status"):
            return None
        num_writes += 1
        return InjectedFault(409) if num_writes % 2 else None

    proxy = FaultProxy(world.envtest, decide)
    await proxy.start(tmp_path / "kubeconfig")
    try:
        running = world.start_operator(kubeconfig=tmp_path / "kubeconfig")
        await world.apply_job()
        await world.wait_for_condition("Succeeded", timeout_seconds=120)
        await assert_one_cluster_and_one_run(world)
        assert proxy.injected[409] > 2
        events = await world.list_objects("api/v1/events")
        assert [event for event in events if event["type"] == "Warning"] == []
        registry = running.operator.metrics.registry
        assert registry.get_sample_value("rljob_operator_reconcile_total", {"result": "error"}) == 0
    finally:
        await running.stop()
        await proxy.stop()


async def test_a_third_of_the_writes_failing_still_ends_right(world: World, tmp_path: Path):
    """429, 500, dropped connections, and answers lost after the write was carried out."""
    chance = random.Random(7)
    faults = [
        InjectedFault(429, retry_after_seconds=0.1),
        InjectedFault(500),
        InjectedFault(0),
        InjectedFault(0, reaches_server=True),
        InjectedFault(500, reaches_server=True),
    ]

    def decide(method: str, path: str) -> InjectedFault | None:
        return chance.choice(faults) if method in WRITE_METHODS and chance.random() < 0.3 else None

    proxy = FaultProxy(world.envtest, decide)
    await proxy.start(tmp_path / "kubeconfig")
    try:
        running = world.start_operator(kubeconfig=tmp_path / "kubeconfig")
        await world.apply_job()
        job = await world.wait_for_condition("Succeeded", timeout_seconds=240)
        await assert_one_cluster_and_one_run(world)
        status = job["status"]
        assert (status["attempt"], status["clusterGeneration"]) == (1, 1)
        assert status["retries"]["counted"] == status["retries"]["free"] == 0
        assert sum(proxy.injected.values()) >= 3, "the test injected something"

        async def is_released() -> bool:
            return not await world.list_objects("apis/ray.io/v1/rayclusters")

        await world.wait_until(is_released, "the cluster to be released", 120)
    finally:
        await running.stop()
        await proxy.stop()


async def test_a_head_that_flaps_does_not_fail_a_healthy_run(world: World):
    chance = random.Random(11)
    world.ray.fault = lambda method, path: chance.choice([0, 500, 503]) if chance.random() < 0.4 else None
    world.start_operator()
    await world.apply_job()
    job = await world.wait_for_condition("Succeeded", timeout_seconds=180)
    await assert_one_cluster_and_one_run(world)
    assert job["status"]["failures"] == []


async def test_of_two_operators_one_works_and_the_other_takes_over_when_it_stops(world: World):
    lease = {"lease_namespace": world.namespace, "lease_times": LEASE_TIMES}
    first = world.start_operator(settings={**lease, "identity": "first"})
    await world.wait_until(lambda: _is_held_by(world, "first"), "the first operator to lead")
    second = world.start_operator(settings={**lease, "identity": "second"})
    await world.apply_job("one")
    await world.wait_for_condition("Succeeded", name="one", timeout_seconds=120)
    leaders = [r.operator.metrics.registry.get_sample_value("rljob_operator_leader") for r in (first, second)]
    assert leaders == [1, 0]
    assert second.operator.metrics.registry.get_sample_value("rljob_operator_reconcile_total", {"result": "ok"}) == 0

    await first.stop()  # SIGTERM: the Lease is released, not left to expire
    assert await _read_holder(world) in ("", "second")
    await world.apply_job("two")
    await world.wait_for_condition("Succeeded", name="two", timeout_seconds=120)
    assert await _read_holder(world) == "second"
    created = world.envtest.list_created(resource="rayclusters", namespace=world.namespace)
    assert sorted(created) == ["one-1", "two-1"]


async def test_two_operators_at_once_without_a_lease_still_make_one_cluster_and_one_run(world: World):
    """Split brain: deterministic names and write-ahead make it harmless."""
    world.start_operator()
    world.start_operator()
    await world.apply_job()
    await world.wait_for_condition("Succeeded", timeout_seconds=120)
    await assert_one_cluster_and_one_run(world)


async def test_definitions_may_be_installed_after_the_operator(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """In namespaced mode, where the operator may not list definitions: first RLJob's comes, then KubeRay's."""

    async def kopf_has_looked() -> bool:
        return "Unresolved resources cannot be served" in caplog.text

    environment = await asyncio.to_thread(start_envtest, tmp_path)
    try:
        async with open_world(environment, with_kuberay=False) as world:
            world.start_operator(definition_poll_seconds=0.5)
            await world.wait_until(kopf_has_looked, "kopf to look for the kinds it watches")
            await asyncio.to_thread(apply_crd, environment, find_rljob_crd())
            await world.apply_job()
            job = await world.wait_for_job(
                lambda job: (find_condition(job, "ClusterReady") or {}).get("reason") == "KubeRayNotInstalled",
                "ClusterReady=False, KubeRayNotInstalled",
            )
            assert find_condition(job, "Failed")["status"] == "False"
            await world.install_kuberay()
            await world.wait_for_condition("Succeeded", timeout_seconds=120)
            await assert_one_cluster_and_one_run(world)
    finally:
        await asyncio.to_thread(environment.stop)


async def _read_holder(world: World) -> str | None:
    leases = await world.list_objects("apis/coordination.k8s.io/v1/leases")
    return leases[0]["spec"]["holderIdentity"] if leases else None


async def _is_held_by(world: World, identity: str) -> bool:
    return await _read_holder(world) == identity
