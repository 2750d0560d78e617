"""Fixtures of the cases: a cluster with the operator installed, assets on the claim, logs of failures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import make_assets_pod
from kubectl import Kubectl, KubectlError, condition, wait_until
from settings import Settings, load_settings

OPERATOR_NAMESPACE = "rljob-system"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    setattr(item, f"report_{call.when}", outcome.get_result())


@pytest.fixture(scope="session")
def settings() -> Settings:
    found = load_settings()
    if found is None:
        pytest.skip("KUBECONFIG is not set: run `make e2e`, or point KUBECONFIG at a cluster with KubeRay and RLJob")
    return found


@pytest.fixture(scope="session")
def kubectl(settings: Settings) -> Kubectl:
    client = Kubectl(settings.kubectl, settings.kubeconfig, settings.namespace)
    client.run("wait", "--for=condition=Established", "crd/rljobs.rljob.io", "--timeout=60s", timeout_seconds=90)
    return client


@pytest.fixture(scope="session")
def assets(settings: Settings, kubectl: Kubectl) -> None:
    """The quickstart's model and data on the claim."""
    pod = make_assets_pod(settings)
    kubectl.run("delete", "pod", pod["metadata"]["name"], "--ignore-not-found", "--wait", timeout_seconds=120)
    kubectl.apply(pod)

    def finished() -> bool:
        phase = (kubectl.get("pod", pod["metadata"]["name"]) or {}).get("status", {}).get("phase")
        assert phase != "Failed", kubectl.run("logs", pod["metadata"]["name"])
        return phase == "Succeeded"

    wait_until("quickstart assets made", finished, timeout_seconds=240)


@pytest.fixture
def submit(settings: Settings, kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Apply a job; at the end of the case it is deleted, and its logs are kept if the case failed."""
    names: list[str] = []

    def apply(job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        kubectl.run("delete", "rljob", name, "--ignore-not-found", "--wait", timeout_seconds=120)
        names.append(name)
        kubectl.apply(job)

    yield apply
    report = getattr(request.node, "report_call", None)
    for name in names:
        if report is not None and report.failed:
            keep_logs(settings, kubectl, name, request.node.name)
        kubectl.run("delete", "rljob", name, "--ignore-not-found", "--wait", timeout_seconds=120)
        wait_until(f"pods of {name} gone", lambda name=name: not pods(kubectl, name), timeout_seconds=180)


def pods(kubectl: Kubectl, name: str, role: str = "") -> list[dict[str, Any]]:
    """Pods of a job."""
    selector = f"rljob.io/job={name}" + (f",rljob.io/role={role}" if role else "")
    return kubectl.list("pods", selector)


def describe(kubectl: Kubectl, name: str) -> str:
    """One line on where a job stands, for the failure of a wait."""
    job = kubectl.get("rljob", name) or {}
    status = job.get("status", {})
    interesting = ("Validated", "ClusterReady", "Running", "Succeeded", "Failed", "Suspended")
    conditions = {
        kind: f"{found['status']}/{found['reason']}: {found.get('message', '')}"
        for kind in interesting
        if (found := condition(job, kind))
    }
    states = [f"{pod['metadata']['name']}={pod['status'].get('phase')}" for pod in pods(kubectl, name)]
    return f"phase {status.get('phase')}, progress {status.get('progress')}, {conditions}, pods {states}"


def wait_for_job(
    kubectl: Kubectl,
    name: str,
    what: str,
    probe: Callable[[dict[str, Any]], object],
    *,
    timeout_seconds: float,
    may_fail: bool = False,
) -> dict[str, Any]:
    """The job once `probe(job)` is truthy; a job that failed meanwhile ends the wait at once."""

    def reached() -> dict[str, Any] | None:
        job = kubectl.get("rljob", name)
        if job and probe(job):
            return job
        if not may_fail and condition(job, "Failed").get("status") == "True":
            raise AssertionError(f"{name} failed while waiting for {what}: {condition(job, 'Failed')}")
        return None

    return wait_until(
        f"{name}: {what}", reached, timeout_seconds=timeout_seconds, state=lambda: describe(kubectl, name)
    )


def wait_for_condition(kubectl: Kubectl, name: str, kind: str, *, timeout_seconds: float) -> dict[str, Any]:
    """The job once the condition is True."""
    return wait_for_job(
        kubectl,
        name,
        kind,
        lambda job: condition(job, kind).get("status") == "True",
        timeout_seconds=timeout_seconds,
        may_fail=kind == "Failed",
    )


def keep_logs(settings: Settings, kubectl: Kubectl, name: str, case: str) -> None:
    """Objects, events, pod logs and the operator's log of a failed case."""
    folder = settings.logs / case
    folder.mkdir(parents=True, exist_ok=True)

    def save(file: str, *words: str) -> None:
        try:
            text = kubectl.run(*words, timeout_seconds=60)
        except (KubectlError, subprocess.TimeoutExpired) as error:
            text = f"not available: {error}"
        Path(folder, file).write_text(text)

    save("rljob.yaml", "get", "rljob", name, "-o", "yaml")
    save("rayclusters.yaml", "get", "rayclusters", "-o", "yaml")
    save("pods.yaml", "get", "pods", "-o", "yaml")
    save("events.txt", "get", "events", "--sort-by=.lastTimestamp")
    for pod in pods(kubectl, name):
        save(f"{pod['metadata']['name']}.log", "logs", pod["metadata"]["name"], "--all-containers", "--tail=2000")
    selector = "app.kubernetes.io/name=rljob"
    save("operator.log", "logs", "--namespace", OPERATOR_NAMESPACE, "--selector", selector, "--tail=5000")
