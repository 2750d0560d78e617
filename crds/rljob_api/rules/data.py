"""Rules about `spec.data`, `spec.reward`, `spec.evaluation` and the length of the run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.rules.context import Rule, RuleContext, is_changed
from rljob_api.v1alpha1.data import RewardType

_FIELDS_OF_REWARD: Final[dict[str, tuple[str, frozenset[RewardType]]]] = {
    "path": ("path", frozenset({RewardType.PYTHON, RewardType.MODEL})),
    "function": ("function", frozenset({RewardType.PYTHON})),
    "pattern": ("pattern", frozenset({RewardType.REGEX})),
    "url": ("url", frozenset({RewardType.HTTP})),
}
_REQUIRED_OF_REWARD: Final[dict[RewardType, tuple[str, str]]] = {
    RewardType.PYTHON: ("path", "/code/reward.py"),
    RewardType.MODEL: ("path", "/models/reward-model"),
    RewardType.REGEX: ("pattern", r"answer is (-?\d+)"),
    RewardType.HTTP: ("url", "http://reward.default.svc:8000/score"),
}


def check_run_length(context: RuleContext) -> Iterable[Finding]:
    """Exactly one of steps and epochs."""
    training = context.spec.training
    if training.total_steps is None and training.total_epochs is None:
        yield make_error(
            "spec.training.totalSteps",
            "one of totalSteps and totalEpochs is required; for example totalSteps: 100",
            FindingReason.MISSING_FIELD,
        )
    if training.total_steps is not None and training.total_epochs is not None:
        yield make_error(
            "spec.training.totalEpochs",
            f"totalSteps ({training.total_steps}) and totalEpochs ({training.total_epochs}) exclude each other; "
            "keep one",
            FindingReason.CONFLICT,
        )
    if training.total_steps is not None and training.warmup_steps >= training.total_steps:
        yield make_warning(
            "spec.training.warmupSteps",
            f"{training.warmup_steps} of {training.total_steps} steps warm up, so the learning rate never reaches "
            f"learningRate; for example {training.total_steps // 10}",
        )


def check_data_files(context: RuleContext) -> Iterable[Finding]:
    """No file twice, no training file among the held-out ones."""
    data = context.spec.data
    for name, files in (("train", data.train), ("validation", data.validation)):
        for index, path in enumerate(files):
            if path in files[:index]:
                yield make_error(
                    f"spec.data.{name}[{index}]", f"{path} is listed twice; keep it once", FindingReason.CONFLICT
                )
    for index, path in enumerate(data.validation):
        if path in data.train:
            yield make_warning(
                f"spec.data.validation[{index}]", f"{path} is trained on as well; hold out other prompts"
            )
    if data.prompt_field == data.answer_field:
        yield make_error(
            "spec.data.answerField",
            f"{data.answer_field!r} is also promptField; name the column with the gold answer, for example answer",
            FindingReason.CONFLICT,
        )


def check_evaluation(context: RuleContext) -> Iterable[Finding]:
    """Evaluation that was asked for needs held-out prompts, and greedy samples are all the same."""
    spec = context.spec
    # Switching evaluation off is no wish for it.
    asked = {name for name in type(spec.evaluation).model_fields if is_changed(spec.evaluation, name)}
    if spec.evaluation.every_steps == 0:
        asked.discard("every_steps")
    if not spec.data.validation and asked - {"before_training"}:
        yield make_warning(
            "spec.evaluation",
            "has no effect without held-out prompts; set spec.data.validation, or remove spec.evaluation",
            FindingReason.NO_EFFECT,
        )
    if spec.evaluation.samples_per_prompt > 1 and spec.evaluation.temperature == 0:
        yield make_warning(
            "spec.evaluation.samplesPerPrompt",
            f"{spec.evaluation.samples_per_prompt} greedy samples are all the same; use 1, or temperature: 1.0",
        )


def check_reward_fields(context: RuleContext) -> Iterable[Finding]:
    """Every kind of reward function has its own fields, and no others."""
    names: dict[str, int] = {}
    for index, function in enumerate(context.spec.reward.functions):
        path = f"spec.reward.functions[{index}]"
        required = _REQUIRED_OF_REWARD.get(function.type)
        if required is not None and getattr(function, required[0]) is None:
            yield make_error(
                f"{path}.{required[0]}",
                f"required for type {function.type}; for example {required[1]}",
                FindingReason.MISSING_FIELD,
            )
        for name, (alias, types) in _FIELDS_OF_REWARD.items():
            if getattr(function, name) is not None and function.type not in types:
                yield make_error(
                    f"{path}.{alias}",
                    f"type {function.type} does not read it; remove it, or use type {sorted(types)[0]}",
                    FindingReason.CONFLICT,
                )
        if function.flexible and function.type is not RewardType.GSM8K:
            yield make_error(
                f"{path}.flexible",
                f"type {function.type} does not read it; remove it, or use type GSM8K",
                FindingReason.CONFLICT,
            )
        if function.name is not None and function.name in names:
            yield make_error(
                f"{path}.name",
                f"{function.name!r} is also the name of functions[{names[function.name]}]; use for example "
                f"{function.name}-2",
                FindingReason.CONFLICT,
            )
        if function.name is not None:
            names.setdefault(function.name, index)


def check_reward_values(context: RuleContext) -> Iterable[Finding]:
    """Patterns compile, function names and addresses are well formed, weights count."""
    functions = context.spec.reward.functions
    for index, function in enumerate(functions):
        path = f"spec.reward.functions[{index}]"
        if function.pattern is not None:
            try:
                re.compile(function.pattern)
            except re.error as error:
                yield make_error(
                    f"{path}.pattern",
                    f"{function.pattern!r} is not a regular expression: {error}; for example answer is (-?\\d+)",
                )
        if function.function is not None and not function.function.isidentifier():
            yield make_error(f"{path}.function", f"{function.function!r} is not a Python name; for example score")
        if function.url is not None and re.match(r"^https?://[^/\s]+", function.url) is None:
            yield make_error(
                f"{path}.url",
                f"{function.url!r} is not an http address; for example http://reward.default.svc:8000/score",
            )
    if functions and all(function.weight == 0 for function in functions):
        yield make_error("spec.reward.functions[0].weight", "all weights are 0, so every reward is 0; for example 1.0")


def check_model_revision(context: RuleContext) -> Iterable[Finding]:
    """Directories have no revision."""
    model = context.spec.model
    if model.revision is not None and model.source.startswith(("/", ".")):
        yield make_warning(
            "spec.model.revision",
            f"has no effect on the directory {model.source}; remove it, or use a Hugging Face model id",
            FindingReason.NO_EFFECT,
        )


DATA_RULES: Final[tuple[Rule, ...]] = (
    check_run_length,
    check_data_files,
    check_evaluation,
    check_reward_fields,
    check_reward_values,
    check_model_revision,
)
