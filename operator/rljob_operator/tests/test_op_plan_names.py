"""Names that are in use: what a deleted job of the same name has left, and objects of somebody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_world import NAME, START, World, make_spec

from rljob_operator.plan.types import DeleteCluster, EnsureClusterObjects, ObservedNamesake, ObservedPod, PodRole

CLUSTER = ObservedNamesake(f"{NAME}-1", 1)
HEAD = ObservedNamesake(f"{NAME}-1-head-x2v4k", 1)
WORKER = ObservedNamesake(f"{NAME}-4-worker-7mpzd", 4)


def test_first_cluster_waits_for_what_a_deleted_namesake_has_left():
    """KubeRay takes pods with the label ray.io/cluster=demo-1 for those of any RayCluster demo-1, old or new."""
    world = World(namesakes=(HEAD, WORKER))
    world.wait(30)
    assert world.actions == []
    assert world.status.cluster_generation == 0
    condition = world.condition("ClusterReady")
    assert (condition.status, condition.reason) == ("False", "ReleasingCluster")
    for part in (HEAD.name, WORKER.name, f"deleted RLJob {NAME}"):
        assert part in condition.message
    assert world.last_plan.wake_after_seconds is not None

    world.namesakes = (HEAD,)
    world.wait(10)
    assert world.actions == []
    world.namesakes = ()
    world.settle()
    assert world.created_generations == [1]


@pytest.mark.parametrize(
    ("namesakes", "want"), [((CLUSTER,), 2), ((HEAD,), 2), ((CLUSTER, WORKER), 5), ((ObservedNamesake("stray", 0),), 1)]
)
def test_what_never_goes_away_is_waited_for_once_and_its_numbers_are_never_used(namesakes, want):
    """`kubectl delete --cascade=orphan`, or a pod on a dead node."""
    world = World(spec=make_spec(failurePolicy={"maxRetries": 0}), namesakes=namesakes)
    world.wait(85)
    assert world.created_generations == [], "grace period 30 s and 60 s on top"
    world.wait(10)
    world.run(step=40, checkpoint_step=30)
    assert world.created_generations == [want]
    assert world.status.attempts[0].ray_cluster == f"{NAME}-{want}"

    world.lose_pod(PodRole.WORKER, disruption_reason="PreemptionByScheduler")
    world.wait(30)
    assert world.created_generations == [want, want + 1]
    assert world.state("Running")[0] == "True"
    ours = {want, want + 1}
    assert {action.cluster_generation for action in world.actions if isinstance(action, DeleteCluster)} <= ours


def test_namesakes_do_not_hold_up_a_suspension():
    world = World(spec=make_spec(suspend=True), namesakes=(CLUSTER, HEAD))
    world.settle()
    assert world.state("Suspended")[0] == "True"


def test_own_pods_of_a_lost_status_are_not_run_into_either():
    """The RayCluster is gone, its pods are in their preStop hooks, and the status was cleared by hand."""
    pod = ObservedPod(f"{NAME}-3-head-a", "uid-a", 3, PodRole.HEAD, "Running", ready=True, deleting=True)
    world = World(pods={pod.name: pod}, finishes_deletions=False)
    world.wait(120)
    assert world.created_generations == [4]


def test_a_name_that_belongs_to_somebody_else_is_left_alone_and_the_next_one_is_taken():
    world = World(taken_generations={1, 2})
    world.run()
    assert world.created_generations == [3]
    assert [a.cluster_generation for a in world.actions if isinstance(a, EnsureClusterObjects)] == [1, 2, 3]
    events = [event for event in world.events if event.reason == "NameTaken"]
    assert len(events) == 2
    assert all(f"RayCluster {NAME}-{number} exists" in event.message for number, event in enumerate(events, 1))
    assert (world.status.retries.counted, world.status.retries.free, world.status.failures) == (0, 0, [])
    assert world.state("Running")[0] == "True"
    assert world.posted_attempts == [1]


def test_killing_the_operator_while_a_name_is_taken_changes_nothing_about_the_end():
    for crash_after in range(5):
        world = World(taken_generations={1})
        for _ in range(3):
            world.crash(crash_after)
        world.run()
        assert world.created_generations[-1] == max(world.created_generations)
        assert 1 not in world.created_generations
        assert world.posted_attempts == [1]


def test_a_suspended_job_keeps_quiet_about_a_taken_name():
    world = World(taken_generations={1})
    world.reconcile()
    world.edit_spec(make_spec(suspend=True))
    world.settle()
    assert world.state("Suspended")[0] == "True"
    assert "NameTaken" not in world.event_reasons()


def test_namesakes_are_no_part_of_the_job():
    """Their head never answers for ours: not ready before our own pods are."""
    world = World(namesakes=(HEAD,), starts_pods=False, now=START)
    world.wait(120)
    assert world.created_generations == [2]
    assert world.state("ClusterReady")[0] == "False"
    assert world.posted_attempts == []
    world.starts_pods = True
    world.namesakes = ()
    world.run()
    assert world.posted_attempts == [1]
    assert all(replace(pod, cluster_generation=2) == pod for pod in world.pods.values())
