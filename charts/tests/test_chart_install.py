"""The chart on a real API server: real helm, the smoke test's script, and the operator with only the chart's rights."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import urllib.error
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from chart_tools import CHART

from rljob_operator.testing.envtest import (
    Envtest,
    EnvtestUnavailableError,
    apply_crd,
    find_kuberay_crd,
    find_rljob_crd,
)
from rljob_operator.testing.envtest_fixtures import bare_envtest  # noqa: F401 - fixture
from rljob_operator.testing.world import World, open_world

pytestmark = pytest.mark.integration

NAMESPACE = "rljob-system"
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helm(helm_binary: str, bare_envtest: Envtest, tmp_path: Path) -> Helm:  # noqa: F811
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KUBECONFIG": str(bare_envtest.kubeconfig),
        **{f"HELM_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [helm_binary, "--namespace", NAMESPACE, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    return run


@pytest.fixture
def release(helm: Helm, bare_envtest: Envtest) -> Iterator[Envtest]:  # noqa: F811
    """The chart with its defaults, installed for one test."""
    helm("upgrade", "--install", "rljob", str(CHART), "--create-namespace")
    yield bare_envtest
    helm("uninstall", "rljob")


def get(server: Envtest, path: str) -> Any | None:
    try:
        return server.request("GET", path)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.rljob.io"
DEPLOYMENT_PATH = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/rljob"


def test_upgrade_changes_nothing_and_uninstall_keeps_the_definition(helm: Helm, release: Envtest) -> None:
    before = get(release, DEPLOYMENT_PATH)
    assert before is not None
    helm("upgrade", "rljob", str(CHART))
    after = get(release, DEPLOYMENT_PATH)
    assert after is not None
    assert after["metadata"]["generation"] == before["metadata"]["generation"]

    helm("uninstall", "rljob")
    assert get(release, DEPLOYMENT_PATH) is None
    assert get(release, CRD_PATH) is not None, "every RLJob of the cluster would go with it"
    # And the next installation takes the definition over.
    helm("upgrade", "--install", "rljob", str(CHART))


def run_smoke_test(
    server: Envtest, directory: Path, metrics_url: str | None = None
) -> subprocess.CompletedProcess[str]:
    account = directory / "account"
    account.mkdir()
    (account / "token").write_text(server.token)
    (account / "ca.crt").write_text(server.ca_path.read_text())
    script = (CHART / "files/tests/smoke.py").read_text()
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in script
    script = script.replace("/var/run/secrets/kubernetes.io/serviceaccount", str(account))
    address = urllib.parse.urlsplit(server.server)
    environment = {
        "KUBERNETES_SERVICE_HOST": str(address.hostname),
        "KUBERNETES_SERVICE_PORT": str(address.port),
        "NAMESPACE": NAMESPACE,
    }
    if metrics_url:
        environment["METRICS_URL"] = metrics_url
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=180, check=False
    )


def test_smoke_test_passes_where_the_chart_is_installed(release: Envtest, tmp_path: Path) -> None:
    result = run_smoke_test(release, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == 2


def test_smoke_test_fails_without_the_definition(helm: Helm, release: Envtest, tmp_path: Path) -> None:
    release.request("DELETE", CRD_PATH)
    result = run_smoke_test(release, tmp_path)
    assert result.returncode != 0
    assert "refused a valid RLJob" in result.stderr
    helm("upgrade", "rljob", str(CHART))


@pytest_asyncio.fixture
async def world(release: Envtest) -> AsyncIterator[World]:
    try:
        apply_crd(release, find_kuberay_crd())
        apply_crd(release, find_rljob_crd())
    except EnvtestUnavailableError as error:
        pytest.skip(str(error))
    async with open_world(release) as opened:
        yield opened


def write_account_kubeconfig(server: Envtest, account: str, path: Path) -> Path:
    """A kubeconfig with a real token of a ServiceAccount: RBAC applies."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token", request)
    certificate = base64.b64encode(server.ca_path.read_bytes()).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server.server, "certificate-authority-data": certificate}}],
        "users": [{"name": "test", "user": {"token": answer["status"]["token"]}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("scope", ["all namespaces", "one namespace"])
async def test_the_operator_works_with_the_rights_of_the_chart(
    world: World, helm: Helm, tmp_path: Path, scope: str
) -> None:
    """A job lives and dies while the operator has the ServiceAccount's token only: no right is missing."""
    if scope == "one namespace":
        helm("upgrade", "rljob", str(CHART), "--set", f"watchNamespaces={{{world.namespace}}}")
    kubeconfig = write_account_kubeconfig(world.envtest, "rljob", tmp_path / "kubeconfig")
    settings: dict[str, Any] = {"lease_namespace": NAMESPACE, "lease_name": "rljob"}
    if scope == "all namespaces":
        settings["namespaces"] = ()
    running = world.start_operator(kubeconfig=kubeconfig, settings=settings)
    await world.apply_job(ttlSecondsAfterFinished=1)
    await world.wait_for_condition("Succeeded", timeout_seconds=90)

    async def is_deleted() -> bool:
        return not await world.list_objects("apis/rljob.io/v1alpha1/rljobs")

    await world.wait_until(is_deleted, "the job to be deleted after its time to live")
    await running.stop()
    forbidden = {
        sample.labels["verb"]: sample.value
        for family in running.operator.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "rljob_operator_api_errors_total" and sample.labels["status"] == "403"
    }
    assert forbidden == {}
