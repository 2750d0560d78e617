"""Lost pods, suspension, a restarted operator: the job goes on from its checkpoint."""

from __future__ import annotations

import pytest
from conftest import OPERATOR_NAMESPACE, pods, wait_for_condition, wait_for_job
from jobs import make_job
from kubectl import condition, wait_until

pytestmark = pytest.mark.e2e
LONG = 24


def wait_for_checkpoint(kubectl, name, step):
    def reached(job):
        return job.get("status", {}).get("checkpoint", {}).get("step", 0) >= step

    job = wait_for_job(kubectl, name, f"checkpoint {step}", reached, timeout_seconds=500)
    return job["status"]["checkpoint"]


@pytest.mark.parametrize("role", ["worker", "head"])
def test_a_lost_pod_starts_the_next_attempt_from_the_checkpoint(settings, kubectl, assets, submit, role):
    name = f"lost-{role}"
    submit(make_job(settings, name, total_steps=LONG))
    checkpoint = wait_for_checkpoint(kubectl, name, 2)
    victim = pods(kubectl, name, role)[0]["metadata"]["name"]
    kubectl.run("delete", "pod", victim, "--grace-period=0", "--force", "--wait=false")

    wait_for_job(kubectl, name, "attempt 2", lambda job: job["status"].get("attempt", 0) >= 2, timeout_seconds=240)
    job = wait_for_condition(kubectl, name, "Succeeded", timeout_seconds=700)
    first, last = job["status"]["attempts"][0], job["status"]["attempts"][-1]
    assert first["reason"] in ("WorkerLost", "HeadLost", "RayJobLost", "Evicted", "Preempted"), first
    assert last["resumedFromStep"] >= checkpoint["step"]
    assert job["status"]["progress"]["step"] == LONG
    assert job["status"]["retries"]["free"] == 1, "a lost pod does not use up maxRetries"
    assert job["status"]["retries"].get("counted", 0) == 0


def test_suspend_checkpoints_releases_and_resumes(settings, kubectl, assets, submit):
    name = "suspended"
    submit(make_job(settings, name, total_steps=LONG))
    wait_for_checkpoint(kubectl, name, 2)
    kubectl.run("patch", "rljob", name, "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    job = wait_for_condition(kubectl, name, "Suspended", timeout_seconds=240)
    step = job["status"]["checkpoint"]["step"]
    wait_until("no pod left", lambda: not pods(kubectl, name), timeout_seconds=180)
    kubectl.run("patch", "rljob", name, "--type=merge", "--patch", '{"spec":{"suspend":false}}')
    job = wait_for_condition(kubectl, name, "Succeeded", timeout_seconds=700)
    assert condition(job, "Suspended")["status"] == "False"
    assert job["status"]["attempts"][-1]["resumedFromStep"] >= step
    assert job["status"]["retries"].get("counted", 0) == 0


def test_the_operator_may_die_while_a_job_runs(settings, kubectl, assets, submit):
    name = "orphan"
    submit(make_job(settings, name, total_steps=LONG, nodes=1))
    wait_for_checkpoint(kubectl, name, 2)
    selector = "app.kubernetes.io/name=rljob"
    words = ("delete", "pods", "--namespace", OPERATOR_NAMESPACE, "--selector", selector, "--grace-period=0", "--force")
    kubectl.run(*words, timeout_seconds=120)
    job = wait_for_condition(kubectl, name, "Succeeded", timeout_seconds=600)
    assert job["status"]["attempt"] == 1
    assert job["status"]["clusterGeneration"] == 1
