"""YAML for people: block style, keys in the order they were built, no anchors, long texts as blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def format_documents(documents: Iterable[dict[str, Any]]) -> str:
    """Several YAML documents as one stream that `kubectl apply -f -` reads."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)
