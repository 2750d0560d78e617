"""For tests of all parts: a small valid job, changed at paths."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from rljob_api.crdgen.crd import build_crd
from rljob_api.load import parse_job
from rljob_api.v1alpha1 import RLJob

REMOVE = object()
"""As a value: take the key out."""

_SMALL: dict[str, Any] = {
    "apiVersion": "rljob.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "gsm8k-grpo", "namespace": "research"},
    "spec": {
        "model": {"source": "Qwen/Qwen3-8B"},
        "data": {"train": ["/data/train.jsonl"], "validation": ["/data/test.jsonl"]},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "training": {"totalSteps": 100},
        "checkpoint": {"storage": {"claimName": "checkpoints"}},
    },
}


def make_document(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A valid job with `{"rollout.topP": 0.9, "metadata.name": "x"}` set; paths are below spec by default."""
    document = copy.deepcopy(_SMALL)
    for path, value in (changes or {}).items():
        parts = path.split(".")
        if parts[0] not in ("metadata", "status", "apiVersion", "kind", "spec"):
            parts = ["spec", *parts]
        target = document
        for part in parts[:-1]:
            target = target.setdefault(part, {})
        if value is REMOVE:
            target.pop(parts[-1], None)
        else:
            target[parts[-1]] = copy.deepcopy(value)
    return document


def make_job(changes: Mapping[str, Any] | None = None) -> RLJob:
    """The same as a parsed job."""
    job, findings = parse_job(make_document(changes))
    assert job is not None, [finding.format() for finding in findings]
    return job


def list_schema_violations(document: Mapping[str, Any]) -> list[str]:
    """What the CRD's schema refuses in a document, unknown keys included; the CEL rules need a server."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(_build_strict_schema())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def get_schema() -> dict[str, Any]:
    """The CRD's OpenAPI schema."""
    schema: dict[str, Any] = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@functools.cache
def _build_strict_schema() -> dict[str, Any]:
    schema = _make_strict(get_schema())
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _make_strict(node: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI's boolean exclusive bounds as JSON Schema's numbers; no other properties."""
    strict = {key: value for key, value in node.items() if key not in ("properties", "items")}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if strict.get(exclusive) is True:
            strict[exclusive] = strict.pop(bound)
    if "properties" in node:
        strict["properties"] = {name: _make_strict(child) for name, child in node["properties"].items()}
        strict["additionalProperties"] = False
    if "items" in node:
        strict["items"] = _make_strict(node["items"])
    return strict
