"""YAML that means the same to Python and to Kubernetes.

PyYAML speaks YAML 1.1 (`1e-6` is text, `no` is false, `1:30` is 90, `012` is 10); kubectl and the API server read some
of these differently. Here numbers are YAML 1.2's, and a scalar that two readers understand differently is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any, Final

import yaml


class LoadError(ValueError):
    """The text is not usable YAML; the message names line and column."""


_INT: Final = re.compile(r"^[-+]?(0|[1-9][0-9]*)$")
_FLOAT: Final = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+|\.[0-9]+[eE][-+]?[0-9]+)$")
_BOOL: Final = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_NULL: Final = re.compile(r"^(~|null|Null|NULL|)$")
_NOT_JSON: Final = re.compile(r"^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_AMBIGUOUS: Final = re.compile(
    r"^(yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"  # booleans of YAML 1.1, text in YAML 1.2
    r"|[-+]?0[0-9]+"  # octal or decimal
    r"|[-+]?0[xob][0-9a-fA-F_]+"  # bases differ
    r"|[-+]?[0-9][0-9]*_[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?"  # digit groups
    r"|[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?)$"  # base 60
)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars, without duplicate keys."""

    # A fresh table: add_implicit_resolver would otherwise change SafeLoader for everybody.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _mark(key_node, f"key {key_node.value!r} is not text; quote it")
            line = key_node.start_mark.line + 1
            if key in lines:
                raise _mark(key_node, f"key {key!r} is there twice (first on line {lines[key]}); keep one")
            lines[key] = line
        return super().construct_mapping(node, deep)


def _mark(node: yaml.Node, message: str) -> LoadError:
    return LoadError(f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}: {message}")


def _construct_int(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _construct_float(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    number = float(loader.construct_scalar(node))
    if not math.isfinite(number):
        raise _mark(node, f"{node.value} is too large for a number")
    return number


def _refuse_ambiguous(loader: _StrictLoader, node: yaml.ScalarNode) -> Any:
    raise _mark(
        node,
        f"{node.value} means different things to different YAML readers; "
        f'write true or false, a plain decimal number, or quote it: "{node.value}"',
    )


def _refuse_not_json(loader: _StrictLoader, node: yaml.ScalarNode) -> Any:
    raise _mark(node, f"{node.value} cannot be stored by Kubernetes; use a finite number")


for _tag, _pattern in (
    ("tag:yaml.org,2002:null", _NULL),
    ("tag:yaml.org,2002:bool", _BOOL),
    ("tag:yaml.org,2002:int", _INT),
    ("tag:yaml.org,2002:float", _FLOAT),
    ("!ambiguous", _AMBIGUOUS),
    ("!not-json", _NOT_JSON),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$")),
):
    _StrictLoader.add_implicit_resolver(_tag, _pattern, None)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_StrictLoader.add_constructor("!ambiguous", _refuse_ambiguous)
_StrictLoader.add_constructor("!not-json", _refuse_not_json)


def load_documents(text: str) -> list[dict[str, Any]]:
    """All documents of a YAML (or JSON) text; empty ones are left out.

    Raises:
        LoadError: not YAML, a duplicate key, an ambiguous scalar, or a document that is not a mapping.
    """
    try:
        documents = list(yaml.load_all(text, Loader=_StrictLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise LoadError(f"{where}not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise LoadError(f"not YAML: {error}") from error
    for number, document in enumerate(documents, start=1):
        if document is not None and not isinstance(document, dict):
            raise LoadError(f"document {number} is {type(document).__name__}, not a mapping with apiVersion and kind")
    return [document for document in documents if document]
