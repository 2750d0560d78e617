"""The plan under construction: a copy of the status, and what has been decided so far."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final

from rljob_api.names import compute_ray_cluster_name
from rljob_api.v1alpha1.failure import FailurePolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptStatus, Condition, ConditionType, RLJobStatus
from rljob_operator.plan import conditions
from rljob_operator.plan.times import compute_elapsed_seconds
from rljob_operator.plan.types import (
    MAX_EVENT_MESSAGE_LENGTH,
    Action,
    ChildError,
    Event,
    EventType,
    Memory,
    Observed,
    ObservedPod,
    ObservedRayCluster,
    Plan,
)

POLL_SECONDS: Final = 5.0
"""How often a head is asked while a trainer runs."""
RELEASE_SLACK_SECONDS: Final = 60.0
"""On top of the pods' grace period: kubelet, garbage collection and network teardown."""

LIVE_FIELDS: Final = (
    "suspend",
    "active_deadline_seconds",
    "ttl_seconds_after_finished",
    "keep_cluster_on_failure_seconds",
    "failure_policy",
)
"""Fields that take effect at once; a change of any other field needs a new cluster."""


def compute_spec_hash(spec: RLJobSpec) -> str:
    """Hash of the part of the spec that a cluster is rendered from."""
    document = spec.model_dump(mode="json", exclude=set(LIVE_FIELDS))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def get_open_attempt(status: RLJobStatus) -> AttemptStatus | None:
    """The attempt that runs, or None."""
    last = status.attempts[-1] if status.attempts else None
    return last if last is not None and last.outcome is None else None


class Draft:
    """Facts about one job at one moment, and the status, actions, events and wake-up being put together."""

    def __init__(self, observed: Observed, now: datetime) -> None:
        """Start from the observed status; nothing of `observed` is changed."""
        self.observed = observed
        self.now = now
        self.status = observed.status.model_copy(deep=True)
        self.policy = observed.spec.failure_policy if observed.spec is not None else FailurePolicy()
        self.actions: list[Action] = []
        self.events: list[Event] = []
        self.heartbeat = observed.memory.heartbeat
        self.heartbeat_seen_time = observed.memory.heartbeat_seen_time
        self.progress_written_time = observed.memory.progress_written_time
        self._since: dict[str, datetime] = {}
        self._wake_after_seconds: float | None = None

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        """Succeeded or Failed: nothing is ever created again."""
        return conditions.is_terminal(self.status)

    @property
    def open_attempt(self) -> AttemptStatus | None:
        """The attempt that runs, or None."""
        return get_open_attempt(self.status)

    @property
    def is_suspend_wanted(self) -> bool:
        """`spec.suspend`; an unreadable spec does not suspend."""
        return self.observed.spec is not None and self.observed.spec.suspend

    @property
    def grace_seconds(self) -> int:
        """Time a pod gets to publish a checkpoint."""
        spec = self.observed.spec
        return spec.cluster.termination_grace_period_seconds if spec is not None else 300

    @property
    def is_cluster_in_use(self) -> bool:
        """A cluster generation was begun and not given up."""
        return self.status.cluster_generation > 0 and not self.status.cluster_released

    @property
    def cluster_name(self) -> str:
        """Name of the current generation's RayCluster."""
        return compute_ray_cluster_name(self.observed.name, self.status.cluster_generation)

    @property
    def cluster(self) -> ObservedRayCluster | None:
        """The current generation's RayCluster as it is, or None."""
        generation = self.status.cluster_generation
        return next((c for c in self.observed.ray_clusters if c.cluster_generation == generation), None)

    @property
    def pods(self) -> tuple[ObservedPod, ...]:
        """Pods of the current generation that exist."""
        generation = self.status.cluster_generation
        return tuple(p for p in self.observed.pods if p.cluster_generation == generation and not p.gone)

    @property
    def last_attempt_on_cluster(self) -> AttemptStatus | None:
        """The newest attempt if it was submitted to the current cluster."""
        last = self.status.attempts[-1] if self.status.attempts else None
        return last if last is not None and last.ray_cluster == self.cluster_name else None

    @property
    def child_error(self) -> ChildError | None:
        """What refused a child of the current generation, or None."""
        error = self.observed.child_error
        return error if error is not None and error.cluster_generation == self.status.cluster_generation else None

    @property
    def was_running(self) -> bool:
        """The trainer of the current attempt was heard of (Running is True, or Unknown during an outage)."""
        running = self.condition(ConditionType.RUNNING)
        return running is not None and running.status != "False"

    def condition(self, kind: ConditionType) -> Condition | None:
        """A condition of the status under construction."""
        return conditions.get_condition(self.status.conditions, kind)

    def is_true(self, kind: ConditionType) -> bool:
        """Whether a condition of the status under construction is True."""
        return conditions.is_true(self.status, kind)

    # --- decisions -----------------------------------------------------------------------------------------------

    def set(self, kind: ConditionType, state: conditions.ConditionState, reason: str, message: str) -> bool:
        """Set a condition; True when it flipped."""
        return conditions.set_condition(
            self.status, kind, state, reason, message, generation=self.observed.generation, now=self.now
        )

    def act(self, action: Action) -> None:
        """Do this after the status is written."""
        if action not in self.actions:
            self.actions.append(action)

    def record(self, event_type: EventType, reason: str, message: str) -> None:
        """Tell the user once; callers call this on transitions only."""
        self.events.append(Event(event_type, reason, conditions.clip_message(message, MAX_EVENT_MESSAGE_LENGTH)))

    def wake(self, seconds: float) -> None:
        """Look again no later than in `seconds`."""
        seconds = max(0.1, seconds)
        if self._wake_after_seconds is None or seconds < self._wake_after_seconds:
            self._wake_after_seconds = seconds

    # --- memory --------------------------------------------------------------------------------------------------

    def measure(self, signal: str) -> float:
        """Seconds since `signal` was first seen; a plan in which nobody asks for it ends it."""
        first = self._since.setdefault(signal, self.observed.memory.since.get(signal, self.now))
        return compute_elapsed_seconds(first, self.now)

    def is_due(self, signal: str, interval_seconds: float) -> bool:
        """True the first time and then at most every `interval_seconds`; wakes up for the next time."""
        last = self.observed.memory.since.get(signal)
        elapsed = interval_seconds if last is None else compute_elapsed_seconds(last, self.now)
        if last is None or elapsed >= interval_seconds:
            self._since[signal] = self.now
            self.wake(interval_seconds)
            return True
        self._since[signal] = last
        self.wake(interval_seconds - elapsed)
        return False

    # --- the answer ----------------------------------------------------------------------------------------------

    def finish(self) -> Plan:
        """Close the plan; an unchanged status is the observed object itself."""
        self.status.observed_generation = self.observed.generation
        since: Mapping[str, datetime] = MappingProxyType(self._since)
        return Plan(
            status=self.observed.status if self.status == self.observed.status else self.status,
            actions=tuple(self.actions),
            events=tuple(self.events),
            memory=Memory(since, self.heartbeat, self.heartbeat_seen_time, self.progress_written_time),
            wake_after_seconds=self._wake_after_seconds,
        )
