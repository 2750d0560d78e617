"""For tests of all parts: a small valid job, changed at paths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

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
