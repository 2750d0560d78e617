"""Rules about `spec.data`, `spec.reward`, `spec.evaluation` and the length of the run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.quantity import parse_quantity
from rljob_api.rules.context import Rule, RuleContext, is_changed
from rljob_api.targets import Target
from rljob_api.v1alpha1.data import OnRewardError, RewardType

_FIELDS_OF_REWARD: Final[dict[str, tuple[str, frozenset[RewardType]]]] = {
    "path": ("path", frozenset({RewardType.PYTHON, RewardType.MODEL})),
    "function": ("function", frozenset({RewardType.PYTHON})),
    "pattern": ("pattern", frozenset({RewardType.REGEX})),
    "url": ("url", frozenset({RewardType.HTTP})),
    "batch_samples": ("batchSamples", frozenset({RewardType.HTTP})),
    "max_concurrent_requests": ("maxConcurrentRequests", frozenset({RewardType.HTTP})),
    "authorization_env": ("authorizationEnv", frozenset({RewardType.HTTP})),
    "memory": ("memory", frozenset({RewardType.MATH, RewardType.REGEX, RewardType.PYTHON})),
    "flexible": ("flexible", frozenset({RewardType.GSM8K, RewardType.MATH})),
}
_ZERO_OR_ONE: Final = frozenset({RewardType.GSM8K, RewardType.MATH, RewardType.REGEX})
MIN_REWARD_MEMORY: Final = 256 * 2**20
"""Python with SymPy or NumPy loaded is above 100 MiB before it scores anything."""
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
            if is_changed(function, name) and function.type not in types:
                yield make_error(
                    f"{path}.{alias}",
                    f"type {function.type} does not read it; remove it, or use type {sorted(types)[0]}",
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
        if function.memory is not None and parse_quantity(function.memory) < MIN_REWARD_MEMORY:
            yield make_error(
                f"{path}.memory",
                f"{function.memory} is less than a scoring process needs to start; use 256Mi or more, for example 1Gi",
            )
    if any(function.type is RewardType.MATH for function in functions) and (
        context.spec.reward.on_error is OnRewardError.FAIL_JOB
    ):
        yield make_warning(
            "spec.reward.onError",
            "FailJob lets one response end the job, with a formula that takes for ever (a tower of powers); with Math "
            "use DropSample",
        )
    if functions and all(function.weight == 0 for function in functions):
        yield make_error("spec.reward.functions[0].weight", "all weights are 0, so every reward is 0; for example 1.0")


def check_reward_urls(context: RuleContext) -> Iterable[Finding]:
    """Addresses of Http functions: http or https, IPv6 in brackets, no credentials in clear text."""
    for index, function in enumerate(context.spec.reward.functions):
        if function.url is None:
            continue
        path = f"spec.reward.functions[{index}].url"
        example = "for example http://reward.default.svc:8000/score"
        try:
            parts = urlsplit(function.url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            hint = "put an IPv6 address into brackets: http://[fd00::1]:8000/score"
            yield make_error(path, f"{function.url!r} is not an http address ({error}); {example}; {hint}")
            continue
        if parts.scheme not in ("http", "https") or not host or re.search(r"\s", function.url):
            yield make_error(path, f"{function.url!r} is not an http address; {example}")
        elif parts.username is not None or parts.password is not None:
            shown = function.url.replace(parts.netloc, parts.netloc.rpartition("@")[2])
            yield make_error(
                path,
                f"holds credentials, which everybody who reads the job would see; use {shown} and authorizationEnv: "
                "REWARD_AUTHORIZATION, set by spec.cluster.env with a secretKeyRef",
                FindingReason.CONFLICT,
            )


def check_secrets_from_environment(context: RuleContext) -> Iterable[Finding]:
    """Credentials come from the environment of the pods; a variable that nothing sets is found here, not at step 1."""
    cluster = context.spec.cluster
    templates = cluster.pod_template or cluster.head_pod_template or cluster.worker_pod_template
    if context.target is Target.LOCAL or cluster.env_from or templates:
        return  # the shell, a whole Secret, or a template may set it
    names = {variable.name for variable in cluster.env}
    needed: list[tuple[str, tuple[str, ...]]] = [
        (f"spec.reward.functions[{index}].authorizationEnv", (function.authorization_env,))
        for index, function in enumerate(context.spec.reward.functions)
        if function.authorization_env is not None
    ]
    if context.spec.tracking.wandb is not None:
        needed.append(("spec.tracking.wandb", ("WANDB_API_KEY", "WANDB_MODE")))
    for path, variables in needed:
        if not names.intersection(variables):
            yield make_warning(
                path,
                f"nothing sets {variables[0]} in the pods; for example spec.cluster.env: [{{name: {variables[0]}, "
                "valueFrom: {secretKeyRef: {name: my-secret, key: token}}}]",
            )


def check_pass_reward(context: RuleContext) -> Iterable[Finding]:
    """pass@k is 0 for ever when no sample can reach the reward that passes."""
    spec = context.spec
    functions = spec.reward.functions
    if spec.evaluation.samples_per_prompt == 1 or any(function.type not in _ZERO_OR_ONE for function in functions):
        return
    highest = sum(max(function.weight, 0.0) for function in functions)
    if spec.evaluation.pass_reward > highest:
        yield make_warning(
            "spec.evaluation.passReward",
            f"{spec.evaluation.pass_reward:g} is more than the highest reward {highest:g}, so pass@k is always 0; for "
            f"example {highest:g}",
        )


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
    check_reward_urls,
    check_secrets_from_environment,
    check_pass_reward,
    check_model_revision,
)
