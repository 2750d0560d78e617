"""One attempt: submitted, running, stopping, ended."""

from __future__ import annotations

from typing import Final

from rljob_api.contract import Progress
from rljob_api.names import compute_submission_id
from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import AttemptStatus, ConditionType, GoodputStatus
from rljob_operator.plan.classify import (
    RAY_JOB_ENDED,
    Ending,
    Outcome,
    clip_evidence,
    get_ended_job,
    judge_attempt,
)
from rljob_operator.plan.cluster import release_cluster
from rljob_operator.plan.draft import POLL_SECONDS, RELEASE_SLACK_SECONDS, Draft, compute_spec_hash
from rljob_operator.plan.limits import UNREACHABLE_TOLERANCE_SECONDS, check_time_limits, describe_outage
from rljob_operator.plan.pods import compute_pod_set_hash, get_head, get_workers, is_failing
from rljob_operator.plan.progress import get_report, write_report
from rljob_operator.plan.retry import handle_failure
from rljob_operator.plan.times import compute_elapsed_seconds, format_time, parse_time
from rljob_operator.plan.types import (
    EventType,
    RayJobFound,
    RayJobNotFound,
    RayJobRejected,
    RayJobUnreachable,
    RequestStop,
    StopRayJob,
    SubmitTrainer,
)

MAX_ATTEMPTS: Final = 10
REPEAT_SECONDS: Final = 30.0
"""How often a request that had no effect yet is sent again."""


def follow_attempt(draft: Draft) -> None:
    """Judge the open attempt; while it runs, keep its conditions and requests up to date."""
    attempt = draft.open_attempt
    if attempt is None:
        return
    ending = judge_attempt(draft, attempt)
    if ending is None and get_ended_job(draft, attempt) is None and attempt.stop_requested_time is None:
        ending = check_time_limits(draft, attempt)
    if ending is not None:
        end_attempt(draft, attempt, ending)
        return
    draft.wake(POLL_SECONDS)
    _note_running(draft, attempt)
    _submit_if_unknown(draft, attempt)
    if draft.is_suspend_wanted or attempt.stop_requested_time is not None:
        stop_attempt(draft, attempt)


def end_attempt(draft: Draft, attempt: AttemptStatus, ending: Ending) -> None:
    """Write down how it ended, then succeed, wait for the suspension to end, or apply the failure policy."""
    report = get_report(draft, attempt)
    if report is not None:
        write_report(draft, attempt, report)
        draft.progress_written_time = draft.now
    attempt.end_time = format_time(draft.now)
    attempt.outcome = ending.outcome.value
    attempt.reason = ending.reason.value if ending.reason is not None else None
    attempt.message = clip_evidence(ending.message)
    _account_time(draft, attempt, ending, has_reported=report is not None or draft.was_running)
    draft.set(ConditionType.RUNNING, "False", ending.reason or ending.outcome, ending.message)
    if ending.is_cluster_lost:
        release_cluster(draft, ending.message)

    if ending.outcome == Outcome.SUCCEEDED:
        draft.set(ConditionType.SUCCEEDED, "True", "Completed", ending.message)
        draft.status.completion_time = format_time(draft.now)
        draft.status.next_attempt_time = None
        draft.record(EventType.NORMAL, "Succeeded", ending.message)
    elif ending.outcome == Outcome.SUSPENDED:
        draft.record(EventType.NORMAL, "Stopped", f"attempt {attempt.number}: {ending.message}")
    else:
        handle_failure(draft, ending.reason or FailureReason.TRAINER_CRASHED, ending.message)


def stop_attempt(draft: Draft, attempt: AttemptStatus) -> None:
    """Ask the trainer for a checkpoint and exit 143; one that was never heard of has nothing to save."""
    if not draft.was_running:
        message = "suspended before the trainer had started"
        end_attempt(draft, attempt, Ending(Outcome.SUSPENDED, message, is_cluster_lost=True))
        return
    deadline_seconds = draft.grace_seconds
    if attempt.stop_requested_time is None:
        attempt.stop_requested_time = format_time(draft.now)
        message = f"spec.suspend is true: the trainer has {deadline_seconds} s to publish a checkpoint"
        draft.record(EventType.NORMAL, "Suspending", message)
    if draft.is_due(f"stop/{attempt.number}", REPEAT_SECONDS):
        draft.act(RequestStop(draft.status.cluster_generation, deadline_seconds))


def is_predecessor_gone(draft: Draft) -> bool:
    """Whether the cluster's last submission has ended, so that two never train at once; stops it otherwise.

    A submission that does not end within its grace period costs the cluster: deleting the pods ends it for sure.
    """
    last, job = draft.last_attempt_on_cluster, draft.observed.ray_job
    if last is None or isinstance(job, RayJobNotFound | RayJobRejected):
        return True
    if isinstance(job, RayJobFound) and job.submission_id == last.submission_id and job.status in RAY_JOB_ENDED:
        return True
    limit_seconds = draft.grace_seconds + RELEASE_SLACK_SECONDS
    ended = parse_time(last.end_time) if last.end_time is not None else draft.now
    if compute_elapsed_seconds(ended, draft.now) >= limit_seconds:
        release_cluster(draft, f"submission {last.submission_id} did not stop within {limit_seconds:.0f} s")
        draft.wake(1.0)
        return False
    stop_ray_job(draft, last)
    return False


def stop_ray_job(draft: Draft, attempt: AttemptStatus) -> None:
    """Ask Ray to stop a submission, every 30 seconds until it has ended."""
    if draft.is_due(f"stop-ray-job/{attempt.number}", REPEAT_SECONDS):
        draft.act(StopRayJob(draft.status.cluster_generation, attempt.submission_id))
    draft.wake(POLL_SECONDS)


def is_cluster_reusable(draft: Draft) -> bool:
    """Whether the pods are the ones the cluster's last attempt ran on and the spec has not changed since."""
    last = draft.last_attempt_on_cluster
    if last is None:
        return True
    head, workers = get_head(draft.pods), get_workers(draft.pods)
    is_same_spec = (
        draft.observed.spec is None
        or not draft.is_true(ConditionType.VALIDATED)
        or compute_spec_hash(draft.observed.spec) == draft.status.cluster_spec_hash
    )
    return (
        is_same_spec
        and head is not None
        and head.uid == last.head_pod_uid
        and not any(is_failing(pod) for pod in (head, *workers))
        and compute_pod_set_hash(workers) == last.worker_pods_hash
    )


def begin_attempt(draft: Draft) -> None:
    """Number the attempt and submit it. The number is in the API before the POST, and the id follows from it."""
    status, head = draft.status, get_head(draft.pods)
    if head is None:
        raise ValueError("begin_attempt needs a ready cluster, and there is no head pod")
    status.attempt += 1
    attempt = AttemptStatus(
        number=status.attempt,
        ray_cluster=draft.cluster_name,
        submission_id=compute_submission_id(draft.observed.uid, status.attempt),
        start_time=format_time(draft.now),
        head_pod_uid=head.uid,
        worker_pods_hash=compute_pod_set_hash(get_workers(draft.pods)),
    )
    status.attempts = [*status.attempts, attempt][-MAX_ATTEMPTS:]
    status.next_attempt_time = None
    draft.set(ConditionType.RUNNING, "False", "Submitted", f"attempt {attempt.number} was submitted")
    draft.record(EventType.NORMAL, "Submitted", f"attempt {attempt.number} on RayCluster {attempt.ray_cluster}")
    _submit(draft, attempt)


def _submit(draft: Draft, attempt: AttemptStatus) -> None:
    floor = draft.status.checkpoint.step if draft.status.checkpoint is not None else 0
    draft.act(SubmitTrainer(draft.status.cluster_generation, attempt.number, attempt.submission_id, floor))
    draft.wake(1.0)


def _submit_if_unknown(draft: Draft, attempt: AttemptStatus) -> None:
    """Repeat a submission that got lost between the status write and the POST (or whose answer got lost)."""
    if isinstance(draft.observed.ray_job, RayJobNotFound):
        _submit(draft, attempt)


def _note_running(draft: Draft, attempt: AttemptStatus) -> None:
    job, spec, report = draft.observed.ray_job, draft.observed.spec, get_report(draft, attempt)
    if isinstance(job, RayJobUnreachable) and not isinstance(draft.observed.trainer, Progress):
        left = UNREACHABLE_TOLERANCE_SECONDS - draft.measure("head-unreachable")
        if left > 0:
            draft.wake(left)
        elif draft.was_running:
            message = f"the head has not answered for {UNREACHABLE_TOLERANCE_SECONDS:.0f} s{describe_outage(draft)}"
            if draft.set(ConditionType.RUNNING, "Unknown", "ClusterUnreachable", message):
                draft.record(EventType.WARNING, "ClusterUnreachable", message)
        return
    runs_other_trainer = spec is not None and spec.trainer is not None
    if report is None and not (runs_other_trainer and isinstance(job, RayJobFound) and job.status == "RUNNING"):
        return
    if not draft.is_true(ConditionType.RUNNING):
        started = not draft.was_running
        message = f"attempt {attempt.number} runs on RayCluster {attempt.ray_cluster}"
        draft.set(ConditionType.RUNNING, "True", "TrainerRunning", message)
        if started:
            draft.record(EventType.NORMAL, "Running", message)


def _account_time(draft: Draft, attempt: AttemptStatus, ending: Ending, *, has_reported: bool) -> None:
    """Running time and goodput: GPU time whose steps are in the result or in the newest checkpoint is useful."""
    if attempt.start_time is None:
        return
    seconds = compute_elapsed_seconds(parse_time(attempt.start_time), draft.now)
    draft.status.active_seconds += seconds
    spec = draft.observed.spec
    num_gpus = spec.cluster.nodes * spec.cluster.gpus_per_node if spec is not None else 0
    if num_gpus == 0:
        return
    if ending.outcome == Outcome.SUCCEEDED:
        kept = 1.0
    else:
        # One that was never heard of did nothing: progress and checkpoint in the status are its predecessors'.
        kept = _compute_kept_share(draft, attempt) if has_reported else 0.0
    goodput = draft.status.goodput or GoodputStatus()
    goodput.gpu_seconds += num_gpus * seconds
    goodput.useful_gpu_seconds += num_gpus * seconds * kept
    draft.status.goodput = goodput


def _compute_kept_share(draft: Draft, attempt: AttemptStatus) -> float:
    """Steps up to the newest checkpoint / steps done, both counted from where the attempt began."""
    begin = attempt.resumed_from_step or 0
    done = (draft.status.progress.step if draft.status.progress is not None else 0) - begin
    saved = (draft.status.checkpoint.step if draft.status.checkpoint is not None else 0) - begin
    return min(1.0, max(0.0, saved / done)) if done > 0 else 0.0
