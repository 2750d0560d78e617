"""Fixtures of the chart tests: the real helm and Prometheus."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from chart_tools import CHART, find_tool

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.fixture(scope="session")
def helm_binary() -> str:
    return find_tool("helm", "tools-*/helm", "python e2e/cluster/toolchain.py tools")


@pytest.fixture(scope="session")
def prometheus_binary() -> str:
    return find_tool("prometheus", "prometheus-debian/prometheus", "python e2e/cluster/toolchain.py prometheus")


@pytest.fixture(scope="session")
def promtool_binary() -> str:
    return find_tool("promtool", "prometheus-debian/promtool", "python e2e/cluster/toolchain.py prometheus")


@pytest.fixture(scope="session")
def run_helm(
    helm_binary: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    home = tmp_path_factory.mktemp("helm-home")
    environment = {
        "PATH": os.environ["PATH"],
        # kubectl and helm cache what they discover below HOME, and in the working directory without one.
        "HOME": str(home),
        "HELM_CACHE_HOME": str(home),
        "HELM_CONFIG_HOME": str(home),
        "HELM_DATA_HOME": str(home),
        "KUBECONFIG": "/dev/null",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [helm_binary, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
        )

    return run


@pytest.fixture(scope="session")
def render(run_helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., list[dict[str, Any]]]:
    """`helm template`: objects of the chart for some `--set` arguments or values files."""

    cache: dict[tuple[str, ...], str] = {}

    def render_objects(*arguments: str, name: str = "rljob", cached: bool = True) -> list[dict[str, Any]]:
        key = (name, *arguments)
        if key not in cache or not cached:
            result = run_helm("template", name, str(CHART), "--namespace", "rljob-system", *arguments)
            assert result.returncode == 0, result.stderr
            cache[key] = result.stdout
        return [document for document in yaml.load_all(cache[key], Loader=LOADER) if document]

    return render_objects
