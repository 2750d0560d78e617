"""What every builder takes besides the resolved job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.findings import Finding, Severity
from rljob_api.v1alpha1 import API_VERSION, KIND, IPFamily


@dataclass(frozen=True)
class OwnerRef:
    """The RLJob that owns the children."""

    name: str
    uid: str
    api_version: str = API_VERSION
    kind: str = KIND

    def to_dict(self) -> dict[str, Any]:
        """A controller reference: garbage collection deletes the children with the RLJob."""
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True)
class RenderOptions:
    """Facts about the installation, the same for every job."""

    network_policy: bool = True
    """Render a NetworkPolicy per cluster."""
    operator_namespace: str | None = None
    """Namespace of the operator's pods, admitted to the dashboard and the trainer's server. None: no such rule."""
    operator_pod_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the operator's pods; empty admits every pod of `operator_namespace`."""
    operator_cidrs: tuple[str, ...] = ()
    """Addresses admitted like the operator: API servers (pod proxy) or an operator outside the cluster network."""
    monitoring_namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of namespaces whose pods may scrape metrics. Empty: no such rule."""
    pod_ip_families: tuple[IPFamily, ...] = ()
    """Families of pod addresses in this cluster, primary first. Empty: unknown, the job's is taken as primary."""
    uses_pod_proxy: bool = False
    """The operator reaches heads through the API server's pod proxy, which only knows a pod's primary address."""


class RenderError(ValueError):
    """The job cannot be rendered. Carries every finding of severity Error."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        super().__init__("; ".join(finding.format() for finding in findings))


def make_error(reason: str, path: str, message: str) -> Finding:
    """A finding that refuses the job."""
    return Finding(Severity.ERROR, reason, path, message)


def make_warning(reason: str, path: str, message: str) -> Finding:
    """A finding that is shown."""
    return Finding(Severity.WARNING, reason, path, message)
