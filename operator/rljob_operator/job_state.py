"""What this process remembers of a job between reconciles. Losing all of it is harmless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rljob_operator.plan.types import ChildError, Memory, RayJobRejected
from rljob_operator.validate import ValidatedJob

MAX_SNAPSHOT_AGE_SECONDS: Final = 60.0
"""A lost watch event is made up for after so long."""


@dataclass(frozen=True)
class Snapshot:
    """A job and its children as read together from the API server.

    A poll of the trainer every few seconds needs no new reads as long as no watch event came in: a thousand running
    jobs would otherwise cost hundreds of list calls a second.
    """

    document: Mapping[str, Any]
    """The RLJob: its resource version guards the status write."""
    ray_clusters: tuple[Mapping[str, Any], ...] | None
    """None: RayCluster is not a kind of this API server."""
    pods: tuple[Mapping[str, Any], ...]
    namesakes: tuple[Mapping[str, Any], ...]
    """RayClusters and pods of a deleted RLJob of the same name."""
    list_started: datetime
    """When the pods were asked for."""
    read_at: float
    """Monotonic time of the read, seconds."""
    num_events: int
    """Watch events of this job before the read."""

    def is_current(self, num_events: int, now: float) -> bool:
        """Whether nothing happened since, as far as is known. No event tells that KubeRay was installed."""
        if self.ray_clusters is None:
            return False
        return self.num_events == num_events and now - self.read_at < MAX_SNAPSHOT_AGE_SECONDS


@dataclass
class JobState:
    """One RLJob, by UID."""

    uid: str
    memory: Memory = field(default_factory=Memory)
    """The planner's."""
    snapshot: Snapshot | None = None
    """The newest read; None: read again."""
    validated: ValidatedJob | None = None
    """Verdict on the newest generation seen."""
    child_error: ChildError | None = None
    """The newest refusal of a child object."""
    child_error_generation: int = 0
    """Generation of the spec it was rendered from: another spec may be accepted."""
    rejections: dict[str, RayJobRejected] = field(default_factory=dict)
    """Submissions the head refused with 400, by id."""
    tokens: dict[int, str] = field(default_factory=dict)
    """Ray token by cluster generation, as stored in the Secret."""

    def find_child_error(self, generation: int) -> ChildError | None:
        """The refusal, while it still concerns the spec as it is now."""
        return self.child_error if self.child_error_generation == generation else None
