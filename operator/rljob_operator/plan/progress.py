"""The trainer's report goes into the status: at most every 15 seconds, at once when it matters."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.contract import Progress
from rljob_api.v1alpha1.status import AttemptStatus, CheckpointStatus, ConditionType, ProgressStatus
from rljob_operator.plan.draft import Draft
from rljob_operator.plan.times import compute_elapsed_seconds
from rljob_operator.plan.types import RayJobFound

PROGRESS_INTERVAL_SECONDS: Final = 15.0
"""Every write is an etcd revision and a watch event for all clients."""


def get_report(draft: Draft, attempt: AttemptStatus) -> Progress | None:
    """The newest report of this attempt: the final one from the log, else what the trainer serves.

    A report of another job or attempt is none: an address may be reused, and an old driver may still be up.
    """
    job, trainer = draft.observed.ray_job, draft.observed.trainer
    if isinstance(job, RayJobFound) and job.submission_id == attempt.submission_id and job.result is not None:
        return job.result.progress
    if isinstance(trainer, Progress) and trainer.job_uid == draft.observed.uid and trainer.attempt == attempt.number:
        return trainer
    return None


def measure_silence_seconds(draft: Draft, attempt: AttemptStatus, report: Progress | None) -> float:
    """Seconds since a heartbeat with a new value was seen.

    Changes are timed by our clock; the heartbeat's own time is only compared for equality, so that clock skew between
    nodes is never a stall. After a restart the wait begins again.
    """
    heartbeat = draft.heartbeat if report is None else f"{attempt.number}/{report.phase}/{report.heartbeat_time}"
    if draft.heartbeat_seen_time is None or heartbeat != draft.heartbeat:
        draft.heartbeat, draft.heartbeat_seen_time = heartbeat, draft.now
    return compute_elapsed_seconds(draft.heartbeat_seen_time, draft.now)


def write_report(draft: Draft, attempt: AttemptStatus, report: Progress) -> None:
    """Take the report over: progress, newest checkpoint, where the attempt resumed."""
    draft.status.progress = round_statistics(report.progress)
    attempt.resumed_from_step = report.resumed_from_step
    newest = pick_newer_checkpoint(draft.status.checkpoint, report.checkpoint)
    if newest is None:
        return
    draft.status.checkpoint = newest
    # Not the step: a condition that moves with every checkpoint would be a transition each time, not progress.
    message = "a complete checkpoint is on the volume: see status.checkpoint"
    draft.set(ConditionType.CHECKPOINT_AVAILABLE, "True", "CheckpointPublished", message)


def round_statistics(progress: ProgressStatus) -> ProgressStatus:
    """Four significant digits: the status is for people and its columns print what is stored."""

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shorten(item) for key, item in value.items()}
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return ProgressStatus.model_validate(shorten(progress.model_dump()))


def write_report_if_due(draft: Draft) -> None:
    """Last step of every plan: the report goes along with any other change, alone only every 15 seconds."""
    attempt = draft.open_attempt
    report = get_report(draft, attempt) if attempt is not None else None
    if attempt is None or report is None or not _is_news(draft, attempt, report):
        return
    last = draft.progress_written_time
    wait = 0.0 if last is None else PROGRESS_INTERVAL_SECONDS - compute_elapsed_seconds(last, draft.now)
    progress = report.progress
    is_last_step = progress.total_steps is not None and progress.step >= progress.total_steps
    if wait <= 0 or is_last_step or draft.status != draft.observed.status:
        write_report(draft, attempt, report)
        draft.progress_written_time = draft.now
    else:
        draft.wake(wait)


def pick_newer_checkpoint(known: CheckpointStatus | None, reported: CheckpointStatus | None) -> CheckpointStatus | None:
    """The one with the higher step: a fresh attempt may report before it has looked at the volume."""
    if known is None or reported is None:
        return known or reported
    return reported if reported.step >= known.step else known


def _is_news(draft: Draft, attempt: AttemptStatus, report: Progress) -> bool:
    return (
        report.progress != draft.status.progress
        or report.resumed_from_step != attempt.resumed_from_step
        or pick_newer_checkpoint(draft.status.checkpoint, report.checkpoint) != draft.status.checkpoint
    )
