"""Every check that needs no cluster, in one go, before any child exists. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.catalogue import Catalogue
from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding, has_errors, make_error
from rljob_api.load import parse_job
from rljob_api.resolve import resolve_job
from rljob_api.rules import check_job
from rljob_api.supported import find_unsupported
from rljob_api.targets import Target
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.render import RenderOptions, collect_findings


@dataclass(frozen=True)
class ValidatedJob:
    """A job document and the verdict on it."""

    generation: int
    """Generation of the document."""
    spec: RLJobSpec | None
    """None when it could not be parsed."""
    resolved: ResolvedJob | None
    """What is rendered; None when there are errors."""
    findings: tuple[Finding, ...]
    """Schema, rules, unsupported features, rendering."""


def validate_document(
    document: Mapping[str, Any], *, catalogue: Catalogue, ip_family: IPFamily, options: RenderOptions
) -> ValidatedJob:
    """Parse, check and resolve an RLJob of the API server.

    Args:
        document: the whole object; its status is not looked at.
        catalogue: images and versions.
        ip_family: family for a job that leaves it open; IPv4 or IPv6.
        options: facts about the installation that rendering needs.
    """
    metadata = document["metadata"]
    generation = int(metadata.get("generation") or 0)
    job, findings = parse_job(
        {
            "apiVersion": document["apiVersion"],
            "kind": document["kind"],
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "spec": document.get("spec") or {},
        }
    )
    if job is None:
        return ValidatedJob(generation, None, None, tuple(findings))
    findings = [*findings, *check_job(job, target=Target.KUBERNETES), *find_unsupported(job.spec)]
    if has_errors(findings):
        return ValidatedJob(generation, job.spec, None, tuple(findings))
    try:
        resolved = resolve_job(
            job,
            uid=metadata["uid"],
            catalogue=catalogue,
            target=Target.KUBERNETES,
            ip_family=ip_family if job.spec.network.ip_family is IPFamily.AUTO else job.spec.network.ip_family,
        )
    except ValueError as error:
        return ValidatedJob(generation, job.spec, None, (*findings, make_error("spec", str(error))))
    findings = [*findings, *collect_findings(resolved, options, known=findings)]
    return ValidatedJob(generation, job.spec, None if has_errors(findings) else resolved, tuple(findings))
