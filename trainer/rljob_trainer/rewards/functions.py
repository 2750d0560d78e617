"""One reward function on one sample: the code that runs in the scoring process.

This module and what it imports stay light (no pydantic, Ray or torch): a scoring process is started anew after every
time limit, and its start is time that the step waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rljob_trainer.rewards.gsm8k import judge_gsm8k
from rljob_trainer.rewards.outcome import BadReturnError, FailureKind, Score, ScoreFailure, ScoreRequest, read_score
from rljob_trainer.rewards.python_function import LoadFunctionError, call_function, load_function
from rljob_trainer.rewards.regex import judge_regex

GSM8K: Final = "GSM8K"
REGEX: Final = "Regex"
PYTHON: Final = "Python"
MATH: Final = "Math"
HTTP: Final = "Http"
MODEL: Final = "Model"
GOLD: Final = "Gold"
"""Not a reward: whether the Math reward can parse a gold answer."""
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class FunctionPlan:
    """One reward function, resolved."""

    name: str
    """Name in metrics, unique in the job."""
    field_path: str
    """For example `spec.reward.functions[0]`."""
    type: str
    """GSM8K, Math, Regex, Python, Http or Model."""
    weight: float
    """Factor in the sum."""
    timeout_seconds: float
    """Hard limit per sample (Http: per request, repetitions included)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Type-specific: flexible; pattern; path and function; the request of Http."""
    memory_bytes: int | None = None
    """Private memory the scoring process may use; None: no limit."""

    @property
    def needs_process(self) -> bool:
        """GSM8K runs in linear time on any text; Math, Regex and Python may run for ever."""
        return self.type in (MATH, REGEX, PYTHON, GOLD)

    @property
    def runs_in_worker(self) -> bool:
        """Http waits for a server and Model for a GPU, neither for a scoring worker."""
        return self.type == GSM8K or self.needs_process


def start_scoring_process(parent_pid: int, pid_of_process: Any, plans: Sequence[FunctionPlan]) -> None:
    """Tells the worker (through a shared integer) whom to watch and kill, dies with it, and loads what the functions
    need: seconds that belong to no sample's time limit."""
    pid_of_process.value = os.getpid()
    die_with_parent(parent_pid)
    for plan in plans:
        # What cannot be loaded is said by the first sample, with its traceback.
        with contextlib.suppress(Exception):
            if plan.type in (MATH, GOLD):
                from rljob_trainer.rewards.math_answers import warm_up

                warm_up()
            elif plan.type == PYTHON:
                _load_cached(plan.options["path"], plan.options["function"])


def die_with_parent(parent_pid: int) -> None:
    """Linux: have the kernel kill this process with its worker. A reward function in an endless loop would otherwise
    outlive a worker that was killed (and a whole run), holding a core."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the worker died before the line above


@functools.cache
def _load_cached(path: str, function: str) -> Callable[..., Any]:
    return load_function(path, function)


def run_function(plan: FunctionPlan, request: ScoreRequest) -> Score:
    """The score of one sample; raises whatever the function raises."""
    options = plan.options
    if plan.type == GSM8K:
        value, prediction = judge_gsm8k(request.response, request.answer, flexible=options["flexible"])
        return Score(value, prediction=prediction)
    if plan.type == MATH:
        from rljob_trainer.rewards.math_answers import score_math

        value, prediction = score_math(request.response, request.answer, flexible=options["flexible"])
        return Score(value, prediction=prediction)
    if plan.type == GOLD:
        from rljob_trainer.rewards.math_answers import describe_gold_problem

        problem = describe_gold_problem(request.answer)
        if problem is not None:
            raise BadReturnError(problem)
        return Score(1.0)
    if plan.type == REGEX:
        value, prediction = judge_regex(request.response, request.answer, options["pattern"])
        return Score(value, prediction=prediction)
    if plan.type == PYTHON:
        function = _load_cached(options["path"], options["function"])
        return read_score(call_function(function, request.prompt, request.response, request.answer, request.fields))
    raise NotImplementedError(f"{plan.field_path}.type: {plan.type} is refused before scoring starts")


def run_in_process(plan: FunctionPlan, request: ScoreRequest) -> Score | ScoreFailure:
    """Exceptions become plain data here: a user's exception class need not survive pickling."""
    try:
        return run_function(plan, request)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - becomes a typed failure of this sample
        return describe_exception(plan.name, error)


def describe_exception(function: str, error: BaseException) -> ScoreFailure:
    """An exception of a user's function as plain data."""
    kind = FailureKind.BAD_RETURN if isinstance(error, BadReturnError) else FailureKind.EXCEPTION
    if isinstance(error, MemoryError):
        kind = FailureKind.MEMORY
    message = (
        str(error) if isinstance(error, BadReturnError | LoadFunctionError) else f"{type(error).__name__}: {error}"
    )
    return ScoreFailure(kind, function, message, "".join(traceback.format_exception(error)))
