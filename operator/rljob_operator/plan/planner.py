"""The life of an RLJob, as one pure function.

    validate -> cluster of generation g -> every pod ready -> attempt n -> running -> succeeded
                     ^                          ^                            |
                     |                          +---- retry in place --------+   (pods and spec unchanged)
                     +------------------------------- retry on a new cluster +-> failed | suspended

Nothing is remembered outside `status`: whatever is needed after a crash is written before the action that needs it.

======================  ==============================================  =====================================
write                   carries                                         actions after it
======================  ==============================================  =====================================
cluster begun           clusterGeneration g, clusterStartTime, hash     EnsureClusterObjects(g)
attempt begun           attempt n, submission id, pod UIDs, ClusterReady SubmitTrainer(g, n)
first heartbeat         Running, progress
progress                at most every 15 s
stop asked              stopRequestedTime                               RequestStop(g)
attempt ended           outcome, failure, retries, nextAttemptTime,     DeleteCluster(g) when it is given up
                        clusterReleased, Succeeded or Failed
suspended               Suspended                                       none
======================  ==============================================  =====================================

A clean run is four writes plus progress, a retry two or three more. A kill between a write and its actions is
harmless: object names and submission ids follow from numbers in the status, applying and submitting can be repeated,
and a number is never used for a second cluster or attempt.
"""

from __future__ import annotations

from datetime import datetime

from rljob_api.names import compute_ray_cluster_name
from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.plan.attempt import begin_attempt, follow_attempt, is_cluster_reusable, is_predecessor_gone
from rljob_operator.plan.cluster import (
    await_cluster,
    begin_cluster,
    delete_leftovers,
    follow_startup,
    release_cluster,
)
from rljob_operator.plan.conditions import is_terminal, touch_conditions
from rljob_operator.plan.draft import Draft, get_open_attempt
from rljob_operator.plan.finish import end_suspension, finish_job, hold_suspended
from rljob_operator.plan.limits import find_exceeded_deadline
from rljob_operator.plan.progress import write_report_if_due
from rljob_operator.plan.retry import fail_job
from rljob_operator.plan.summary import summarise
from rljob_operator.plan.times import parse_time
from rljob_operator.plan.types import Observed, Plan, Questions
from rljob_operator.plan.validate import refuse_invalid_spec, validate_job


def plan(observed: Observed, now: datetime) -> Plan:
    """What to write and to do for one job, given everything that is seen of it at `now` (an aware datetime)."""
    if observed.deleting:
        # Owner references remove the children; writing to an object on its way out helps nobody.
        return Plan(status=observed.status)
    draft = Draft(observed, now)
    touch_conditions(draft.status, generation=observed.generation, now=now)
    validate_job(draft)
    if not draft.is_terminal:
        follow_attempt(draft)
    if not draft.is_terminal:
        follow_startup(draft)
    if draft.is_terminal:
        finish_job(draft)
    elif draft.open_attempt is None:
        advance(draft)
    delete_leftovers(draft)
    write_report_if_due(draft)
    summarise(draft)
    return draft.finish()


def advance(draft: Draft) -> None:
    """No attempt runs: take the one next step towards the next attempt."""
    if draft.is_suspend_wanted:
        hold_suspended(draft)
        return
    end_suspension(draft)
    if (deadline := find_exceeded_deadline(draft)) is not None:
        fail_job(draft, FailureReason.DEADLINE_EXCEEDED, deadline)
        finish_job(draft)
        return
    if draft.is_cluster_in_use and not is_cluster_reusable(draft):
        release_cluster(draft, "its pods or the spec changed since its last attempt")
    if draft.is_cluster_in_use and not is_predecessor_gone(draft):
        return
    if not is_backoff_over(draft):
        return
    if refuse_invalid_spec(draft):
        finish_job(draft)
    elif not draft.is_cluster_in_use:
        begin_cluster(draft)
    elif await_cluster(draft):
        begin_attempt(draft)


def is_backoff_over(draft: Draft) -> bool:
    """Whether the next attempt may start."""
    if draft.status.next_attempt_time is None:
        return True
    left = (parse_time(draft.status.next_attempt_time) - draft.now).total_seconds()
    if left > 0:
        draft.wake(left)
    return left <= 0


def questions(job_name: str, status: RLJobStatus) -> Questions:
    """What to ask the head of the current cluster before planning: only what the next plan can use."""
    last = status.attempts[-1] if status.attempts else None
    is_current = (
        last is not None
        and not status.cluster_released
        and last.ray_cluster == compute_ray_cluster_name(job_name, status.cluster_generation)
    )
    if last is None or not is_current:
        return Questions(status.cluster_generation, None, log_wanted=False, trainer=False)
    is_open = get_open_attempt(status) is not None and not is_terminal(status)
    return Questions(status.cluster_generation, last.submission_id, log_wanted=is_open, trainer=is_open)
