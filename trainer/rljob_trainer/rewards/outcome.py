"""The contract of what a reward function may return, and what scoring a sample yields."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any


class BadReturnError(TypeError):
    """A reward function returned something that is no score."""


@dataclass(frozen=True)
class Score:
    """What one reward function said about one sample."""

    value: float | None
    """None: the function gave no opinion (None, NaN or an infinity); the sample is left out."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of a returned mapping."""
    is_nan: bool = False
    """The value was NaN or infinite, which is left out too but counted on its own."""
    prediction: str | None = None
    """The answer found in the response, in a normal form: samples with the same one vote together (maj@k)."""


class FailureKind(StrEnum):
    """How scoring a sample failed."""

    EXCEPTION = "Exception"
    TIMEOUT = "Timeout"
    BAD_RETURN = "BadReturn"
    MEMORY = "Memory"
    PROCESS_DIED = "ProcessDied"
    HTTP = "Http"
    WORKER_LOST = "WorkerLost"
    DEADLINE = "Deadline"


@dataclass(frozen=True)
class ScoreFailure:
    """Why a sample has no reward although it should have one."""

    kind: FailureKind
    """What happened."""
    function: str
    """Name of the reward function (empty when the worker was lost before or after it)."""
    message: str
    """Exception type and text, or the time limit."""
    traceback: str = ""
    """Traceback of the user's code, if there is one."""


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score."""

    sample_id: str
    """Unique among the samples submitted and not yet collected."""
    prompt: str
    """Prompt text as sent to the engine."""
    response: str
    """Response text without special tokens."""
    answer: Any
    """Gold answer of the row."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The conversation behind `prompt` ({role, content}); empty for plain text."""


@dataclass(frozen=True)
class ScoreResult:
    """The reward of one sample, or why there is none."""

    sample_id: str
    """Of the request."""
    reward: float | None = 0.0
    """Weighted sum over the functions; None: leave the sample out of loss and baseline."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Function name -> unweighted score."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`<function>/<key>` -> further numbers of the functions."""
    failure: ScoreFailure | None = None
    """Set when a function failed (not when it declined)."""
    is_nan: bool = False
    """A function returned NaN or an infinity."""
    prediction: str | None = None
    """Of the first function that found an answer in the response."""


def add_outcome(result: ScoreResult, function: str, weight: float, outcome: Score | ScoreFailure) -> ScoreResult:
    """`result` with what one more function said: weighted sum, or the failure.

    A failed sample has no reward: a silent 0 keeps a run at reward 0.0 for days. The first failure stays.
    """
    if result.failure is not None:
        return result
    if isinstance(outcome, ScoreFailure):
        return replace(result, reward=None, failure=outcome)
    reward = None if result.reward is None or outcome.value is None else result.reward + weight * outcome.value
    return replace(
        result,
        reward=reward,
        scores={**result.scores, function: outcome.value},
        metrics={**result.metrics, **{f"{function}/{key}": value for key, value in outcome.metrics.items()}},
        is_nan=result.is_nan or outcome.is_nan,
        prediction=outcome.prediction if result.prediction is None else result.prediction,
    )


def read_score(returned: Any) -> Score:
    """Turns a reward function's return value into a score.

    Accepted: booleans, Python and numpy numbers, one-element arrays and tensors, Decimal, Fraction, a mapping with the
    key `score` (its other numeric entries become metrics, a text under `prediction` is the answer that votes), None (no
    opinion). NaN and infinities count as no opinion.

    Raises:
        BadReturnError: a string, a list, a complex number, a mapping without `score`, ...
    """
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise BadReturnError(f"returned a mapping without 'score' (keys {sorted(map(str, returned))})")
        value, is_nan = _read_number(returned["score"])
        prediction = returned.get("prediction")
        return Score(value, _read_metrics(returned), is_nan, prediction if isinstance(prediction, str) else None)
    value, is_nan = _read_number(returned)
    return Score(value, {}, is_nan)


def _read_number(returned: Any) -> tuple[float | None, bool]:
    if returned is None:
        return None, False
    if hasattr(returned, "item") and not isinstance(returned, numbers.Number):
        returned = _read_array(returned)
    # numpy scalars are registered as numbers.Real except numpy.bool_, which has `item` and came through above.
    if isinstance(returned, bool | numbers.Real | Decimal | Fraction):
        value = float(returned)
        return (value, False) if math.isfinite(value) else (None, True)
    raise BadReturnError(
        f"returned {returned!r:.80} of type {type(returned).__name__}; return a number, None, or a mapping with 'score'"
    )


def _read_array(returned: Any) -> Any:
    shape = tuple(getattr(returned, "shape", ()))
    if shape not in ((), (1,)):
        raise BadReturnError(f"returned an array of shape {shape}; return one number per call")
    return returned.item()


def _read_metrics(returned: Mapping[Any, Any]) -> dict[str, float]:
    """Numeric entries only; keys may differ from row to row."""
    metrics: dict[str, float] = {}
    for key, entry in returned.items():
        if key == "score":
            continue
        try:
            value, _ = _read_number(entry)
        except BadReturnError:
            continue
        if value is not None:
            metrics[str(key)] = value
    return metrics
