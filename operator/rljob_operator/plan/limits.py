"""Time limits of a cluster and of an attempt. Every wait of the planner for the outside world ends here."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rljob_api.contract import Progress
from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import AttemptStatus, ConditionType
from rljob_operator.plan.classify import Ending, Outcome, describe_checkpoint
from rljob_operator.plan.draft import Draft
from rljob_operator.plan.progress import get_report, measure_silence_seconds
from rljob_operator.plan.times import compute_elapsed_seconds, parse_time
from rljob_operator.plan.types import RayJobFound, RayJobUnreachable, TrainerUnreachable

UNREACHABLE_TOLERANCE_SECONDS: Final = 300.0
"""A shorter outage of our path to the head changes nothing: the run may be healthy when we are not."""


def compute_running_seconds(draft: Draft) -> float:
    """Running time over all attempts: from submission to end, without queueing, backoff and suspension."""
    attempt = draft.open_attempt
    if attempt is None or attempt.start_time is None:
        return draft.status.active_seconds
    return draft.status.active_seconds + compute_elapsed_seconds(parse_time(attempt.start_time), draft.now)


def find_exceeded_deadline(draft: Draft) -> str | None:
    """Why the job is over its activeDeadlineSeconds, or None."""
    spec = draft.observed.spec
    if spec is None or spec.active_deadline_seconds is None:
        return None
    left = spec.active_deadline_seconds - compute_running_seconds(draft)
    if left <= 0:
        checkpoint = describe_checkpoint(draft.status.checkpoint)
        return f"the job has run for spec.activeDeadlineSeconds = {spec.active_deadline_seconds} s; {checkpoint}"
    if draft.open_attempt is not None:
        draft.wake(left)
    return None


def check_time_limits(draft: Draft, attempt: AttemptStatus) -> Ending | None:
    """The running attempt is over its deadline, never started, or makes no progress; None otherwise."""
    if (deadline := find_exceeded_deadline(draft)) is not None:
        return Ending(Outcome.FAILED, deadline, FailureReason.DEADLINE_EXCEEDED)
    report = get_report(draft, attempt)
    silence_seconds = measure_silence_seconds(draft, attempt, report)
    if report is None and not draft.was_running:
        message = _find_startup_timeout(draft, compute_startup_time(draft, attempt), "no heartbeat of the trainer")
        if message is None:
            return None
        return Ending(
            Outcome.FAILED, message + describe_outage(draft), FailureReason.STARTUP_TIMEOUT, is_cluster_lost=True
        )
    return _check_stall(draft, report, silence_seconds)


def check_cluster_startup(draft: Draft) -> str | None:
    """Why a cluster without an attempt is over startupTimeoutSeconds, or None."""
    return _find_startup_timeout(draft, compute_startup_time(draft, None), "the cluster did not become ready")


def compute_startup_time(draft: Draft, attempt: AttemptStatus | None) -> datetime:
    """Start of the start-up timeout: the cluster's beginning or admission, or the submission of a retry in place."""
    status = draft.status
    submissions = [a for a in status.attempts if a.ray_cluster == draft.cluster_name]
    if attempt is not None and attempt.start_time is not None and len(submissions) > 1:
        return parse_time(attempt.start_time)
    start = parse_time(status.cluster_start_time) if status.cluster_start_time is not None else draft.now
    admitted = draft.condition(ConditionType.ADMITTED)
    if admitted is None or admitted.status != "True":
        return draft.now
    return max(start, parse_time(admitted.last_transition_time))


def describe_outage(draft: Draft) -> str:
    """For messages: which address does not answer."""
    text = ""
    if isinstance(draft.observed.ray_job, RayJobUnreachable):
        text += f"; the Ray dashboard does not answer: {draft.observed.ray_job.error}"
    if isinstance(draft.observed.trainer, TrainerUnreachable):
        text += f"; the trainer's port does not answer: {draft.observed.trainer.error}"
    return text


def _find_startup_timeout(draft: Draft, start: datetime, what: str) -> str | None:
    limit_seconds = draft.policy.startup_timeout_seconds
    left = limit_seconds - compute_elapsed_seconds(start, draft.now)
    if left > 0:
        draft.wake(left)
        return None
    return f"{what} within {limit_seconds} s (spec.failurePolicy.startupTimeoutSeconds)"


def _check_stall(draft: Draft, report: Progress | None, silence_seconds: float) -> Ending | None:
    job, spec = draft.observed.ray_job, draft.observed.spec
    limit_seconds = float(draft.policy.stall_timeout_seconds)
    if isinstance(job, RayJobUnreachable):
        limit_seconds = max(limit_seconds, UNREACHABLE_TOLERANCE_SECONDS)
    if spec is not None and spec.trainer is not None:
        # Another trainer reports no progress: only an outage of Ray itself can be measured.
        if isinstance(job, RayJobFound):
            return None
        silence_seconds = draft.measure("outage")
    left = limit_seconds - silence_seconds
    if left > 0:
        draft.wake(left)
        return None
    phase = f" in phase {report.phase}" if report is not None else ""
    message = f"no progress for {limit_seconds:.0f} s{phase} (spec.failurePolicy.stallTimeoutSeconds)"
    return Ending(Outcome.FAILED, message + describe_outage(draft), FailureReason.NO_PROGRESS)
