"""The rules by which kstatus (Flux, Helm 4, kpt) judges a custom resource.

A port of `checkGenericProperties` and `checkReadyCondition` of
kubernetes-sigs/cli-utils pkg/kstatus/status/{status,generic,util}.go.
"""

from __future__ import annotations

from typing import Any, Literal

Status = Literal["Terminating", "InProgress", "Failed", "Current"]


def compute_status(document: dict[str, Any]) -> Status:
    """Terminating, InProgress, Failed or Current."""
    metadata, status = document["metadata"], document.get("status", {})
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != metadata.get("generation", 0):
        return "InProgress"
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    # Without a Ready condition kstatus calls a resource Current: the operator must set it on first touch.
    if conditions.get("Ready", "True") != "True":
        return "InProgress"
    return "Current"
