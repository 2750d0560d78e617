"""Phase and the kstatus trio: a summary of the other conditions, computed last."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.status import ConditionType, Phase
from rljob_operator.plan.draft import Draft


@dataclass(frozen=True)
class Summary:
    """What a user should see at a glance."""

    phase: Phase
    reason: str
    message: str
    is_ready: bool = False
    """Kubernetes clients call the object current: running as asked, suspended as asked, or done."""
    is_stalled: bool = False
    """Failed for good; kstatus calls the object failed."""


def summarise(draft: Draft) -> None:
    """Set phase, Ready, Reconciling and Stalled."""
    summary = compute_summary(draft)
    is_moving = not summary.is_ready and not summary.is_stalled
    draft.status.phase = summary.phase
    draft.set(ConditionType.READY, "True" if summary.is_ready else "False", summary.reason, summary.message)
    draft.set(ConditionType.RECONCILING, "True" if is_moving else "False", summary.reason, summary.message)
    draft.set(ConditionType.STALLED, "True" if summary.is_stalled else "False", summary.reason, summary.message)


def compute_summary(draft: Draft) -> Summary:
    """The first that applies, from final to fleeting."""
    status = draft.status
    if (failed := draft.condition(ConditionType.FAILED)) is not None and failed.status == "True":
        return Summary(Phase.FAILED, failed.reason, failed.message, is_stalled=True)
    if (succeeded := draft.condition(ConditionType.SUCCEEDED)) is not None and succeeded.status == "True":
        return Summary(Phase.SUCCEEDED, succeeded.reason, succeeded.message, is_ready=True)
    if (suspended := draft.condition(ConditionType.SUSPENDED)) is not None and suspended.status == "True":
        return Summary(Phase.SUSPENDED, suspended.reason, suspended.message, is_ready=True)

    attempt = draft.open_attempt
    is_stopping = attempt is not None and attempt.stop_requested_time is not None
    if is_stopping or (draft.is_suspend_wanted and status.cluster_generation > 0):
        return Summary(Phase.SUSPENDING, "Suspending", "the trainer is stopped and the cluster released")
    running = draft.condition(ConditionType.RUNNING)
    if running is not None and running.status != "False":
        return Summary(Phase.RUNNING, running.reason, running.message, is_ready=True)

    has_failed_before = status.retries.counted + status.retries.free > 0
    phase = Phase.RETRYING if has_failed_before else Phase.STARTING
    if status.next_attempt_time is not None:
        message = f"the next attempt starts at {status.next_attempt_time}"
        return Summary(Phase.RETRYING if has_failed_before else Phase.PENDING, "BackingOff", message)
    if attempt is not None and running is not None:
        return Summary(phase, running.reason, running.message)
    cluster_ready = draft.condition(ConditionType.CLUSTER_READY)
    if status.cluster_generation == 0:
        phase = Phase.PENDING
    if cluster_ready is None:
        return Summary(phase, "Pending", "waiting for the operator")
    return Summary(phase, cluster_ready.reason, cluster_ready.message)
