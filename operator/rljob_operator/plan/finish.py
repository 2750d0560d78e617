"""The quiet states: suspended and finished. Everything is given back."""

from __future__ import annotations

from rljob_api.v1alpha1.status import ConditionType
from rljob_operator.plan.attempt import REPEAT_SECONDS, stop_ray_job
from rljob_operator.plan.classify import RAY_JOB_ENDED, describe_checkpoint
from rljob_operator.plan.cluster import find_leftovers, release_cluster
from rljob_operator.plan.draft import Draft
from rljob_operator.plan.times import compute_elapsed_seconds, parse_time
from rljob_operator.plan.types import DeleteJob, EventType, RayJobFound, RayJobUnreachable


def hold_suspended(draft: Draft) -> None:
    """Release the cluster; Suspended is True once its pods are gone."""
    release_cluster(draft, "spec.suspend is true")
    if find_leftovers(draft) or draft.is_true(ConditionType.SUSPENDED):
        return
    message = f"suspended by spec.suspend; {describe_checkpoint(draft.status.checkpoint)}"
    draft.status.next_attempt_time = None
    draft.set(ConditionType.SUSPENDED, "True", "SuspendedByUser", message)
    draft.record(EventType.NORMAL, "Suspended", message)


def end_suspension(draft: Draft) -> None:
    """`spec.suspend` was taken back (or never set)."""
    if draft.is_true(ConditionType.SUSPENDED):
        draft.set(ConditionType.SUSPENDED, "False", "Resumed", "spec.suspend is false")
        draft.record(EventType.NORMAL, "Resumed", describe_checkpoint(draft.status.checkpoint))


def finish_job(draft: Draft) -> None:
    """Release the cluster of a finished job, at once or after keepClusterOnFailureSeconds, and the job after its TTL.

    Terminal is terminal: whatever happens to the children or the spec, nothing is created here.
    """
    finished_seconds = _compute_finished_seconds(draft)
    spec = draft.observed.spec
    keep_seconds = spec.keep_cluster_on_failure_seconds if spec is not None else 0
    if draft.is_true(ConditionType.SUCCEEDED) or finished_seconds >= keep_seconds:
        release_cluster(draft, "the job has finished")
        find_leftovers(draft)
    elif draft.is_cluster_in_use:
        draft.wake(keep_seconds - finished_seconds)
        _stop_trainer_on_kept_cluster(draft)

    ttl_seconds = spec.ttl_seconds_after_finished if spec is not None else None
    if ttl_seconds is None:
        return
    if finished_seconds >= ttl_seconds:
        if draft.is_due("delete-job", REPEAT_SECONDS):
            draft.act(DeleteJob(draft.observed.uid))
    else:
        draft.wake(ttl_seconds - finished_seconds)


def _compute_finished_seconds(draft: Draft) -> float:
    end = draft.status.completion_time
    return compute_elapsed_seconds(parse_time(end), draft.now) if end is not None else 0.0


def _stop_trainer_on_kept_cluster(draft: Draft) -> None:
    """A failed job's cluster is kept to look at it, not to go on training."""
    last, job = draft.last_attempt_on_cluster, draft.observed.ray_job
    is_live = isinstance(job, RayJobFound) and job.status not in RAY_JOB_ENDED
    if last is not None and (is_live or isinstance(job, RayJobUnreachable)):
        stop_ray_job(draft, last)
