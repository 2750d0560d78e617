#!/usr/bin/env python3
"""Write charts/rljob/files/dashboards/rljob.json from the table in panels.py."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from panels import ROWS, Panel, Row

OUTPUT = Path(__file__).resolve().parents[1] / "rljob" / "files" / "dashboards" / "rljob.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Either source alone is enough: a local run has no operator, an ended job no trainer.
JOB_SERIES = '{__name__=~"rljob_step|rljob_job_attempt"%s}'
NUM_COLUMNS = 24
PANEL_HEIGHT, STAT_HEIGHT = 8, 4


def build_variables() -> list[dict[str, Any]]:
    """Data source, namespace, job and operator; all reload when the time range changes."""

    def query_variable(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": f"variable-{name}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "default", "value": "default"},
        },
        query_variable("namespace", "Namespace", f"label_values({JOB_SERIES % ''}, namespace)"),
        query_variable("name", "Job", "label_values(%s, name)" % (JOB_SERIES % ', namespace=~"$namespace"')),
        query_variable("operator", "Operator", "label_values(rljob_operator_build_info, job)"),
    ]


def build_panel(panel: Panel, panel_id: int, x: int, y: int) -> dict[str, Any]:
    """One Grafana panel."""
    document: dict[str, Any] = {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel_height(panel)},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for index, query in enumerate(panel.queries)
        ],
    }
    if panel.kind == "stat":
        document["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    else:
        document["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        # NaN is a fact (no sample in the step), not a gap to bridge.
        custom: dict[str, Any] = {"lineWidth": 1, "spanNulls": False, "showPoints": "auto"}
        if panel.stacked:
            custom |= {"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}
        document["fieldConfig"]["defaults"]["custom"] = custom
    return document


def panel_height(panel: Panel) -> int:
    """Grid rows."""
    return STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT


def build_panels(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Panels from left to right, wrapped at the dashboard's width."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": NUM_COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x, height = 0, 0
        for panel in row.panels:
            if x + panel.width > NUM_COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(build_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel_height(panel))
        y += height
    return panels


def build_dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    return {
        "uid": "rljob",
        "title": "RLJob",
        "description": "RL post-training runs: reward, speed, where a step's time goes, retries, and the operator.",
        "tags": ["rljob", "reinforcement-learning", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": build_variables()},
        "panels": build_panels(ROWS),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the dashboard is stale")
    arguments = parser.parse_args()
    text = json.dumps(build_dashboard(), indent=1) + "\n"
    if OUTPUT.exists() and OUTPUT.read_text() == text:
        return 0
    if arguments.check:
        print(f"{OUTPUT.name} is stale: run `make generate`", file=sys.stderr)
        return 1
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
