"""Rules about the object itself, deadlines and retries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.names import MAX_NAME_LENGTH, NAME_PATTERN
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.v1alpha1.failure import FailureAction


def check_name(context: RuleContext) -> Iterable[Finding]:
    """KubeRay's names are DNS-1035 labels of at most 53 characters; the RLJob's name is their stem."""
    name = context.job.metadata.get("name")
    if not isinstance(name, str) or not name:
        yield make_error("metadata.name", "required; for example gsm8k-grpo", FindingReason.MISSING_FIELD)
        return
    suggestion = suggest_name(name)
    if len(name) > MAX_NAME_LENGTH:
        yield make_error(
            "metadata.name",
            f"{name!r} has {len(name)} characters, at most {MAX_NAME_LENGTH} leave room for the names of the pods; "
            f"for example {suggestion}",
        )
    if re.match(NAME_PATTERN, name) is None:
        yield make_error(
            "metadata.name",
            f"{name!r} must start with a lower-case letter and hold only lower-case letters, digits and dashes "
            f"(DNS-1035, since Service names are made from it); for example {suggestion}",
        )


def suggest_name(name: str) -> str:
    """A valid name close to an invalid one."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not stem or not stem[0].isalpha():
        stem = f"rl-{stem}" if stem else "gsm8k-grpo"
    return stem[:MAX_NAME_LENGTH].rstrip("-")


def check_failure_rules(context: RuleContext) -> Iterable[Finding]:
    """The first rule of a reason wins, so a second one is never read."""
    policy = context.spec.failure_policy
    seen: dict[str, int] = {}
    for index, rule in enumerate(policy.rules):
        path = f"spec.failurePolicy.rules[{index}]"
        if rule.on_reason in seen:
            yield make_error(
                f"{path}.onReason",
                f"{rule.on_reason} already has rules[{seen[rule.on_reason]}], which wins; keep one of them",
                FindingReason.CONFLICT,
            )
        seen.setdefault(rule.on_reason, index)
        if rule.action is FailureAction.RETRY and policy.max_retries == 0:
            yield make_warning(
                f"{path}.action",
                "Retry never retries while spec.failurePolicy.maxRetries is 0; set maxRetries: 3 or action: RetryFree",
                FindingReason.NO_EFFECT,
            )


def check_deadlines(context: RuleContext) -> Iterable[Finding]:
    """A deadline that ends before the job can have started."""
    spec = context.spec
    deadline, startup = spec.active_deadline_seconds, spec.failure_policy.startup_timeout_seconds
    if deadline is not None and deadline < startup:
        yield make_warning(
            "spec.activeDeadlineSeconds",
            f"{deadline} is shorter than spec.failurePolicy.startupTimeoutSeconds ({startup}); the job may end before "
            f"its first step. Use at least {startup}",
        )


def check_ttl_keeps_debug_cluster(context: RuleContext) -> Iterable[Finding]:
    """Deleting the RLJob deletes its cluster too."""
    spec = context.spec
    ttl, keep = spec.ttl_seconds_after_finished, spec.keep_cluster_on_failure_seconds
    if ttl is not None and ttl < keep:
        yield make_warning(
            "spec.keepClusterOnFailureSeconds",
            f"{keep} is never reached: spec.ttlSecondsAfterFinished deletes the job and its cluster after {ttl} s; "
            f"set ttlSecondsAfterFinished to {keep} or more",
            FindingReason.CONFLICT,
        )


LIFECYCLE_RULES: Final[tuple[Rule, ...]] = (
    check_name,
    check_failure_rules,
    check_deadlines,
    check_ttl_keeps_debug_cluster,
)
