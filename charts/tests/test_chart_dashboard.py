"""The dashboard: the rules of Grafana's dashboard-linter, valid PromQL, and only metrics that exist in the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from chart_tools import CHART, REPOSITORY, substitute_variables

DASHBOARD = json.loads((CHART / "files/dashboards/rljob.json").read_text())
RULES = yaml.safe_load((CHART / "files/rules/rljob.yaml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
every_target = pytest.mark.parametrize(
    "target", [target for _, target in TARGETS], ids=[f"{title} {target['refId']}" for title, target in TARGETS]
)


def iterate_selectors(node: promql_parser.Expr) -> Iterator[promql_parser.VectorSelector]:
    """Every vector selector below a node."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr):
            yield from iterate_selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from iterate_selectors(child)


def parse(expression: str) -> promql_parser.Expr:
    return promql_parser.parse(substitute_variables(expression))


def list_metrics(expression: str) -> set[str]:
    return {selector.name for selector in iterate_selectors(parse(expression))}


def test_generated_file_is_fresh() -> None:
    command = [sys.executable, str(REPOSITORY / "charts/tools/dashboard.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_dashboard_is_not_editable_and_has_a_stable_uid() -> None:
    assert DASHBOARD["editable"] is False
    assert DASHBOARD["uid"] == "rljob"


def test_template_variables() -> None:
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    assert set(VARIABLES) == {"datasource", "namespace", "name", "operator"}
    for name, variable in VARIABLES.items():
        assert variable["label"]
        if name == "datasource":
            continue
        assert variable["multi"] is True
        assert variable["allValue"] == ".+"
        assert variable["refresh"] == 2, "reload when the time range changes"
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["query"]["query"].startswith("label_values(")


@every_panel
def test_panel_rules(panel: dict[str, Any]) -> None:
    assert panel["title"].strip()
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(references) == len(set(references))


@every_target
def test_target_rules(target: dict[str, Any]) -> None:
    expression = target["expr"]
    assert target["datasource"]["uid"] == "${datasource}"
    assert target["legendFormat"]
    for window in re.findall(r"\[([^\]]+)\]", expression):
        assert window == "$__rate_interval", "a fixed window loses data when the scrape interval is longer"
    selectors = list(iterate_selectors(parse(expression)))
    assert sorted(selector.name for selector in selectors) == sorted(re.findall(r"rljob_\w+", expression))
    for selector in selectors:
        matchers = {matcher.name for matcher in selector.matchers.matchers}
        wanted = {"job"} if selector.name.startswith("rljob_operator_") else {"namespace", "name"}
        assert matchers >= wanted, f"{selector.name} ignores the dashboard's variables"


@every_target
def test_counters_are_rated_and_gauges_are_not(target: dict[str, Any]) -> None:
    expression = target["expr"]
    for name in list_metrics(expression):
        is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
        is_rated = bool(re.search(rf"(rate|increase)\({name}\{{", expression))
        assert is_counter == is_rated, name


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        for x in range(position["x"], position["x"] + position["w"]):
            for y in range(position["y"], position["y"] + position["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(identifiers) == len(set(identifiers))


def list_metrics_of_the_code() -> set[str]:
    from rljob_operator.adapters.metrics import JOB_METRICS, Metrics
    from rljob_trainer.telemetry.metrics import METRICS, PREFIX

    names = {PREFIX + metric.name for metric in METRICS} | {metric.name for metric in JOB_METRICS}
    for family in Metrics().registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_selector_of_an_alert_is_seen(rule: dict[str, Any]) -> None:
    assert list_metrics(rule["expr"]) == set(re.findall(r"rljob_\w+", rule["expr"]))


def test_every_metric_of_dashboard_and_alerts_exists_in_the_code() -> None:
    used = {name for _, target in TARGETS for name in list_metrics(target["expr"])}
    used |= {name for rule in ALERTS for name in list_metrics(rule["expr"])}
    for variable in VARIABLES.values():
        if isinstance(variable["query"], dict):
            used |= set(re.findall(r"rljob_\w+", variable["query"]["query"]))
    assert used - list_metrics_of_the_code() == set()


def test_every_metric_in_the_documentation_exists_in_the_code() -> None:
    text = (REPOSITORY / "docs/observability.md").read_text()
    named = set(re.findall(r"`(rljob_[a-z0-9_]+[a-z0-9])[`{]", text))
    assert named
    assert named - list_metrics_of_the_code() == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_rules(rule: dict[str, Any]) -> None:
    promql_parser.parse(rule["expr"])
    assert re.fullmatch(r"RLJob[A-Z][A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].rpartition("#")
    assert page.endswith("docs/observability.md")
    headings = re.findall(r"^#+ (.+)$", (REPOSITORY / "docs/observability.md").read_text(), re.MULTILINE)
    assert anchor in {heading.lower() for heading in headings}, "every alert has a section in the runbook"


def test_alert_rules_with_promtool(promtool_binary: str, tmp_path: Any) -> None:
    (tmp_path / "rules.yaml").write_text((CHART / "files/rules/rljob.yaml").read_text())
    (tmp_path / "tests.yaml").write_text((REPOSITORY / "charts/tests/rules_test.yaml").read_text())
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        result = subprocess.run(
            [promtool_binary, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
    tested = set(re.findall(r"alertname: (\w+)", (tmp_path / "tests.yaml").read_text()))
    assert tested == {rule["alert"] for rule in ALERTS}
