"""All objects of one cluster generation, in the order they are applied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding, Severity
from rljob_operator.render.auth_secret import build_auth_secret
from rljob_operator.render.config_map import build_config_map, check_job_config
from rljob_operator.render.network import check_ip_family
from rljob_operator.render.network_policy import build_network_policy
from rljob_operator.render.ray_cluster import build_ray_cluster
from rljob_operator.render.resources import check_resources
from rljob_operator.render.submission import check_submission
from rljob_operator.render.types import OwnerRef, RenderError, RenderOptions, make_error
from rljob_operator.render.volumes import check_volumes


def render_cluster_objects(
    resolved: ResolvedJob,
    *,
    owner: OwnerRef,
    cluster_generation: int,
    auth_token: str,
    options: RenderOptions | None = None,
) -> list[dict[str, Any]]:
    """Secret, ConfigMap, NetworkPolicy (unless off), RayCluster: what pods need exists before the pods.

    Raises:
        RenderError: `collect_findings` has errors; all of them are in it.
        ValueError: an empty token or a generation below 1.
    """
    options = options or RenderOptions()
    if cluster_generation < 1:
        raise ValueError(f"cluster_generation is {cluster_generation}, the first cluster is 1")
    errors = [finding for finding in collect_findings(resolved, options) if finding.severity is Severity.ERROR]
    if errors:
        raise RenderError(errors)
    objects = [
        build_auth_secret(resolved, owner, cluster_generation, auth_token),
        build_config_map(resolved, owner, cluster_generation),
        build_network_policy(resolved, owner, cluster_generation, options),
        build_ray_cluster(resolved, owner, cluster_generation, options).document,
    ]
    return [document for document in objects if document is not None]


def collect_findings(
    resolved: ResolvedJob, options: RenderOptions | None = None, known: Iterable[Finding] = ()
) -> list[Finding]:
    """What rendering has to say about a job: errors refuse it, warnings name what was changed or dropped.

    What `known` (the findings of `check_job`) already says about a field is not said again.
    """
    said = {(finding.severity, finding.path) for finding in known}
    findings = _collect_all(resolved, options or RenderOptions())
    return [finding for finding in findings if (finding.severity, finding.path) not in said]


def _collect_all(resolved: ResolvedJob, options: RenderOptions) -> list[Finding]:
    findings = (
        check_ip_family(resolved, options)
        + check_resources(resolved)
        + check_volumes(resolved)
        + check_submission(resolved)
        + check_job_config(resolved)
    )
    if any(finding.severity is Severity.ERROR for finding in findings):
        return findings
    owner = OwnerRef(resolved.name, resolved.uid)
    try:
        return findings + build_ray_cluster(resolved, owner, 1, options).findings
    except ValueError as error:
        return [*findings, make_error("InvalidValue", "spec", str(error))]
