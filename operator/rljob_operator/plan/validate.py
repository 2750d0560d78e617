"""The Validated condition. A job that cannot run is refused before any child exists."""

from __future__ import annotations

from typing import Final

from rljob_api.findings import Finding, Severity
from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import ConditionType
from rljob_operator.plan.draft import Draft, compute_spec_hash
from rljob_operator.plan.retry import fail_job
from rljob_operator.plan.types import EventType

NOT_SUPPORTED_YET: Final = "NotSupportedYet"
MAX_FINDINGS_SHOWN: Final = 10


def find_refusals(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Errors, and valid fields whose feature is not built: ignoring such a field would train something else."""
    return tuple(f for f in findings if f.severity == Severity.ERROR or f.reason == NOT_SUPPORTED_YET)


def validate_job(draft: Draft) -> None:
    """Judge the spec of this generation.

    A spec edited into something invalid does not harm an attempt that runs from the spec before; it is refused when
    the next attempt would be made from it.
    """
    observed = draft.observed
    if draft.is_terminal:
        return
    refusals = find_refusals(observed.findings)
    is_new_generation = draft.status.observed_generation != observed.generation
    if refusals or observed.spec is None:
        is_unsupported = bool(refusals) and all(f.reason == NOT_SUPPORTED_YET for f in refusals)
        reason = NOT_SUPPORTED_YET if is_unsupported else FailureReason.INVALID_CONFIGURATION.value
        message = format_findings(refusals) if refusals else "spec: could not be read"
        draft.set(ConditionType.VALIDATED, "False", reason, message)
        if draft.status.cluster_generation == 0:
            fail_job(draft, FailureReason.INVALID_CONFIGURATION, message)
        elif is_new_generation:
            text = f"the running attempt keeps the old spec, the next one is refused: {message}"
            draft.record(EventType.WARNING, reason, text)
        return
    draft.set(ConditionType.VALIDATED, "True", "Valid", "every check passed")
    if not is_new_generation:
        return
    warnings = tuple(f for f in observed.findings if f.severity == Severity.WARNING)
    if warnings:
        draft.record(EventType.WARNING, "ConfigurationWarning", format_findings(warnings))
    if draft.is_cluster_in_use and compute_spec_hash(observed.spec) != draft.status.cluster_spec_hash:
        message = f"the change applies from the next cluster on; {draft.cluster_name} keeps the spec it was made from"
        draft.record(EventType.WARNING, "SpecChangeIgnored", message)


def refuse_invalid_spec(draft: Draft) -> bool:
    """Fail a job whose next attempt would be made from an invalid spec; True when it was failed."""
    validated = draft.condition(ConditionType.VALIDATED)
    if validated is None or validated.status == "True":
        return False
    fail_job(draft, FailureReason.INVALID_CONFIGURATION, validated.message)
    return True


def format_findings(findings: tuple[Finding, ...]) -> str:
    """One line per finding, at most ten."""
    lines = [finding.format() for finding in findings[:MAX_FINDINGS_SHOWN]]
    if len(findings) > MAX_FINDINGS_SHOWN:
        lines.append(f"and {len(findings) - MAX_FINDINGS_SHOWN} more")
    return "\n".join(lines)
