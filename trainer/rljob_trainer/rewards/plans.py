"""Resolves `spec.reward.functions` into plans that a scoring process understands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, assert_never

from rljob_api.quantity import parse_quantity
from rljob_api.v1alpha1.data import Reward, RewardFunction, RewardType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.functions import FunctionPlan
from rljob_trainer.rewards.gsm8k import extract_gold

DEFAULT_MATH_MEMORY: Final = "1Gi"
"""SymPy itself needs about 100 MiB; a tower of powers takes whatever there is."""


def plan_functions(functions: list[RewardFunction], environment: Mapping[str, str] | None = None) -> list[FunctionPlan]:
    """Resolves names, paths and options. `environment` (default `os.environ`) must have what `authorizationEnv` names.

    Raises:
        ConfigurationError: a name used twice, or an option that its type needs is missing or unusable.
    """
    environment = os.environ if environment is None else environment
    plans: list[FunctionPlan] = []
    for number, function in enumerate(functions):
        place = f"spec.reward.functions[{number}]"
        name = function.name or function.type.value.lower()
        if any(plan.name == name for plan in plans):
            raise ConfigurationError(
                f"{place}.name: {name!r} is used twice; name them apart, for example {name}{number}"
            )
        options: dict[str, Any]
        match function.type:
            case RewardType.GSM8K | RewardType.MATH:
                options = {"flexible": function.flexible}
            case RewardType.REGEX:
                if function.pattern is None:
                    raise ConfigurationError(f"{place}.pattern is missing; for example 'answer is (-?[0-9]+)'")
                try:
                    re.compile(function.pattern)
                except re.error as error:
                    raise ConfigurationError(
                        f"{place}.pattern: {function.pattern!r} is no regular expression: {error}"
                    ) from error
                options = {"pattern": function.pattern}
            case RewardType.PYTHON:
                if function.path is None:
                    raise ConfigurationError(f"{place}.path is missing; name the Python file with the function")
                # Workers have other working directories than the driver.
                options = {"path": os.path.abspath(function.path), "function": function.function or "score"}
            case RewardType.MODEL:
                if function.path is None:
                    raise ConfigurationError(f"{place}.path is missing; name the reward model's directory")
                options = {"path": function.path}
            case RewardType.HTTP:
                options = _plan_request(function, place, environment)
            case _:
                assert_never(function.type)
        memory = function.memory or (DEFAULT_MATH_MEMORY if function.type is RewardType.MATH else None)
        plans.append(
            FunctionPlan(
                name,
                place,
                function.type.value,
                function.weight,
                float(function.timeout_seconds),
                options,
                None if memory is None else int(parse_quantity(memory)),
            )
        )
    return plans


def _plan_request(function: RewardFunction, place: str, environment: Mapping[str, str]) -> dict[str, Any]:
    if function.url is None:
        raise ConfigurationError(f"{place}.url is missing; for example http://reward.default.svc:8000/score")
    variable = function.authorization_env
    if variable is not None and not environment.get(variable):
        raise ConfigurationError(
            f"{place}.authorizationEnv: the environment has no {variable}; set it by spec.cluster.env with a "
            "secretKeyRef, or by spec.cluster.envFrom"
        )
    return {
        "url": function.url,
        "authorization_env": variable,
        "batch_samples": function.batch_samples,
        "max_concurrent_requests": function.max_concurrent_requests,
    }


AnswerCheck = Callable[[Any], str | None]


def make_answer_check(reward: Reward) -> AbstractContextManager[AnswerCheck | None]:
    """`check_answer` for `data.load_prompts`: why a gold answer cannot be compared, or None. Close it after loading.

    GSM8K and Math restrict gold answers: an unparsable one would score every response alike. Formulas are parsed in a
    scoring process, as responses are.
    """
    types = {function.type for function in reward.functions}
    if RewardType.MATH in types:
        from rljob_trainer.rewards.gold import MathAnswerCheck

        return MathAnswerCheck(check_gsm8k_answer if RewardType.GSM8K in types else None)
    return nullcontext(check_gsm8k_answer if RewardType.GSM8K in types else None)


def check_gsm8k_answer(answer: Any) -> str | None:
    """Why GSM8K cannot compare with this gold answer."""
    return None if extract_gold(answer) is not None else "gold answer holds no number (GSM8K reward)"
