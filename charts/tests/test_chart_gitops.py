"""Argo CD's and Flux's verdicts on an RLJob: the shipped Lua script in Lua 5.1, and kstatus' rules."""

from __future__ import annotations

from typing import Any

import pytest
from argocd import judge_health
from kstatus import compute_status


def make_job(
    *conditions: tuple[str, str, str, str],
    observed_generation: int | None = 2,
    deleting: bool = False,
    status: bool = True,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "apiVersion": "rljob.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "generation": 2},
        "spec": {},
    }
    if deleting:
        document["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    if status:
        document["status"] = {
            "conditions": [
                {"type": kind, "status": value, "reason": reason, "message": message}
                for kind, value, reason, message in conditions
            ]
        }
        if observed_generation is not None:
            document["status"]["observedGeneration"] = observed_generation
    return document


RECONCILING = ("Reconciling", "True", "ClusterStarting", "Waiting for 2 of 3 pods")
NOT_READY = ("Ready", "False", "ClusterStarting", "Waiting for 2 of 3 pods")
READY = ("Ready", "True", "Running", "Training, step 3 of 10")
NOT_STALLED = ("Stalled", "False", "NotStalled", "")
STALLED = ("Stalled", "True", "InvalidData", "spec.data.train[0]: no such file")
FAILED = ("Failed", "True", "InvalidData", "spec.data.train[0]: no such file")
SUSPENDED = ("Suspended", "True", "SuspendedByUser", "Checkpoint of step 4 kept")
SUCCEEDED = ("Succeeded", "True", "Completed", "10 steps")


@pytest.mark.parametrize(
    ("document", "want_health", "want_message", "want_kstatus"),
    [
        pytest.param(make_job(status=False), "Progressing", "operator", "Current", id="the operator has not seen it"),
        pytest.param(
            make_job(READY, observed_generation=1), "Progressing", "generation 2", "InProgress", id="an older verdict"
        ),
        pytest.param(
            make_job(STALLED, observed_generation=1),
            "Progressing",
            "generation 2",
            "InProgress",
            id="an older failure says nothing about the new spec",
        ),
        pytest.param(make_job(READY, deleting=True), "Progressing", "deleted", "Terminating", id="being deleted"),
        pytest.param(
            make_job(NOT_READY, RECONCILING, NOT_STALLED), "Progressing", "2 of 3", "InProgress", id="cluster starts"
        ),
        pytest.param(make_job(READY, NOT_STALLED), "Healthy", "step 3", "Current", id="running"),
        pytest.param(
            make_job(READY, SUSPENDED, NOT_STALLED), "Suspended", "step 4", "Current", id="suspended by the user"
        ),
        pytest.param(make_job(READY, SUCCEEDED, NOT_STALLED), "Healthy", "10 steps", "Current", id="succeeded"),
        pytest.param(
            make_job(NOT_READY, FAILED, STALLED), "Degraded", "InvalidData: spec.data", "Failed", id="failed for good"
        ),
        pytest.param(
            make_job(("Ready", "Unknown", "FirstTouch", "Looking")),
            "Progressing",
            "Looking",
            "InProgress",
            id="unknown",
        ),
    ],
)
def test_verdicts(document: dict[str, Any], want_health: str, want_message: str, want_kstatus: str) -> None:
    health, message = judge_health(document)
    assert (health, compute_status(document)) == (want_health, want_kstatus)
    assert want_message in message
