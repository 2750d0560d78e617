"""Failure reason -> policy: fail the job, or count the retry and say when it starts."""

from __future__ import annotations

from datetime import timedelta

from rljob_api.reasons import DEFAULT_ACTIONS
from rljob_api.v1alpha1.failure import FailureAction, FailurePolicy, FailureReason
from rljob_api.v1alpha1.status import ConditionType, FailureStatus
from rljob_operator.plan.backoff import compute_backoff_seconds
from rljob_operator.plan.classify import clip_evidence
from rljob_operator.plan.draft import Draft
from rljob_operator.plan.times import format_time
from rljob_operator.plan.types import EventType

MAX_FAILURES = 10


def choose_action(reason: FailureReason, policy: FailurePolicy) -> FailureAction:
    """The first matching rule of failurePolicy.rules, else the reason's default.

    A deadline is final whatever the rules say: a retry would be over it at once.
    """
    if reason == FailureReason.DEADLINE_EXCEEDED:
        return FailureAction.FAIL
    return next((rule.action for rule in policy.rules if rule.on_reason == reason), DEFAULT_ACTIONS[reason])


def handle_failure(draft: Draft, reason: FailureReason, evidence: str) -> None:
    """Record one failure, then fail the job or schedule the next attempt."""
    status, policy = draft.status, draft.policy
    evidence = clip_evidence(evidence)
    failure = FailureStatus(reason=reason.value, evidence=evidence, attempt=status.attempt, time=format_time(draft.now))
    status.failures = [*status.failures, failure][-MAX_FAILURES:]

    action = choose_action(reason, policy)
    retries = status.retries
    if action == FailureAction.FAIL:
        fail_job(draft, reason, evidence)
    elif action == FailureAction.RETRY and retries.counted >= policy.max_retries:
        fail_job(draft, reason, f"{evidence}; spec.failurePolicy.maxRetries = {policy.max_retries} is used up")
    elif action == FailureAction.RETRY_FREE and retries.free >= policy.max_free_retries:
        fail_job(draft, reason, f"{evidence}; spec.failurePolicy.maxFreeRetries = {policy.max_free_retries} is used up")
    else:
        _schedule_retry(draft, reason, evidence, is_free=action == FailureAction.RETRY_FREE)


def fail_job(draft: Draft, reason: FailureReason, message: str) -> None:
    """The job ends Failed; nothing is created for it any more."""
    draft.set(ConditionType.FAILED, "True", reason, message)
    draft.set(ConditionType.RUNNING, "False", "Failed", "the job has failed")
    draft.status.completion_time = format_time(draft.now)
    draft.status.next_attempt_time = None
    draft.record(EventType.WARNING, reason, f"job failed: {message}")


def _schedule_retry(draft: Draft, reason: FailureReason, evidence: str, *, is_free: bool) -> None:
    retries = draft.status.retries
    checkpoint_step = draft.status.checkpoint.step if draft.status.checkpoint is not None else 0
    has_progressed = checkpoint_step > retries.checkpoint_step
    retries.without_progress = 1 if has_progressed else retries.without_progress + 1
    retries.checkpoint_step = checkpoint_step
    if is_free:
        retries.free += 1
        count = f"free retry {retries.free} of {draft.policy.max_free_retries}"
    else:
        retries.counted += 1
        count = f"retry {retries.counted} of {draft.policy.max_retries}"
    delay = compute_backoff_seconds(draft.policy.backoff_seconds, retries.without_progress)
    draft.status.next_attempt_time = format_time(draft.now + timedelta(seconds=delay))
    draft.record(EventType.WARNING, reason, f"{evidence}; {count} in {delay} s, from checkpoint step {checkpoint_step}")
