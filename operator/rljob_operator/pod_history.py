"""Pods that are gone, with the last state that was seen of them.

KubeRay deletes a failed pod and makes a new one without a word: exit code, OOMKilled and eviction vanish from the API
server. What the watch delivered of them is kept here long enough for the planner to see why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rljob_api.names import LABEL_JOB_UID
from rljob_operator.observe import observe_pod
from rljob_operator.plan.types import ObservedPod

RETENTION: Final = timedelta(minutes=30)
_MAX_GONE_PER_JOB: Final = 512


@dataclass
class _Seen:
    document: Mapping[str, Any]
    noted_time: datetime
    gone_time: datetime | None = None


class PodHistory:
    """Last known state per pod, by job UID. In memory only: after a restart nothing older is known."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._jobs: dict[str, dict[str, _Seen]] = {}

    def note(self, document: Mapping[str, Any], *, deleted: bool) -> None:
        """A watch event: the newest state of a pod, or its last one.

        Ignored for jobs that nobody has looked at: pods may outlive their job, and nothing would forget them.
        """
        metadata = document["metadata"]
        seen = self._jobs.get((metadata.get("labels") or {}).get(LABEL_JOB_UID, ""))
        if seen is not None:
            now = self._clock()
            seen[metadata["uid"]] = _Seen(document, now, now if deleted else None)

    def merge(
        self, job_uid: str, listed: Sequence[Mapping[str, Any]], list_started: datetime
    ) -> tuple[ObservedPod, ...]:
        """The listed pods, and after them those that are gone.

        A pod that is not listed is gone if it was seen before the list was asked for: the watch may deliver a new pod
        while an older answer is on its way.
        """
        now = self._clock()
        seen = self._jobs.setdefault(job_uid, {})
        present = {document["metadata"]["uid"] for document in listed}
        for document in listed:
            entry = seen.get(document["metadata"]["uid"])
            # What the watch delivered after the list was asked for is newer, and may be a pod's last words.
            if entry is None or entry.noted_time < list_started:
                seen[document["metadata"]["uid"]] = _Seen(document, list_started)
        for uid, entry in seen.items():
            if uid not in present and entry.gone_time is None and entry.noted_time < list_started:
                entry.gone_time = now
        gone = {uid: e for uid, e in seen.items() if e.gone_time is not None and now - e.gone_time < RETENTION}
        kept = dict(list(gone.items())[-_MAX_GONE_PER_JOB:])
        self._jobs[job_uid] = {uid: entry for uid, entry in seen.items() if entry.gone_time is None or uid in kept}
        return (
            *(observe_pod(document) for document in listed),
            *(observe_pod(entry.document, gone_time=entry.gone_time) for entry in kept.values()),
        )

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._jobs.pop(job_uid, None)
