"""What a validator says: one shape for the CLI, the operator and the tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rljob_api.v1alpha1.base import StrEnum


class Severity(StrEnum):
    """Error refuses the job; Warning is shown."""

    ERROR = "Error"
    WARNING = "Warning"


class FindingReason(StrEnum):
    """The closed list of reasons."""

    UNKNOWN_FIELD = "UnknownField"
    """A key the schema does not know."""
    MISSING_FIELD = "MissingField"
    """A required key is absent."""
    INVALID_TYPE = "InvalidType"
    """The value has another type than the field."""
    INVALID_VALUE = "InvalidValue"
    """The value is outside what the field accepts."""
    CONFLICT = "Conflict"
    """Two fields contradict each other, or exclude each other."""
    DOES_NOT_DIVIDE = "DoesNotDivide"
    """A size that must divide another one does not."""
    RESERVED = "Reserved"
    """A name, path or variable that belongs to the operator."""
    NO_EFFECT = "NoEffect"
    """A field is set that nothing reads with the other settings."""
    RISKY = "Risky"
    """Accepted, but known to end badly in some setups."""
    NOT_SUPPORTED_YET = "NotSupportedYet"
    """Valid, but the feature is not built."""


@dataclass(frozen=True)
class Finding:
    """One verdict about one field."""

    severity: Severity
    reason: str
    """A `FindingReason`; renderers may add their own CamelCase reasons."""
    path: str
    """Field path, for example `spec.rollout.tensorParallelSize`."""
    message: str
    """The value, the rule and a value that works."""

    def format(self) -> str:
        """`path: message (Reason)`."""
        return f"{self.path}: {self.message} ({self.reason})"


def make_error(path: str, message: str, reason: FindingReason = FindingReason.INVALID_VALUE) -> Finding:
    """A finding that refuses the job."""
    return Finding(Severity.ERROR, reason, path, message)


def make_warning(path: str, message: str, reason: FindingReason = FindingReason.RISKY) -> Finding:
    """A finding that is shown."""
    return Finding(Severity.WARNING, reason, path, message)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding refuses the job."""
    return any(finding.severity is Severity.ERROR for finding in findings)
