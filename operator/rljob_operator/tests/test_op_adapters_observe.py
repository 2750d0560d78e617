"""Documents to observations, and the memory of pods that are gone."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rljob_operator.observe import is_child, observe_namesake, observe_pod, observe_ray_cluster, observe_status
from rljob_operator.plan.types import ObservedNamesake, PodRole
from rljob_operator.pod_history import RETENTION, PodHistory

START = datetime(2026, 1, 1, tzinfo=UTC)


def make_pod(name: str = "p", uid: str = "u", role: str = "worker", **status: Any) -> dict[str, Any]:
    labels = {"rljob.io/job-uid": "job", "rljob.io/cluster-generation": "3", "rljob.io/role": role}
    return {
        "metadata": {"name": name, "uid": uid, "labels": labels},
        "spec": {"containers": [{"name": "ray", "image": "img:1"}, {"name": "sidecar", "image": "side:1"}]},
        "status": status,
    }


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": f"{name}:1", "state": state}


@pytest.mark.parametrize(
    ("case", "status", "want"),
    [
        ("nothing reported yet", {}, {"phase": "Pending", "ready": False, "image": "img:1"}),
        (
            "running and ready",
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
            {"phase": "Running", "ready": True},
        ),
        (
            "no node fits",
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1"}]},
            {"unschedulable_message": "0/1"},
        ),
        (
            "gated, not unschedulable",
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
            {"unschedulable_message": ""},
        ),
        (
            "the image of a sidecar cannot be pulled while the Ray container is being created",
            {
                "containerStatuses": [
                    container("ray", waiting={"reason": "ContainerCreating"}),
                    container("sidecar", waiting={"reason": "ImagePullBackOff", "message": "no such image"}),
                ]
            },
            {"waiting_reason": "ImagePullBackOff", "waiting_message": "no such image", "image": "sidecar:1"},
        ),
        (
            "an init container waits",
            {"initContainerStatuses": [container("init", waiting={"reason": "CreateContainerConfigError"})]},
            {"waiting_reason": "CreateContainerConfigError"},
        ),
        (
            "the Ray container was killed for memory; the sidecar's exit is nobody's concern",
            {
                "containerStatuses": [
                    container("sidecar", terminated={"exitCode": 1, "reason": "Error"}),
                    container("ray", terminated={"exitCode": 137, "reason": "OOMKilled"}),
                ]
            },
            {"exit_code": 137, "terminated_reason": "OOMKilled"},
        ),
        (
            "preempted",
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
            {"disruption_reason": "PreemptionByScheduler"},
        ),
        (
            "a disruption that was called off",
            {"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "PreemptionByScheduler"}]},
            {"disruption_reason": ""},
        ),
        (
            "evicted by the kubelet",
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            {"phase": "Failed", "status_reason": "Evicted", "status_message": "low on memory"},
        ),
    ],
)
def test_pods(case: str, status: dict[str, Any], want: dict[str, Any]):
    pod = observe_pod(make_pod(**status))
    assert {name: getattr(pod, name) for name in want} == want, case
    assert (pod.role, pod.cluster_generation) == (PodRole.WORKER, 3)


def test_a_pod_whose_labels_were_replaced_is_never_taken_for_a_current_one():
    document = make_pod()
    document["metadata"]["labels"] = {"rljob.io/cluster-generation": "x", "ray.io/node-type": "head"}
    pod = observe_pod(document)
    assert (pod.cluster_generation, pod.role) == (0, PodRole.HEAD)


@pytest.mark.parametrize(("text", "want"), [("7", 7), ("99999999", 99999999), ("999999999", 0), ("-1", 0), ("", 0)])
def test_a_generation_label_with_more_digits_than_a_name_has_room_for_is_damaged(text: str, want: int):
    """New clusters are numbered above it: 40 characters of the job's name, a hyphen, 53 in all."""
    document = make_pod()
    document["metadata"]["labels"]["rljob.io/cluster-generation"] = text
    assert observe_pod(document).cluster_generation == want
    assert observe_namesake(document) == ObservedNamesake("p", want)


@pytest.mark.parametrize(
    ("labels", "owners", "want"),
    [
        ({"rljob.io/job-uid": "ours"}, [], True),
        ({}, [{"uid": "ours"}], True),
        ({"rljob.io/job-uid": "old"}, [{"uid": "old"}], False),
        ({"rljob.io/job-uid": "old"}, [], False),
        (None, None, False),
    ],
)
def test_a_child_is_told_by_its_label_or_its_owner(labels: Any, owners: Any, want: bool):
    assert is_child({"metadata": {"name": "x-1", "labels": labels, "ownerReferences": owners}}, "ours") is want


def test_ray_cluster_counts_workers_over_groups_and_hosts():
    cluster = observe_ray_cluster(
        {
            "metadata": {
                "name": "a-3",
                "uid": "u",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "deletionTimestamp": "2026-01-01T00:10:00Z",
                "labels": {"rljob.io/cluster-generation": "3"},
            },
            "spec": {"suspend": True, "workerGroupSpecs": [{"replicas": 2, "numOfHosts": 4}, {"replicas": 1}]},
            "status": {"conditions": [{"type": "HeadPodReady", "status": "False", "reason": "OOMKilled"}]},
        }
    )
    assert (cluster.desired_workers, cluster.suspended, cluster.deleting, cluster.created_time) == (
        9,
        True,
        True,
        START,
    )
    assert cluster.conditions[0].reason == "OOMKilled"


def test_status_of_a_newer_operator_is_read_without_what_is_unknown(caplog: pytest.LogCaptureFixture):
    raw = {
        "attempt": 2,
        "novelty": {"x": 1},
        "attempts": [{"number": 2, "rayCluster": "a-1", "submissionId": "u-2", "flavour": "new"}],
    }
    document = {"metadata": {"namespace": "ns", "name": "a"}, "status": copy.deepcopy(raw)}
    status = observe_status(document)
    assert (status.attempt, status.attempts[0].submission_id) == (2, "u-2")
    assert "novelty" in caplog.text
    assert "attempts.0.flavour" in caplog.text
    assert document["status"] == raw, "the document itself is not touched"


def test_a_job_without_status_starts_from_nothing():
    assert observe_status({"metadata": {}}).attempt == 0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **delta: float) -> datetime:
        self.now += timedelta(**delta)
        return self.now


def test_a_deleted_pod_keeps_the_state_the_watch_delivered_last():
    clock = Clock()
    history = PodHistory(clock)
    history.merge("job", [make_pod(phase="Running")], clock.now)
    last = make_pod(containerStatuses=[container("ray", terminated={"exitCode": 137, "reason": "OOMKilled"})])
    history.note(last, deleted=True)
    replacement = make_pod("p2", "u2", phase="Pending")
    pods = history.merge("job", [replacement], clock.advance(seconds=1))
    assert [(pod.uid, pod.gone, pod.exit_code) for pod in pods] == [("u2", False, None), ("u", True, 137)]


def test_a_pod_whose_deletion_the_watch_missed_is_gone_when_the_list_lacks_it():
    clock = Clock()
    history = PodHistory(clock)
    history.merge("job", [make_pod(phase="Running")], clock.now)
    (pod,) = history.merge("job", [], clock.advance(seconds=1))
    assert pod.gone_time == clock.now
    first_seen_gone = clock.now
    (pod,) = history.merge("job", [], clock.advance(seconds=60))
    assert pod.gone_time == first_seen_gone


def test_a_pod_that_the_watch_delivers_while_an_older_list_is_on_its_way_is_not_gone():
    clock = Clock()
    history = PodHistory(clock)
    history.merge("job", [], clock.now)
    list_started = clock.now
    clock.advance(milliseconds=5)
    history.note(make_pod(phase="Pending"), deleted=False)
    assert history.merge("job", [], list_started) == ()
    (pod,) = history.merge("job", [make_pod(phase="Running")], clock.advance(seconds=1))
    assert not pod.gone


def test_gone_pods_are_forgotten_in_time_and_with_their_job():
    clock = Clock()
    history = PodHistory(clock)
    history.merge("job", [], clock.now)
    history.note(make_pod(), deleted=True)
    assert len(history.merge("job", [], clock.now)) == 1
    clock.advance(seconds=RETENTION.total_seconds() + 1)
    assert history.merge("job", [], clock.now) == ()
    history.note(make_pod(), deleted=True)
    history.forget("job")
    assert history.merge("job", [], clock.now) == ()


def test_the_last_words_of_a_pod_are_not_overwritten_by_an_older_list():
    clock = Clock()
    history = PodHistory(clock)
    history.merge("job", [make_pod(phase="Running")], clock.now)
    list_started = clock.advance(seconds=1)
    clock.advance(milliseconds=5)
    last = make_pod(containerStatuses=[container("ray", terminated={"exitCode": 137, "reason": "OOMKilled"})])
    history.note(last, deleted=True)
    history.merge("job", [make_pod(phase="Running")], list_started)
    pods = history.merge("job", [], clock.advance(seconds=1))
    assert [(pod.gone, pod.exit_code) for pod in pods] == [(True, 137)]


def test_pods_of_other_operators_and_of_jobs_that_are_gone_are_ignored():
    history = PodHistory()
    history.merge("job", [], START)
    document = make_pod()
    document["metadata"]["labels"] = {}
    history.note(document, deleted=True)
    assert history.merge("job", [], START) == ()
    history.forget("job")
    history.note(make_pod(), deleted=True)
    assert history._jobs == {}
