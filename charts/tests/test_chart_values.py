"""values.yaml: refused values, generated files, and no key without a use."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from chart_tools import CHART, REPOSITORY

RunHelm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("arguments", "want_message"),
    [
        (["--set", "replica=1"], "'replica' not allowed"),
        (["--set", "image.tags=1"], "'tags' not allowed"),
        (["--set", "metrics.podMonitor.enable=true"], "'enable' not allowed"),
        (["--set", "crds.enabled=maybe"], "/crds/enabled"),
        (["--set-string", "replicas=two"], "/replicas"),
        (["--set", "replicas=-1"], "/replicas"),
        (["--set", "image.tag=latest"], "/image/tag"),
        (["--set", "image.digest=sha256:abc"], "/image/digest"),
        (["--set", "image.pullPolicy=Sometimes"], "/image/pullPolicy"),
        (["--set", "clusterAccess=direct"], "/clusterAccess"),
        (["--set", "ipFamily=DualStack"], "/ipFamily"),
        (["--set", "watchNamespaces={Team_A}"], "/watchNamespaces"),
        (["--set", "watchNamespaces={a,a}"], "/watchNamespaces"),
        (["--set", "imageCatalogue[0].engine=TensorRT"], "/imageCatalogue/0"),
        (["--set", "extraEnv[0].name=POD_NAME"], "/extraEnv/0/name"),
        (["--set", "extraEnv[0].name=POD_IPS"], "/extraEnv/0/name"),
        (["--set", "extraVolumes[0].name=tmp"], "/extraVolumes/0/name"),
        (["--set", "metrics.podMonitor.interval=15"], "/metrics/podMonitor/interval"),
        (["--set", "metrics.port=80"], "/metrics/port"),
        (["--set", "networkPolicy.apiServerPorts=null"], "apiServerPorts"),
        (["--set", "lease.durationSeconds=10"], "must be greater than renewDeadlineSeconds (10)"),
        (["--set", "lease.retrySeconds=12"], "greater than twice retrySeconds (12)"),
        (["--set", "lease.retrySeconds=5"], "(10), and that greater than twice retrySeconds (5)"),
        (["--set", "lease.durationSeconds=3"], "/lease/durationSeconds"),
        (["--set", "health.port=8080"], "metrics.port and health.port are both 8080"),
        (
            ["--set", "imageCatalogue[0].engine=SGLang,imageCatalogue[0].image=i,imageCatalogue[0].rayVersion=2.60.0"],
            "engineVersion",
        ),
        (["--set-string", "imageCatalogue[0].pythonVersion=python3.11"], "/imageCatalogue/0"),
        (["--set-string", "imageCatalogue[0].cudaVersion=12"], "/imageCatalogue/0"),
        (["--set", "serviceAccount.create=false"], "serviceAccount.name must name an existing ServiceAccount"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_by_name(run_helm: RunHelm, arguments: list[str], want_message: str) -> None:
    result = run_helm("template", "rljob", str(CHART), *arguments)
    assert result.returncode != 0
    assert want_message in result.stderr


def test_generated_files_are_fresh() -> None:
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "charts/tools/values_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_schema_accepts_the_defaults_and_is_itself_valid() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()), schema)


def iterate_leaf_paths(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]

    def walk(node: dict[str, Any], path: str) -> Iterator[str]:
        for name, child in node.items():
            if child.get("additionalProperties") is False and "properties" in child:
                yield from walk(child["properties"], f"{path}{name}.")
            elif f"{path}{name}" != "global":
                yield f"{path}{name}"

    yield from walk(schema, prefix)


def test_every_value_is_used_and_every_used_value_exists() -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    # Templates shorten long paths once at the top of a file.
    templates = templates.replace("$monitor.", ".Values.metrics.podMonitor.").replace("$image.", ".Values.image.")
    used = set(re.findall(r"\.Values\.([A-Za-z0-9.]+)", templates))
    leaves = set(iterate_leaf_paths({}))
    assert leaves - used == set(), "values without a use"
    sections = {leaf.rpartition(".")[0] for leaf in leaves} | {"metrics.podMonitor", "lease"}
    assert used - leaves - sections == set(), "templates use values that values.yaml does not have"


def test_names_are_camel_case() -> None:
    for path in iterate_leaf_paths({}):
        for part in path.split("."):
            assert re.fullmatch(r"[a-z][a-zA-Z0-9]*", part), path
