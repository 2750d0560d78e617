"""What the cases need to know of the cluster they run on, from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Where things are. `e2e/run.py` sets these for the test cluster; set them yourself for your own cluster."""

    kubeconfig: str
    kubectl: str
    namespace: str
    image: str
    image_pull_policy: str
    claim: str
    """A claim the job pods may write to; ReadWriteMany when there are several nodes."""
    site_packages: str | None
    """Directory of the node with the Python environment, mounted into the pods; None: the image holds everything."""
    source: str | None
    """Directory of the node with this repository, mounted with it."""
    audit_log: Path | None
    """The API server's audit log, where it can be read."""
    operator_account: str
    """User name of the operator in the audit log."""
    logs: Path
    """Where logs of a failed case go."""


def load_settings() -> Settings | None:
    """None when no cluster is given."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if not kubeconfig:
        return None
    audit_log = os.environ.get("RLJOB_E2E_AUDIT_LOG")
    return Settings(
        kubeconfig=kubeconfig,
        kubectl=os.environ.get("RLJOB_E2E_KUBECTL", "kubectl"),
        namespace=os.environ.get("RLJOB_E2E_NAMESPACE", "rljob-e2e"),
        image=os.environ.get("RLJOB_E2E_IMAGE", "ghcr.io/rljob/trainer-native:0.1.0"),
        image_pull_policy=os.environ.get("RLJOB_E2E_IMAGE_PULL_POLICY", "IfNotPresent"),
        claim=os.environ.get("RLJOB_E2E_CLAIM", "rljob-checkpoints"),
        site_packages=os.environ.get("RLJOB_E2E_SITE_PACKAGES") or None,
        source=os.environ.get("RLJOB_E2E_SOURCE") or None,
        audit_log=Path(audit_log) if audit_log else None,
        operator_account=os.environ.get("RLJOB_E2E_OPERATOR_ACCOUNT", "system:serviceaccount:rljob-system:rljob"),
        logs=Path(os.environ.get("RLJOB_E2E_LOGS", "e2e/logs")),
    )
