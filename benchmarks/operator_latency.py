#!/usr/bin/env python3
"""How long from applying an RLJob to its RayCluster object, for jobs whose pods cannot be scheduled.

One after the other (median of ten), then a hundred at once (95th percentile).

Without KUBECONFIG: a fresh etcd + kube-apiserver and the operator as a process of its own. With KUBECONFIG: that
cluster, where an operator must already run (`--start-operator` starts one here instead).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
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

from rljob_operator.adapters.kube import RAY_CLUSTERS, RLJOBS, Kube, KubeError, load_configuration, make_client
from rljob_operator.testing.envtest import (
    EnvtestUnavailableError,
    apply_crd,
    find_free_port,
    find_kuberay_crd,
    find_rljob_crd,
    start_envtest,
)

LIMIT_SECONDS = 1.0
BURST_LIMIT_SECONDS = 60.0
DEADLINE_SECONDS = 120.0

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


async def measure(kube: Kube, namespace: str, names: list[str]) -> list[float]:
    """Seconds from sending all these RLJobs at once to the watch event of each one's RayCluster."""
    path = f"{RAY_CLUSTERS.path(namespace)}?watch=1&labelSelector=rljob.io%2Fjob"
    started = time.perf_counter()
    seen: dict[str, float] = {}
    async with kube.stream("GET", path, headers={}, timeout_seconds=DEADLINE_SECONDS) as response:
        response.raise_for_status()
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(kube.create(build_job(namespace, name)))
            async for line in response.content:
                event = json.loads(line)
                name = event["object"]["metadata"]["labels"]["rljob.io/job"]
                if event["type"] == "ADDED" and name in names:
                    seen.setdefault(name, time.perf_counter() - started)
                if len(seen) == len(names):
                    return list(seen.values())
    missing = sorted(set(names) - set(seen))
    raise RuntimeError(f"no RayCluster for {missing} within {DEADLINE_SECONDS:.0f} s: is an operator running?")


def build_job(namespace: str, name: str) -> dict[str, Any]:
    """The RLJob document."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": RLJOBS.api_version, "kind": RLJOBS.kind, "metadata": metadata, "spec": SPEC}


async def run(
    kubeconfig: Path, num_jobs: int, num_burst: int, *, with_operator: bool
) -> tuple[list[float], list[float]]:
    """Times one after the other and of the burst, in seconds."""
    client = make_client(await load_configuration(kubeconfig), "rljob-benchmark")
    kube = Kube(client, request_timeout_seconds=30)
    namespace = f"rljob-latency-{uuid.uuid4().hex[:8]}"
    await kube.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    times: list[float] = []
    burst: list[float] = []
    try:
        async with start_operator(kubeconfig, namespace) if with_operator else _nothing():
            for name in ["warm-up", *(f"latency-{number}" for number in range(num_jobs))]:
                times += await measure(kube, namespace, [name])
                await kube.delete(RLJOBS, namespace, name)
            if num_burst:
                burst = await measure(kube, namespace, [f"burst-{number}" for number in range(num_burst)])
    finally:
        await kube.request("DELETE", f"/api/v1/namespaces/{namespace}", None)
        await client.close()
    return times[1:], burst


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def main() -> int:
    """Print the figures; exit 1 only when measuring failed: a figure over the limit is for people to judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10, help="RLJobs to measure one after the other")
    parser.add_argument("--burst", type=int, default=100, help="RLJobs applied at once; 0 leaves this out")
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
        times, burst = asyncio.run(run(kubeconfig, arguments.jobs, arguments.burst, with_operator=with_operator))
    except (RuntimeError, TimeoutError, KubeError, EnvtestUnavailableError, aiohttp.ClientError) as error:
        print(f"operator_latency: {error}", file=sys.stderr)
        return 1
    finally:
        if environment is not None:
            environment.stop()
    median = statistics.median(times)
    print(f"apply -> RayCluster: median {median:.3f} s of {len(times)} (best {min(times):.3f}, worst {max(times):.3f})")
    print(f"limit {LIMIT_SECONDS:.1f} s, ratio {median / LIMIT_SECONDS:.2f}")
    if burst:
        p95 = sorted(burst)[math.ceil(0.95 * len(burst)) - 1]
        print(f"{len(burst)} at once: 95th percentile {p95:.2f} s, worst {max(burst):.2f} s")
        print(f"limit {BURST_LIMIT_SECONDS:.0f} s, ratio {p95 / BURST_LIMIT_SECONDS:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
