"""Conditions: one transition rule, all types on first touch, and the kstatus summary.

kstatus (cli-utils pkg/kstatus): an object is in progress while Reconciling is True or Ready is not True, failed when
Stalled is True, current otherwise. As for a batch Job, running and suspended are "current": waiting for the end is
`kubectl wait --for=condition=Succeeded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal

from rljob_api.v1alpha1.status import Condition, ConditionType, RLJobStatus
from rljob_operator.plan.times import format_time

ConditionState = Literal["True", "False", "Unknown"]

MAX_CONDITION_MESSAGE_LENGTH: Final = 4096

FIRST_TOUCH: Final[dict[ConditionType, tuple[ConditionState, str, str]]] = {
    ConditionType.VALIDATED: ("Unknown", "NotChecked", "the spec has not been checked yet"),
    ConditionType.ADMITTED: ("True", "NotQueued", "the job is not queued"),
    ConditionType.CLUSTER_READY: ("False", "NotStarted", "no cluster has been created yet"),
    ConditionType.RUNNING: ("False", "NotStarted", "the trainer has not been started yet"),
    ConditionType.SUSPENDED: ("False", "NotSuspended", ""),
    ConditionType.CHECKPOINT_AVAILABLE: ("False", "NoCheckpoint", "no checkpoint has been published yet"),
    ConditionType.SUCCEEDED: ("False", "NotFinished", ""),
    ConditionType.FAILED: ("False", "NotFinished", ""),
    ConditionType.READY: ("False", "Pending", ""),
    ConditionType.RECONCILING: ("True", "Pending", ""),
    ConditionType.STALLED: ("False", "NotFailed", ""),
}
"""Without any known condition kstatus calls an object current, so a job nobody looked at would pass for done."""


def get_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """The condition of that type, or None."""
    return next((condition for condition in conditions if condition.type == kind), None)


def is_true(status: RLJobStatus, kind: ConditionType) -> bool:
    """Whether the condition is True."""
    condition = get_condition(status.conditions, kind)
    return condition is not None and condition.status == "True"


def is_terminal(status: RLJobStatus) -> bool:
    """Succeeded or Failed: nothing is ever created for the job again."""
    return is_true(status, ConditionType.SUCCEEDED) or is_true(status, ConditionType.FAILED)


def set_condition(
    status: RLJobStatus,
    kind: ConditionType,
    state: ConditionState,
    reason: str,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> bool:
    """Put one condition into `status`; True when its state flipped (or it is new).

    `lastTransitionTime` moves only when the state flips: a client that measures how long a job has been running would
    otherwise start again at each new message.
    """
    message = clip_message(message, MAX_CONDITION_MESSAGE_LENGTH)
    old = get_condition(status.conditions, kind)
    flipped = old is None or old.status != state
    new = Condition(
        type=str(kind),
        status=state,
        observed_generation=generation,
        last_transition_time=format_time(now) if old is None or flipped else old.last_transition_time,
        reason=str(reason),
        message=message,
    )
    if old is None:
        status.conditions = [*status.conditions, new]
    else:
        status.conditions = [new if condition.type == kind else condition for condition in status.conditions]
    return flipped


def touch_conditions(status: RLJobStatus, *, generation: int, now: datetime) -> None:
    """Add every missing condition and stamp the rest with the generation this plan was computed from."""
    for kind, (state, reason, message) in FIRST_TOUCH.items():
        old = get_condition(status.conditions, kind)
        if old is None:
            set_condition(status, kind, state, reason, message, generation=generation, now=now)
        elif old.observed_generation != generation:
            set_condition(status, kind, old.status, old.reason, old.message, generation=generation, now=now)


def clip_message(message: str, max_length: int) -> str:
    """At most `max_length` characters; the beginning names the culprit, so the end is cut."""
    return message if len(message) <= max_length else message[: max_length - 1] + "…"
