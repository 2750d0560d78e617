"""The operator as the process that the chart starts."""

from __future__ import annotations

import asyncio
import signal
import sys

import aiohttp
import pytest

from rljob_operator.testing.envtest import find_free_port
from rljob_operator.testing.world import World, find_condition

pytestmark = pytest.mark.integration


async def test_process_serves_works_and_leaves_cleanly_on_sigterm(world: World):
    health_port, metrics_port = find_free_port(), find_free_port()
    world.kuberay.unschedulable = True
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rljob_operator"),
        *("--namespace", world.namespace, "--kubeconfig", str(world.envtest.kubeconfig)),
        *("--lease-namespace", world.namespace, "--log-format", "json"),
        *("--health-port", str(health_port), "--metrics-port", str(metrics_port)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await world.apply_job()
        job = await world.wait_for_job(
            lambda job: job.get("status", {}).get("clusterGeneration") == 1, "a cluster", timeout_seconds=120
        )
        assert find_condition(job, "Validated")["status"] == "True"

        async def is_made() -> bool:  # the status is written before the cluster is made
            return len(await world.list_objects("apis/ray.io/v1/rayclusters")) == 1

        await world.wait_until(is_made, "the RayCluster")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{health_port}/healthz") as response:
                assert (response.status, await response.text()) == (200, "ok")
            async with session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response:
                metrics = await response.text()
        assert "rljob_operator_leader 1.0" in metrics
        assert f'rljob_job_cluster_generation{{name="tiny",namespace="{world.namespace}"}} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, log.decode()
    assert "Traceback" not in log.decode()
    assert '"message": "RLJob' in log.decode(), "actions are logged, as JSON lines"
    (lease,) = await world.list_objects("apis/coordination.k8s.io/v1/leases")
    assert lease["spec"]["holderIdentity"] == "", "a standby takes over at once"
    # What runs goes on without an operator: no finalizer holds the job, no child is touched.
    assert len(await world.list_objects("apis/ray.io/v1/rayclusters")) == 1
    await world.delete_job()


async def test_a_process_that_cannot_start_says_why_and_fails():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rljob_operator", "--all-namespaces", "--kubeconfig", "/nowhere/kubeconfig"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "/nowhere/kubeconfig" in log.decode()
