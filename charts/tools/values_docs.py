#!/usr/bin/env python3
"""Generate the chart's values.schema.json and README.md from values.yaml.

A key's documentation is the `# -- ` comment above it; `# @schema` lines (JSON, joined) add what the default value
cannot say.
Every leaf needs a comment; an empty list or mapping needs a schema line, since its default tells nothing of its items.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "rljob"
DOC_PREFIX = "# -- "
SCHEMA_PREFIX = "# @schema "
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


class ValuesError(ValueError):
    """values.yaml breaks a rule of this generator."""


@dataclass
class Value:
    """One key of values.yaml."""

    path: str
    description: str
    schema: dict[str, Any]
    default: Any
    children: list[Value] = field(default_factory=list)

    @property
    def is_section(self) -> bool:
        """Whether the key only groups others."""
        return bool(self.children)


def read_comments(lines: list[str], line_number: int) -> tuple[str, dict[str, Any]]:
    """Documentation and schema from the comment block that ends above `line_number` (0-based)."""
    description, schema_text = "", ""
    for index in range(line_number - 1, -1, -1):
        line = lines[index].strip()
        if not line.startswith("#"):
            break
        if line.startswith(SCHEMA_PREFIX):
            schema_text = line.removeprefix(SCHEMA_PREFIX) + schema_text
        elif line.startswith(DOC_PREFIX):
            description = line.removeprefix(DOC_PREFIX)
            break
    return description, json.loads(schema_text or "{}")


def read_values(text: str) -> list[Value]:
    """Keys of values.yaml in file order."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValuesError("values.yaml must be a mapping")
    return _read_mapping(root, text.splitlines(), yaml.safe_load(text), "")


def _read_mapping(node: yaml.MappingNode, lines: list[str], defaults: dict[str, Any], prefix: str) -> list[Value]:
    values = []
    for key_node, value_node in node.value:
        path = f"{prefix}{key_node.value}"
        default = defaults[key_node.value]
        description, schema = read_comments(lines, key_node.start_mark.line)
        passthrough = schema.pop("passthrough", False)
        value = Value(path, description, schema, default)
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not passthrough:
            value.children = _read_mapping(value_node, lines, default, f"{path}.")
        elif not description:
            raise ValuesError(f"{path}: needs a `{DOC_PREFIX}` comment")
        elif default in ({}, []) and not schema and not passthrough:
            raise ValuesError(f"{path}: an empty {_TYPES[type(default)]} needs a `{SCHEMA_PREFIX}` comment")
        values.append(value)
    return values


def build_schema(values: list[Value], title: str) -> dict[str, Any]:
    """JSON Schema (draft 7) that refuses every key values.yaml does not have."""
    schema = _build_object(values)
    # Helm hands a parent chart's `global` to every subchart.
    schema["properties"]["global"] = {"type": "object", "description": "Values of a parent chart; unused"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **schema}


def _build_object(values: list[Value]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for value in values:
        name = value.path.rpartition(".")[2]
        if value.is_section:
            properties[name] = _build_object(value.children)
        else:
            properties[name] = {
                "type": _TYPES[type(value.default)],
                "description": value.description,
                "default": value.default,
                **value.schema,
            }
    # Defaults make every key present; only a `null` takes one away, and no template expects that.
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


def build_readme(values: list[Value], chart: dict[str, Any]) -> str:
    """Reference page of the chart."""
    lines = [
        "<!-- Generated from values.yaml by charts/tools/values_docs.py; do not edit. -->",
        "# rljob chart",
        "",
        f"{chart['description']}. Version {chart['version']}, Kubernetes `{chart['kubeVersion']}`.",
        "",
        "```bash",
        "helm install rljob charts/rljob --namespace rljob-system --create-namespace",
        "helm test rljob --namespace rljob-system",
        "```",
        "",
        "KubeRay (tested: 1.6.2) must be installed. Installation, upgrade and removal:",
        "[docs/install.md](../../docs/install.md).",
        "",
        "## Values",
        "",
        "| Key | Default | Meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{value.path}` | `{json.dumps(value.default)}` | {value.description.replace('|', chr(92) + '|')} |"
        for value in _walk_leaves(values)
    ]
    return "\n".join(lines) + "\n"


def _walk_leaves(values: list[Value]) -> list[Value]:
    return [leaf for value in values for leaf in (_walk_leaves(value.children) if value.is_section else [value])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a generated file is stale")
    arguments = parser.parse_args()
    values = read_values((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    outputs = {
        CHART / "values.schema.json": json.dumps(build_schema(values, "Values of the rljob chart"), indent=2) + "\n",
        CHART / "README.md": build_readme(values, chart),
    }
    stale = [path for path, text in outputs.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is stale: run `make generate`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(outputs[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
