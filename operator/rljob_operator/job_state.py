"""What this process remembers of a job between reconciles. Losing all of it is harmless."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_operator.plan.types import ChildError, Memory, RayJobRejected
from rljob_operator.validate import ValidatedJob


@dataclass
class JobState:
    """One RLJob, by UID."""

    uid: str
    memory: Memory = field(default_factory=Memory)
    """The planner's."""
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
