"""Evidence -> how an attempt ended. Policy (retry or not) is decided elsewhere.

Order of evidence, strongest first:

1. the trainer reached its target: success, whatever happens to the pods afterwards;
2. the trainer's own verdict about the job itself (configuration, data, checkpoint, numerics, reward): other pods would
   not help, so a pod that died meanwhile does not matter;
3. we asked it to stop;
4. the cluster or a pod is lost: the root cause of whatever error the trainer reported;
5. an error that a lost pod would also explain (engine died, transient, crash): believed after a short wait, because
   the API server learns of a dead pod seconds later than Ray does;
6. time limits.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

from rljob_api.reasons import REASON_OF_EXIT_CODE, ExitCode
from rljob_api.v1alpha1.base import StrEnum
from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import AttemptStatus, CheckpointStatus, ProgressStatus
from rljob_operator.plan.draft import POLL_SECONDS, RELEASE_SLACK_SECONDS, Draft
from rljob_operator.plan.pods import find_loss
from rljob_operator.plan.progress import get_report
from rljob_operator.plan.times import compute_elapsed_seconds, parse_time
from rljob_operator.plan.types import RayJobFound, RayJobNotFound, RayJobRejected

SETTLE_SECONDS: Final = 10.0
"""How long an ambiguous error waits for evidence of a lost pod."""
LOG_PATIENCE_SECONDS: Final = 60.0
"""How long the end of a submission waits for a log that cannot be read: the final report is only there."""
RAY_JOB_ENDED: Final = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})

VERDICTS_ABOUT_THE_JOB: Final = frozenset(
    {
        FailureReason.INVALID_CONFIGURATION,
        FailureReason.INVALID_DATA,
        FailureReason.CHECKPOINT_UNUSABLE,
        FailureReason.NUMERICAL_ERROR,
        FailureReason.REWARD_FUNCTION_ERROR,
        FailureReason.INCOMPLETE_TRAINING,
    }
)
REASON_OF_ERROR_TYPE: Final[dict[str, FailureReason]] = {
    "RUNTIME_ENV_SETUP_FAILURE": FailureReason.RAY_JOB_FAILED_TO_START,
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": FailureReason.RAY_JOB_FAILED_TO_START,
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": FailureReason.RAY_JOB_FAILED_TO_START,
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": FailureReason.RAY_JOB_FAILED_TO_START,
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": FailureReason.RAY_JOB_FAILED_TO_START,
    "JOB_SUPERVISOR_ACTOR_DIED": FailureReason.RAY_JOB_LOST,
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": FailureReason.RAY_JOB_FAILED_TO_START,
}
"""Ray 2.60 `JobErrorType`; JOB_ENTRYPOINT_COMMAND_ERROR is judged by the exit code."""
MAX_LOG_LINES: Final = 20
MAX_EVIDENCE_LENGTH: Final = 2000


class Outcome(StrEnum):
    """`attempts[].outcome`."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SUSPENDED = "Suspended"


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    outcome: Outcome
    message: str
    reason: FailureReason | None = None
    """Set exactly when it failed."""
    is_cluster_lost: bool = False
    """The cluster cannot carry another attempt."""


def judge_attempt(draft: Draft, attempt: AttemptStatus) -> Ending | None:
    """How the attempt ended, by evidence 1-5; None while it runs or the evidence is not complete."""
    job = draft.observed.ray_job
    was_seen = was_job_seen(draft, attempt)
    ended = get_ended_job(draft, attempt)
    verdict = judge_ended_job(draft, attempt, ended) if ended is not None else None

    if verdict is not None and verdict.outcome == Outcome.SUCCEEDED:
        return verdict
    is_log_missing = ended is not None and ended.result is None and bool(ended.log_error)
    if is_log_missing and draft.measure(f"log/{attempt.number}") < LOG_PATIENCE_SECONDS:
        verdict = None
    if verdict is not None and verdict.reason in VERDICTS_ABOUT_THE_JOB:
        return verdict
    if attempt.stop_requested_time is not None:
        return _judge_stopping(draft, attempt, is_ended=verdict is not None)
    if (loss := _find_cluster_loss(draft, attempt)) is not None:
        return loss
    if ended is not None:
        is_settled = draft.measure(f"ended/{attempt.number}") >= SETTLE_SECONDS
        draft.wake(POLL_SECONDS)
        return verdict if is_settled else None
    if isinstance(job, RayJobRejected):
        return Ending(Outcome.FAILED, f"Ray refused the job: {job.message}", FailureReason.RAY_JOB_FAILED_TO_START)
    if isinstance(job, RayJobNotFound) and was_seen:
        message = f"the head no longer knows submission {attempt.submission_id}: its job table is lost"
        return Ending(Outcome.FAILED, message, FailureReason.RAY_JOB_LOST, is_cluster_lost=True)
    return None


def get_ended_job(draft: Draft, attempt: AttemptStatus) -> RayJobFound | None:
    """The attempt's submission if Ray says that it has ended."""
    job = draft.observed.ray_job
    is_ours = isinstance(job, RayJobFound) and job.submission_id == attempt.submission_id
    return job if isinstance(job, RayJobFound) and is_ours and job.status in RAY_JOB_ENDED else None


def was_job_seen(draft: Draft, attempt: AttemptStatus) -> bool:
    """Whether Ray knew this submission before: a 404 is then a loss; otherwise it was never submitted."""
    signal_name = f"seen/{attempt.submission_id}"
    if isinstance(draft.observed.ray_job, RayJobFound) or signal_name in draft.observed.memory.since:
        draft.measure(signal_name)
        return True
    return draft.was_running


def judge_ended_job(draft: Draft, attempt: AttemptStatus, job: RayJobFound) -> Ending:
    """The verdict of an ended submission, taken by itself."""
    code = compute_exit_code(job)
    if code == ExitCode.DONE or (code is None and job.status == "SUCCEEDED"):
        return _judge_success(draft, attempt, job)
    if job.status == "STOPPED":
        # Before 143: a trainer stopped through Ray also ends so, and a retry would fight whoever stopped it.
        message = "somebody stopped the Ray job; the operator did not ask for it"
        return Ending(Outcome.FAILED, message, FailureReason.STOPPED_EXTERNALLY)
    if code == ExitCode.STOPPED:
        message = "the trainer was told to stop by its pod (exit code 143)"
        return Ending(Outcome.FAILED, message, FailureReason.PREEMPTED)
    reason = classify_failure(job, code)
    # The supervisor died, not the command: whatever killed it on the head is not trusted with the next attempt.
    is_lost = reason == FailureReason.RAY_JOB_LOST
    return Ending(Outcome.FAILED, describe_failure(job, code), reason, is_cluster_lost=is_lost)


def compute_exit_code(job: RayJobFound) -> int | None:
    """The driver's exit code as a shell reports it (a signal n is 128 + n), from Ray or else from the result line.

    The result line also wins over a 0 of Ray's: a shell pipeline around the driver may have lost its exit code.
    """
    code = job.driver_exit_code
    if not code and job.result is not None:
        code = job.result.verdict.exit_code
    return 128 - code if code is not None and code < 0 else code


def classify_failure(job: RayJobFound, code: int | None) -> FailureReason:
    """Failure reason of a FAILED submission: Ray's error type, the trainer's own reason, then the exit code."""
    if job.error_type in REASON_OF_ERROR_TYPE:
        return REASON_OF_ERROR_TYPE[job.error_type]
    verdict = job.result.verdict if job.result is not None else None
    if verdict is not None and verdict.exit_code == code and verdict.reason in set(FailureReason):
        return FailureReason(verdict.reason)
    return (
        REASON_OF_EXIT_CODE.get(code, FailureReason.TRAINER_CRASHED)
        if code is not None
        else (FailureReason.TRAINER_CRASHED)
    )


def describe_failure(job: RayJobFound, code: int | None) -> str:
    """The trainer's own message, else the exit code and the last lines of its log."""
    if job.result is not None:
        return clip_evidence(job.result.verdict.message)
    what = f"the trainer ended with exit code {code}" if code is not None else "the trainer ended without an exit code"
    if code is not None and 128 < code < 128 + signal.NSIG:
        what += f" (killed by {_get_signal_name(code - 128)})"
    if job.error_type in REASON_OF_ERROR_TYPE:
        what = f"Ray could not run the trainer ({job.error_type})"
    tail = "\n".join((job.log_tail or job.message).strip().splitlines()[-MAX_LOG_LINES:])
    return what + (f"; the log ends with:\n{tail[-MAX_EVIDENCE_LENGTH:]}" if tail else "")


def describe_checkpoint(checkpoint: CheckpointStatus | None) -> str:
    """For messages: what a stopped run keeps."""
    return "there is no checkpoint" if checkpoint is None else f"newest checkpoint: step {checkpoint.step}"


def clip_evidence(text: str) -> str:
    """At most 2,000 characters."""
    return text if len(text) <= MAX_EVIDENCE_LENGTH else text[: MAX_EVIDENCE_LENGTH - 1] + "…"


def _judge_success(draft: Draft, attempt: AttemptStatus, job: RayJobFound) -> Ending:
    """Exit 0 counts only when the step target was reached: an exhausted data loader ends with 0 as well."""
    spec = draft.observed.spec
    if spec is not None and spec.trainer is not None:
        return Ending(Outcome.SUCCEEDED, "the trainer command ended with exit code 0")
    report = get_report(draft, attempt)
    progress = report.progress if report is not None else draft.status.progress or ProgressStatus()
    total_steps = progress.total_steps
    if total_steps is not None and progress.step >= total_steps:
        return Ending(Outcome.SUCCEEDED, f"all {total_steps} steps are done")
    target = "an unknown number of" if total_steps is None else str(total_steps)
    log = f"; its log could not be read: {job.log_error}" if job.log_error else ""
    message = f"the trainer ended with exit code 0 after step {progress.step} of {target} steps{log}"
    return Ending(Outcome.FAILED, message, FailureReason.INCOMPLETE_TRAINING)


def _judge_stopping(draft: Draft, attempt: AttemptStatus, *, is_ended: bool) -> Ending | None:
    """Whatever ends an attempt that we asked to stop is the suspension, not a failure."""
    checkpoint = describe_checkpoint(draft.status.checkpoint)
    if is_ended:
        return Ending(Outcome.SUSPENDED, f"the trainer stopped; {checkpoint}")
    if (loss := _find_cluster_loss(draft, attempt)) is not None:
        return Ending(Outcome.SUSPENDED, f"{loss.message}, while it was stopping; {checkpoint}", is_cluster_lost=True)
    if isinstance(draft.observed.ray_job, RayJobNotFound | RayJobRejected):
        return Ending(Outcome.SUSPENDED, f"the trainer is gone; {checkpoint}", is_cluster_lost=True)
    limit_seconds = draft.grace_seconds + RELEASE_SLACK_SECONDS
    asked = parse_time(attempt.stop_requested_time) if attempt.stop_requested_time is not None else draft.now
    left = limit_seconds - compute_elapsed_seconds(asked, draft.now)
    if left <= 0:
        message = f"the trainer did not stop within {limit_seconds:.0f} s; {checkpoint}"
        return Ending(Outcome.SUSPENDED, message, is_cluster_lost=True)
    draft.wake(min(POLL_SECONDS, left))
    return None


def _find_cluster_loss(draft: Draft, attempt: AttemptStatus) -> Ending | None:
    cluster = draft.cluster
    if cluster is None or cluster.deleting:
        state = "was deleted" if cluster is None else "is being deleted"
        message = f"RayCluster {attempt.ray_cluster} {state}, and not by the operator"
        return Ending(Outcome.FAILED, message, FailureReason.RAY_CLUSTER_DELETED, is_cluster_lost=True)
    if cluster.suspended:
        message = f"RayCluster {cluster.name} was suspended by its queue"
        return Ending(Outcome.FAILED, message, FailureReason.PREEMPTED, is_cluster_lost=True)
    loss = find_loss(draft.observed.pods, attempt, draft.status.cluster_generation)
    if loss is None:
        return None
    return Ending(Outcome.FAILED, loss.evidence, loss.reason, is_cluster_lost=True)


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
