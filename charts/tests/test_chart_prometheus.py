"""A real Prometheus scrapes a real training run and a real operator, and every dashboard query returns data.

The run is the quickstart, shortened. The operator works on a real API server; behind it stands the fake KubeRay, since
this needs no pods.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from chart_tools import CHART, REPOSITORY, substitute_variables

from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.envtest_fixtures import envtest  # noqa: F401 - fixture
from rljob_operator.testing.world import World, open_world

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]

START_SECONDS = 60
RUN_SECONDS = 480
SCRAPE_SECONDS = 1
DASHBOARD = json.loads((CHART / "files/dashboards/rljob.json").read_text())
TARGETS = [
    (f"{panel['title']} {target['refId']}", target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]
# Long enough to be scraped several times, short enough for two busy cores.
RUN_SETTINGS = {
    "algorithm.type": "PPO",  # with a critic, so that its panel has data as well
    "training.totalSteps": 4,
    "training.promptsPerStep": 8,
    "cluster.ranksPerNode": 1,
    "warmStart.supervised.steps": 10,
    "evaluation.everySteps": 2,
    "evaluation.maxPrompts": 8,
    "checkpoint.everySteps": 2,
}


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fetch(url: str, timeout_seconds: float = 10) -> str:
    with urllib.request.urlopen(url, timeout=timeout_seconds) as response:
        return str(response.read().decode())


def wait_for(url: str, what: str, timeout_seconds: float, process: subprocess.Popen[Any] | None = None) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what} ended with {process.returncode} before it answered")
        try:
            fetch(url)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not answer at {url} within {timeout_seconds} s: {error}") from error
        time.sleep(0.2)


@contextmanager
def running(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in a file; ended at the end, by force if it must be."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


@contextmanager
def prometheus(binary: str, directory: Path, targets: dict[str, int]) -> Iterator[str]:
    """A Prometheus that scrapes these ports (job name -> port); its URL."""
    port = find_free_port()
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [
            # The series carry the namespace of the job they are about, as with the chart's PodMonitors.
            {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            for name, target in targets.items()
        ],
        "rule_files": [str(CHART / "files/rules/rljob.yaml")],
    }
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration))
    command = [
        binary,
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with running(command, directory / "prometheus.log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/-/ready", "Prometheus", START_SECONDS, process)
        yield url


def query_range(url: str, expression: str, start: float, end: float) -> dict[str, Any]:
    """The answer of the HTTP API, as Grafana asks for a panel."""
    parameters = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{SCRAPE_SECONDS}s"}
    answer: dict[str, Any] = json.loads(fetch(f"{url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"))
    return answer


def count_numbers(answer: dict[str, Any]) -> int:
    """Finite samples in an answer: a NaN draws nothing."""
    assert answer["status"] == "success", answer
    return sum(1 for series in answer["data"]["result"] for _, value in series["values"] if math.isfinite(float(value)))


@pytest_asyncio.fixture
async def world(envtest: Envtest) -> AsyncIterator[World]:  # noqa: F811
    async with open_world(envtest) as opened:
        yield opened


def start_training(directory: Path, port: int) -> Any:
    """`rljob run` of the quickstart, shortened, in a directory of its own."""
    assets = directory / "runs" / "quickstart-assets"
    subprocess.run([sys.executable, "-m", "rljob_trainer.quickstart", str(assets)], check=True, timeout=120)
    shutil.copy(REPOSITORY / "examples/quickstart.yaml", directory)
    settings = [word for name, value in RUN_SETTINGS.items() for word in ("--set", f"{name}={value}")]
    rljob = Path(sys.executable).with_name("rljob")
    command = [str(rljob), "run", "quickstart.yaml", "--port", str(port), *settings]
    return running(command, directory / "run.log", cwd=directory, env={**os.environ, "RAY_DEDUP_LOGS": "0"})


async def test_every_dashboard_query_returns_data(world: World, prometheus_binary: str, tmp_path: Path) -> None:
    operator_port, trainer_port = find_free_port(), find_free_port()
    targets = {"rljob-operator": operator_port, "rljob-trainer": trainer_port}
    start = time.time()
    with prometheus(prometheus_binary, tmp_path, targets) as url:
        world.start_operator(settings={"metrics_port": operator_port})
        # A GPU, so that there is GPU time to account for; its pods are made by the fake KubeRay.
        await world.apply_job(cluster={"nodes": 1, "gpusPerNode": 1, "ranksPerNode": 1})

        with start_training(tmp_path, trainer_port) as run:
            try:
                code = await asyncio.to_thread(run.wait, RUN_SECONDS)
            finally:
                print((tmp_path / "run.log").read_text()[-6000:])
            assert code == 0
        await world.wait_for_condition("Succeeded", timeout_seconds=120)
        await asyncio.sleep(5 * SCRAPE_SECONDS)

        end = time.time()
        answers = {
            name: count_numbers(
                await asyncio.to_thread(query_range, url, substitute_variables(expression, "30s"), start, end)
            )
            for name, expression in TARGETS
        }
        print(f"{len(answers)} queries, samples: {answers}")
        assert [name for name, count in answers.items() if count == 0] == []

        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] != "query":
                continue
            matched = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert matched is not None
            selector, label = substitute_variables(matched[1]), matched[2]
            parameters = {"match[]": selector, "start": start, "end": end}
            path = f"/api/v1/label/{label}/values?{urllib.parse.urlencode(parameters)}"
            values = json.loads(await asyncio.to_thread(fetch, url + path))["data"]
            assert values, f"the variable {variable['name']} is empty"

        rules = json.loads(await asyncio.to_thread(fetch, f"{url}/api/v1/rules"))["data"]["groups"]
        states = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
        assert set(states.values()) == {"ok"}, states
