"""Read RLJobs strictly: every mistake becomes a `Finding` with its field path, the value and a value that works."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.explain import explain
from rljob_api.findings import Finding, FindingReason, make_error
from rljob_api.schema_paths import format_path
from rljob_api.v1alpha1.spec import API_VERSION, KIND, RLJob
from rljob_api.yaml_documents import LoadError, load_documents

__all__ = ["LoadError", "load_documents", "parse_job"]

_STATUS: Final = "status"
_TYPE_ERRORS: Final = frozenset(
    {"int_type", "float_type", "bool_type", "string_type", "list_type", "dict_type", "model_type", "enum"}
)
_MAX_DOCUMENT_BYTES: Final = 1_000_000
"""etcd takes 1.5 MiB; the child objects repeat parts of the spec (kubernetes #105863, kuberay #2027)."""


def parse_job(document: Mapping[str, Any]) -> tuple[RLJob | None, list[Finding]]:
    """Parse one document as the API server would, and say everything that is wrong with it.

    Numbers written as text are taken for number fields (`"1e-6"`, which is what YAML 1.1 readers make of `1e-6`);
    nothing else is converted: no booleans for numbers, no "yes" for true. A null is an absent field. Keys of
    `status` that this version does not know are left out, so that a job stored by a newer operator still loads.

    Returns:
        The job, or None when it has errors; and the findings, in document order.
    """
    findings = _check_envelope(document)
    if findings:
        return None, findings
    findings = list(_find_what_is_not_json(document, ()))
    if findings:
        return None, findings
    text = json.dumps(document, allow_nan=False)
    size = len(text.encode())
    if size > _MAX_DOCUMENT_BYTES:
        message = f"{size} bytes are too many, at most {_MAX_DOCUMENT_BYTES} fit; put large texts into a ConfigMap"
        return None, [make_error("spec", message)]
    candidate: dict[str, Any] = json.loads(text)
    job, errors = _validate(candidate)
    if job is None and _repair(candidate, errors):
        job, errors = _validate(candidate)
    return job, [explain(error, candidate) for error in errors]


def _find_what_is_not_json(value: Any, path: tuple[int | str, ...]) -> Iterator[Finding]:
    """Values that Kubernetes cannot store, for documents that do not come from `load_documents`."""
    match value:
        case Mapping():
            for key, inner in value.items():
                if not isinstance(key, str):
                    yield make_error(
                        format_path(path), f"key {key!r} is not text; quote it", FindingReason.INVALID_TYPE
                    )
                else:
                    yield from _find_what_is_not_json(inner, (*path, key))
        case list():
            for index, inner in enumerate(value):
                yield from _find_what_is_not_json(inner, (*path, index))
        case float() if not math.isfinite(value):
            yield make_error(format_path(path), f"{value} cannot be stored; use a finite number")
        case None | str() | int() | float():
            pass
        case _:
            message = f"{value!r} is {type(value).__name__}, not JSON; quote it"
            yield make_error(format_path(path), message, FindingReason.INVALID_TYPE)


def _check_envelope(document: Mapping[str, Any]) -> list[Finding]:
    findings: list[Finding] = []
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        value = document.get(key)
        if value is None:
            findings.append(make_error(key, f"required: {expected}", FindingReason.MISSING_FIELD))
        elif value != expected:
            findings.append(make_error(key, f"{value!r} is not known here; use {expected}"))
    return findings


def _validate(document: Mapping[str, Any]) -> tuple[RLJob | None, list[ErrorDetails]]:
    # JSON mode, since only there strict validation takes "GRPO" for an enum; by alias, since snake_case keys are
    # Python's names of the fields and unknown to Kubernetes.
    try:
        return RLJob.model_validate_json(json.dumps(document), strict=True, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _repair(document: dict[str, Any], errors: list[ErrorDetails]) -> bool:
    """Apply the conversions that are allowed, in place; whether there were any."""
    repaired = False
    for error in errors:
        path = error["loc"]
        if error["input"] is not None and error["type"] in ("int_type", "float_type", "int_from_float"):
            number = _read_number(error["input"])
            if number is not None:
                _locate_parent(document, path)[path[-1]] = number
                repaired = True
        elif error["type"] == "extra_forbidden" and path[0] == _STATUS:
            del _locate_parent(document, path)[path[-1]]
            repaired = True
        elif error["input"] is None and error["type"] in _TYPE_ERRORS and isinstance(path[-1], str):
            # `checkpoint:` with all its lines commented out; the API server drops nulls as well.
            del _locate_parent(document, path)[path[-1]]
            repaired = True
    return repaired


def _read_number(value: Any) -> int | float | None:
    """The number a text or an integral float stands for."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def _locate_parent(document: Any, path: tuple[int | str, ...]) -> Any:
    for part in path[:-1]:
        document = document[part]
    return document
