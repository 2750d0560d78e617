"""One reconcile: gather -> plan -> write the status -> act -> look again.

The status is written before anything is done, so that what must survive a crash (attempt, cluster generation,
submission id) is on the API server when its effect may exist. A kill between any two lines is harmless: the next
reconcile computes the same names and repeats the same idempotent actions.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.adapters.events import EventRecorder
from rljob_operator.adapters.kube import RLJOBS, Document, Kube, KubeError
from rljob_operator.adapters.metrics import Metrics
from rljob_operator.execute import CrashPoint, Executor
from rljob_operator.gather import Gatherer
from rljob_operator.job_state import JobState, Snapshot
from rljob_operator.plan import plan
from rljob_operator.pod_history import PodHistory
from rljob_operator.scheduler import Key

logger = logging.getLogger(__name__)

# A plan whose actions change the world is followed by another look. More rounds than any path through the planner
# needs would mean that it does not come to rest.
_MAX_ROUNDS: Final = 8
_NOT_AT_REST_SECONDS: Final = 1.0


class Reconciler:
    """Brings one RLJob at a time a step further; the scheduler never runs the same one twice at once."""

    def __init__(
        self,
        kube: Kube,
        gatherer: Gatherer,
        executor: Executor,
        events: EventRecorder,
        metrics: Metrics,
        pod_history: PodHistory,
        crash_point: CrashPoint,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._gatherer = gatherer
        self._executor = executor
        self._events = events
        self._metrics = metrics
        self._pod_history = pod_history
        self._crash_point = crash_point
        self._clock = clock
        self._states: dict[Key, JobState] = {}
        self._num_events: Counter[Key] = Counter()

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the job wants to be looked at again; None: only when something changes."""
        started = time.monotonic()
        result = "error"
        try:
            delay = await self._reconcile(key)
            result = "ok"
            return delay
        finally:
            self._metrics.reconciles.labels(result=result).inc()
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)

    def note_change(self, key: Key, resource_version: str | None = None) -> bool:
        """A watch event: what was read of this job is outdated.

        `resource_version` is given for an event of the RLJob itself. False: the event is the echo of our own write,
        nobody needs to look at the job for it.
        """
        state = self._states.get(key)
        snapshot = state.snapshot if state is not None else None
        if snapshot is not None and snapshot.document["metadata"]["resourceVersion"] == resource_version:
            return False
        self._num_events[key] += 1
        return True

    async def _reconcile(self, key: Key) -> float | None:
        for _ in range(_MAX_ROUNDS):
            state = await self._look(key)
            if state is None or state.snapshot is None:
                return None
            observed = await self._gatherer.gather(state, state.snapshot)
            decision = plan(observed, self._clock())
            if not await self._write_status(state, state.snapshot, observed.status, decision.status):
                state.snapshot = None
                continue  # somebody else wrote in between: look again, decide again
            state.memory = decision.memory
            self._metrics.observe_job(key, decision.status)
            for event in decision.events:
                await self._events.record(key.namespace, key.name, state.uid, event)
            if not decision.actions:
                return decision.wake_after_seconds
            state.snapshot = None
            await self._executor.execute(observed, state, decision.actions)
        return _NOT_AT_REST_SECONDS

    async def _look(self, key: Key) -> JobState | None:
        """The job with a current snapshot; None when it is gone."""
        state = self._states.get(key)
        num_events = self._num_events[key]
        snapshot = state.snapshot if state is not None else None
        if snapshot is not None and snapshot.is_current(num_events, time.monotonic()):
            return state
        document = await self._gatherer.read_job(key.namespace, key.name)
        if document is None:
            self._forget(key)
            return None
        state = self._find_state(key, document)
        state.snapshot = await self._gatherer.read(document, num_events)
        return state

    async def _write_status(self, state: JobState, snapshot: Snapshot, old: RLJobStatus, new: RLJobStatus) -> bool:
        """Write the status if it changed. False: the object was not the one the plan was made from."""
        wanted, known = dump_status(new), dump_status(old)
        if wanted == known:
            return True
        metadata = snapshot.document["metadata"]
        try:
            document = await self._kube.apply_status(
                RLJOBS,
                metadata["namespace"],
                metadata["name"],
                resource_version=metadata["resourceVersion"],
                uid=metadata["uid"],
                status=wanted,
                is_progress=_drop_progress(wanted) == _drop_progress(known),
            )
        except KubeError as error:
            # 404: deleted in between; the next round finds that out.
            if error.is_conflict or error.is_not_found:
                return False
            raise
        state.snapshot = replace(snapshot, document=document)
        await self._crash_point("wrote status")
        return True

    def _find_state(self, key: Key, document: Document) -> JobState:
        uid = document["metadata"]["uid"]
        state = self._states.get(key)
        if state is None or state.uid != uid:  # a new job under an old name starts from nothing
            self._forget(key)
            state = self._states[key] = JobState(uid)
        return state

    def _forget(self, key: Key) -> None:
        state = self._states.pop(key, None)
        self._num_events.pop(key, None)
        if state is not None:
            self._pod_history.forget(state.uid)
        self._metrics.forget_job(key)


def dump_status(status: RLJobStatus) -> Document:
    """The status as it is stored: absent instead of null."""
    return status.model_dump(mode="json", exclude_none=True)


def _drop_progress(status: Document) -> Document:
    """What is left of a stored status without the trainer's reports."""
    return {key: value for key, value in status.items() if key not in ("progress", "checkpoint")}
