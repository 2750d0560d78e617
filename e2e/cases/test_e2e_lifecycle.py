"""From `kubectl apply` to a trained checkpoint, and back to nothing."""

from __future__ import annotations

import pytest
from audit import count_writes
from conftest import pods, wait_for_condition, wait_for_job
from jobs import make_job
from kubectl import condition, wait_until

pytestmark = pytest.mark.e2e
MAX_WRITES_PER_JOB = 25


def progress_of(job):
    return job.get("status", {}).get("progress", {})


@pytest.mark.smoke
def test_a_job_runs_from_apply_to_a_checkpoint_and_leaves_nothing(settings, kubectl, assets, submit):
    name = "happy"
    submit(make_job(settings, name, total_steps=6))

    wait_for_condition(kubectl, name, "Validated", timeout_seconds=60)
    job = wait_for_condition(kubectl, name, "ClusterReady", timeout_seconds=300)
    cluster = f"{name}-{job['status']['clusterGeneration']}"
    assert len(pods(kubectl, name, "head")) == 1
    assert len(pods(kubectl, name, "worker")) == 2
    assert kubectl.get("raycluster", cluster)["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]

    job = wait_for_job(kubectl, name, "a step", lambda job: progress_of(job).get("step", 0) >= 1, timeout_seconds=420)
    progress = progress_of(job)
    assert progress["totalSteps"] == 6
    assert progress["tokensPerSecond"] > 0
    row = kubectl.run("get", "rlj", name)
    assert "STEP" in row
    assert "REWARD" in row

    kubectl.run("wait", "--for=condition=Succeeded", f"rljob/{name}", "--timeout=400s", timeout_seconds=420)
    job = kubectl.get("rljob", name)
    status = job["status"]
    assert status["progress"]["step"] == 6
    assert status["checkpoint"]["step"] == 6
    assert status["attempts"][-1]["outcome"] == "Succeeded"
    assert {entry["type"]: entry["status"] for entry in status["conditions"]}["Stalled"] == "False"
    wait_until(
        "the cluster released", lambda: not kubectl.list("rayclusters", f"rljob.io/job={name}"), timeout_seconds=90
    )
    wait_until("the pods gone", lambda: not pods(kubectl, name), timeout_seconds=180)
    assert kubectl.get("rljob", name), "a finished job stays until it is deleted"

    if settings.audit_log is not None:
        writes = count_writes(settings.audit_log, settings.operator_account, job)
        print(f"\nAPI writes: {sum(writes.values())} {dict(writes)}")
        assert 0 < sum(writes.values()) <= MAX_WRITES_PER_JOB, writes

    kubectl.run("delete", "rljob", name, "--wait", timeout_seconds=60)
    for kind in ("rayclusters", "secrets", "configmaps", "networkpolicies"):
        wait_until(
            f"no {kind} left", lambda kind=kind: not kubectl.list(kind, f"rljob.io/job={name}"), timeout_seconds=60
        )


def test_bad_data_ends_the_job_with_the_trainers_own_words(settings, kubectl, assets, submit):
    name = "bad-data"
    submit(make_job(settings, name, total_steps=2, nodes=1, data={"train": ["/data/no-such-file.jsonl"]}))
    job = wait_for_condition(kubectl, name, "Failed", timeout_seconds=420)
    failed = condition(job, "Failed")
    assert failed["reason"] == "InvalidData"
    assert "no-such-file.jsonl" in failed["message"]
    assert "spec.data.train" in failed["message"]
    assert condition(job, "Stalled")["status"] == "True"
    assert job["status"]["attempts"][-1]["number"] == 1, "a data error is not retried"

    def warned():
        events = kubectl.list("events")
        return [e for e in events if e["type"] == "Warning" and "no-such-file.jsonl" in (e.get("message") or "")]

    wait_until("a Warning event with the reason", warned, timeout_seconds=30)
    wait_until(
        "the cluster released", lambda: not kubectl.list("rayclusters", f"rljob.io/job={name}"), timeout_seconds=90
    )


def test_an_unreadable_model_directory_is_named(settings, kubectl, assets, submit):
    name = "bad-model"
    submit(make_job(settings, name, total_steps=2, nodes=1, model={"source": "/data/no-such-model"}))
    failed = condition(wait_for_condition(kubectl, name, "Failed", timeout_seconds=420), "Failed")
    assert failed["reason"] == "InvalidConfiguration"
    assert "spec.model.source" in failed["message"]
    assert "/data/no-such-model" in failed["message"]
