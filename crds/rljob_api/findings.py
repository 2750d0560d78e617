"""What a validator says: one shape for the CLI, the operator and the tests."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.base import StrEnum


class Severity(StrEnum):
    """Error refuses the job; Warning is shown."""

    ERROR = "Error"
    WARNING = "Warning"


@dataclass(frozen=True)
class Finding:
    """One verdict about one field."""

    severity: Severity
    reason: str
    """CamelCase, from a closed list: UnknownField, InvalidType, InvalidValue, MissingField, NotSupportedYet, ..."""
    path: str
    """Field path, for example `spec.rollout.tensorParallelSize`."""
    message: str
    """The value, the rule and a value that works."""

    def format(self) -> str:
        """`path: message (Reason)`."""
        return f"{self.path}: {self.message} ({self.reason})"
