"""Golden vectors (an independent implementation's values and gradients), where they are available.

Accepted: the oracle's value unless it is marked wrong, its float64 value, the preferred value, or a listed alternative.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

SHARED = Path(os.environ.get("RLJOB_SHARED_DIR", Path(__file__).parents[4] / "shared"))
VECTORS = SHARED / "numerics"
RTOL, ATOL = 1e-5, 2e-6


def load_cases(family: str) -> list:
    path = VECTORS / f"{family}.json"
    if not path.exists():
        reason = f"no golden vectors at {path} (RLJOB_SHARED_DIR)"
        return [pytest.param(None, id=family, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(case, id=case["name"]) for case in json.loads(path.read_text())["cases"]]


def as_tensor(values, dtype=torch.float32) -> torch.Tensor:
    def convert(x):
        return [convert(y) for y in x] if isinstance(x, list) else float(x)

    return torch.tensor(convert(values), dtype=dtype)


def accepted(case: dict) -> list[dict]:
    question = case.get("question", {})
    choices = [] if question.get("verdict") == "wrong" or "error" in case["expected"] else [case["expected"]]
    choices += [case[key] for key in ("expected_f64",) if key in case]
    choices += [question["preferred"]] if question.get("preferred") else []
    choices += [choice["expected"] for choice in question.get("also_ok", [])]
    return choices


def assert_accepted(case: dict, got: dict[str, torch.Tensor], mask: torch.Tensor | None = None) -> None:
    """`got` must match every field that one accepted answer lists."""
    choices = accepted(case)
    assert choices, "the case lists no acceptable value"
    problems = []
    for choice in choices:
        wrong = []
        for key, value in got.items():
            if choice.get(key) is None:  # not listed, or undefined there
                continue
            want = as_tensor(choice[key], torch.float64)
            have = value.detach().double()
            if mask is not None and have.shape == mask.shape:
                want, have = want[mask], have[mask]
            if not torch.allclose(have, want, rtol=RTOL, atol=ATOL, equal_nan=True):
                wrong.append(f"{key}: got {have.tolist()}, want {want.tolist()}")
        if not wrong:
            return
        problems += wrong
    pytest.fail("\n".join(problems))
