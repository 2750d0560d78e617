"""Resolves `spec.reward.functions` into plans that a scoring process understands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from rljob_api.v1alpha1.data import Reward, RewardFunction, RewardType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.functions import FunctionPlan
from rljob_trainer.rewards.gsm8k import extract_gold


def plan_functions(functions: list[RewardFunction]) -> list[FunctionPlan]:
    """Resolves names, paths and options.

    Raises:
        ConfigurationError: a name used twice, or an option that its type needs is missing or unusable.
    """
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
            case RewardType.GSM8K:
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
            case _:
                raise ConfigurationError(
                    f"{place}.type: {function.type} is not supported yet (NotSupportedYet); use GSM8K, Regex or Python"
                )
        plans.append(
            FunctionPlan(name, place, function.type.value, function.weight, float(function.timeout_seconds), options)
        )
    return plans


def make_answer_check(reward: Reward) -> Callable[[Any], str | None] | None:
    """`check_answer` for `data.load_prompts`: why a gold answer cannot be compared, or None.

    Only GSM8K restricts gold answers: an unparsable one would score every response alike.
    """
    if all(function.type is not RewardType.GSM8K for function in reward.functions):
        return None

    def check(answer: Any) -> str | None:
        return None if extract_gold(answer) is not None else "gold answer holds no number (GSM8K reward)"

    return check
