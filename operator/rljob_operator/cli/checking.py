"""Read and check RLJobs for the commands: one pipeline, the same rules as the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.catalogue import Catalogue
from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding, FindingReason, has_errors, make_error
from rljob_api.load import LoadError, load_documents, parse_job
from rljob_api.resolve import resolve_job
from rljob_api.rules import check_job
from rljob_api.supported import find_unsupported
from rljob_api.targets import Target
from rljob_api.v1alpha1 import KIND, IPFamily, RLJob
from rljob_operator.render import collect_findings

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True)
class CheckedJob:
    """One RLJob of a file."""

    source: str
    """File name (`-` for standard input)."""
    name: str | None
    """metadata.name, or None when there is none."""
    job: RLJob | None
    """None when it could not be parsed."""
    resolved: ResolvedJob | None
    """Set for a cluster job without errors."""
    findings: list[Finding]
    """Errors first, then warnings, NotSupportedYet among them."""

    @property
    def is_valid(self) -> bool:
        """No error; warnings are no errors."""
        return not has_errors(self.findings)


def read_documents(text: str, source: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    """RLJob documents of a text; documents of other kinds are left to those who understand them."""
    try:
        documents = load_documents(text)
    except LoadError as error:
        return [], [make_error("", str(error))]
    jobs = [document for document in documents if document.get("kind") in (KIND, None)]
    if not jobs:
        kinds = ", ".join(str(document["kind"]) for document in documents)
        found = f"has {kinds}" if kinds else "is empty"
        message = f"{source} {found}, no document of kind {KIND}"
        return [], [make_error("", message, FindingReason.MISSING_FIELD)]
    return jobs, []


def check_document(
    document: Mapping[str, Any],
    source: str,
    *,
    target: Target,
    catalogue: Catalogue,
    ip_family: IPFamily = IPFamily.IPV4,
    model_config: Mapping[str, Any] | None = None,
) -> CheckedJob:
    """Parse, rules, support, and (for a cluster) rendering. `ip_family` serves jobs that leave it open."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    job, findings = parse_job(document)
    if job is None:
        return CheckedJob(source, name, None, None, findings)
    findings = [*findings, *check_job(job, model_config=model_config, target=target), *find_unsupported(job.spec)]
    if has_errors(findings) or target is Target.LOCAL:
        return CheckedJob(source, name, job, None, _sort(findings))
    try:
        resolved = resolve_job(
            job,
            uid=str(job.metadata.get("uid") or PLACEHOLDER_UID),
            catalogue=catalogue,
            target=target,
            ip_family=ip_family if job.spec.network.ip_family is IPFamily.AUTO else job.spec.network.ip_family,
        )
    except ValueError as error:
        return CheckedJob(source, name, job, None, _sort([*findings, make_error("spec", str(error))]))
    findings = _sort([*findings, *collect_findings(resolved, known=findings)])
    return CheckedJob(source, name, job, None if has_errors(findings) else resolved, findings)


def _sort(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.severity)
