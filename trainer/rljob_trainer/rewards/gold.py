"""Checks the gold answers of a Math reward before training; formulas in a scoring process."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from rljob_trainer.rewards.functions import GOLD, FunctionPlan
from rljob_trainer.rewards.math_answers import describe_gold_problem, needs_parser
from rljob_trainer.rewards.outcome import ScoreFailure, ScoreRequest
from rljob_trainer.rewards.scorer import Scorer

GOLD_TIMEOUT_SECONDS: Final = 20.0
GOLD_MEMORY_BYTES: Final = 2**30


class MathAnswerCheck:
    """Why a gold answer cannot be compared with anything, or None. A context manager; equal answers are parsed once."""

    def __init__(self, also: Callable[[Any], str | None] | None = None) -> None:
        """`also`: another reward's opinion, asked first."""
        self._also = also
        plan = FunctionPlan("gold", "spec.reward", GOLD, 1.0, GOLD_TIMEOUT_SECONDS, {}, GOLD_MEMORY_BYTES)
        self._scorer = Scorer([plan])
        self._known: dict[str, str | None] = {}

    def __call__(self, answer: Any) -> str | None:
        problem = self._also(answer) if self._also is not None else None
        if problem is not None:
            return problem
        if not needs_parser(answer):
            return describe_gold_problem(answer)
        key = str(answer)
        if key not in self._known:
            outcome = self._scorer.score(ScoreRequest("gold answer", "", "", answer))["gold"]
            # Found by the parser, not by a person: a limit hit here would be hit by every sample of the row.
            self._known[key] = outcome.message if isinstance(outcome, ScoreFailure) else None
        return self._known[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scorer.close()
