"""Kubernetes Events on an RLJob, one object per (type, reason, message): a repetition raises its count."""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime
from typing import Any

from rljob_api.names import FIELD_MANAGER
from rljob_operator.adapters.kube import EVENTS, RLJOBS, Kube, KubeError
from rljob_operator.plan.types import MAX_EVENT_MESSAGE_LENGTH, Event

logger = logging.getLogger(__name__)


class EventRecorder:
    """Best effort: an Event that cannot be written is logged, never a reason to stop work on the job."""

    def __init__(self, kube: Kube, instance: str) -> None:
        self._kube = kube
        self._instance = instance

    async def record(self, namespace: str, name: str, uid: str, event: Event) -> None:
        """Create the Event, or count it up when the same one exists."""
        document = build_event(namespace, name, uid, event, self._instance, datetime.now(UTC))
        try:
            await self._create_or_count(document)
        except KubeError as error:
            logger.warning("Event %s on RLJob %s/%s was not recorded: %s", event.reason, namespace, name, error)

    async def _create_or_count(self, document: dict[str, Any]) -> None:
        metadata = document["metadata"]
        try:
            await self._kube.create(document)
            return
        except KubeError as error:
            if not error.is_conflict:
                raise
        current = await self._kube.get(EVENTS, metadata["namespace"], metadata["name"])
        if current is None:  # expired in between: its next occurrence makes a new one
            return
        patch = {"count": int(current.get("count") or 1) + 1, "lastTimestamp": document["lastTimestamp"]}
        await self._kube.merge_patch(EVENTS, metadata["namespace"], metadata["name"], patch)


def build_event(namespace: str, name: str, uid: str, event: Event, instance: str, now: datetime) -> dict[str, Any]:
    """The Event document. Its name is a digest of what it says, so that a repetition finds it."""
    digest = hashlib.sha256("\0".join((uid, event.type, event.reason, event.message)).encode()).hexdigest()
    timestamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{digest[:16]}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": RLJOBS.api_version,
            "kind": RLJOBS.kind,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "type": str(event.type),
        "reason": event.reason,
        "message": event.message[:MAX_EVENT_MESSAGE_LENGTH],
        "count": 1,
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": instance[:128],
    }
