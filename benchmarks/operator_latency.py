#!/usr/bin/env python3
"""How long from applying an RLJob to its RayCluster object: median of ten jobs whose pods cannot be scheduled.

Without KUBECONFIG: a fresh etcd + kube-apiserver and the operator as a process of its own. With KUBECONFIG: that
cluster, where an operator must already run (`--start-operator` starts one here instead).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from rljob_operator.adapters.kube import RAY_CLUSTERS, RLJOBS, Kube, load_configuration, make_client
from rljob_operator.testing.envtest import apply_crd, find_free_port, find_kuberay_crd, find_rljob_crd, start_envtest

LIMIT_SECONDS = 1.0
DEADLINE_SECONDS = 60.0

UNSCHEDULABLE = {"cpu": "100000"}
SPEC: dict[str, Any] = {
    "model": {"source": "/models/none"},
    "data": {"train": ["/data/none.jsonl"]},
    "reward": {"functions": [{"type": "GSM8K"}]},
    "rollout": {"engine": "Native", "samplesPerPrompt": 4},
    "training": {"promptsPerStep": 8, "totalSteps": 4},
    "checkpoint": {"storage": {"hostPath": "/mnt/none"}},
    "cluster": {
        "nodes": 2,
        "gpusPerNode": 0,
        "ranksPerNode": 1,
        "headResources": UNSCHEDULABLE,
        "workerResources": UNSCHEDULABLE,
    },
}


@asynccontextmanager
async def start_operator(kubeconfig: Path, namespace: str) -> AsyncIterator[None]:
    """The operator as a process, once it answers /healthz."""
    port = find_free_port()
    arguments = ["--namespace", namespace, "--kubeconfig", str(kubeconfig), "--health-port", str(port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rljob_operator", *arguments, "--metrics-port", "0", stderr=subprocess.DEVNULL
    )
    try:
        await wait_until_healthy(port, process)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def wait_until_healthy(port: int, process: asyncio.subprocess.Process) -> None:
    """Raises RuntimeError when the operator exits or stays silent."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise RuntimeError(f"the operator exited with {process.returncode}")
            try:
                async with session.get(f"http://127.0.0.1:{port}/healthz") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the operator was not healthy after {DEADLINE_SECONDS:.0f} s")


async def measure(kube: Kube, namespace: str, name: str) -> float:
    """Seconds from sending the RLJob to the watch event of its RayCluster."""
    path = f"{RAY_CLUSTERS.path(namespace)}?watch=1&labelSelector=rljob.io%2Fjob%3D{name}"
    document = {
        "apiVersion": RLJOBS.api_version,
        "kind": RLJOBS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": SPEC,
    }
    headers: dict[str, str] = {}
    async with kube.stream("GET", path, headers=headers, timeout_seconds=DEADLINE_SECONDS) as response:
        response.raise_for_status()
        started = time.perf_counter()
        await kube.create(document)
        async for line in response.content:
            if json.loads(line)["type"] == "ADDED":
                return time.perf_counter() - started
    raise RuntimeError(f"no RayCluster for RLJob {name} within {DEADLINE_SECONDS:.0f} s: is an operator running?")


async def run(kubeconfig: Path, num_jobs: int, *, with_operator: bool) -> list[float]:
    """The times, in seconds."""
    client = make_client(await load_configuration(kubeconfig), "rljob-benchmark")
    kube = Kube(client, request_timeout_seconds=30)
    namespace = f"rljob-latency-{uuid.uuid4().hex[:8]}"
    await kube.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    times: list[float] = []
    try:
        async with start_operator(kubeconfig, namespace) if with_operator else _nothing():
            await measure(kube, namespace, "warm-up")
            await kube.delete(RLJOBS, namespace, "warm-up")
            for number in range(num_jobs):
                name = f"latency-{number}"
                times.append(await measure(kube, namespace, name))
                await kube.delete(RLJOBS, namespace, name)
    finally:
        await kube.request("DELETE", f"/api/v1/namespaces/{namespace}", None)
        await client.close()
    return times


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def main() -> int:
    """Print the figures; exit 1 only when measuring failed: a figure over the limit is for people to judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10, help="RLJobs to measure")
    parser.add_argument("--start-operator", action="store_true", help="with KUBECONFIG: start an operator here")
    arguments = parser.parse_args()
    given = os.environ.get("KUBECONFIG")
    environment = None
    try:
        if given:
            kubeconfig, with_operator = Path(given), arguments.start_operator
        else:
            environment = start_envtest(Path(tempfile.mkdtemp(prefix="rljob-latency-")))
            for path in (find_rljob_crd(), find_kuberay_crd()):
                apply_crd(environment, path)
            kubeconfig, with_operator = environment.kubeconfig, True
        times = asyncio.run(run(kubeconfig, arguments.jobs, with_operator=with_operator))
    except (RuntimeError, aiohttp.ClientError) as error:
        print(f"operator_latency: {error}", file=sys.stderr)
        return 1
    finally:
        if environment is not None:
            environment.stop()
    median = statistics.median(times)
    print(f"apply -> RayCluster: median {median:.3f} s of {len(times)} (best {min(times):.3f}, worst {max(times):.3f})")
    print(f"limit {LIMIT_SECONDS:.1f} s, ratio {median / LIMIT_SECONDS:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
