"""Evidence -> reason -> action, one row per kind of failure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from plan_world import START, TOTAL_STEPS, World, make_spec

from rljob_api.reasons import DEFAULT_ACTIONS, FailureReason
from rljob_api.v1alpha1.failure import FailureAction
from rljob_operator.plan import plan, questions
from rljob_operator.plan.backoff import compute_backoff_seconds
from rljob_operator.plan.classify import compute_exit_code
from rljob_operator.plan.retry import choose_action
from rljob_operator.plan.types import (
    DeleteJob,
    ObservedCondition,
    ObservedPod,
    PodRole,
    RayJobFound,
    RayJobRejected,
    StopRayJob,
    SubmitTrainer,
)

IN_PLACE, NEW_CLUSTER, END = "in place", "new cluster", "end"


@dataclass
class Case:
    name: str
    exit_code: int
    want_reason: str
    want: str
    result_reason: str = ""
    error_type: str | None = None
    status: str | None = None
    step: int = 50
    pods: dict[PodRole, dict[str, Any]] = field(default_factory=dict)
    want_free: bool = False
    want_message: str = ""


GONE_WORKER = {PodRole.WORKER: {"gone_time": START}}
CASES = [
    Case("bad configuration ends the job", 64, "InvalidConfiguration", END),
    Case("bad data ends the job", 65, "InvalidData", END),
    Case("unusable checkpoint ends the job", 66, "CheckpointUnusable", END),
    Case("NaN loss ends the job", 72, "NumericalError", END),
    Case("broken reward function ends the job", 73, "RewardFunctionError", END),
    Case("internal error is retried in place", 70, "InternalError", IN_PLACE),
    Case("GPU out of memory is retried in place", 71, "GPUOutOfMemory", IN_PLACE),
    Case("dead engine is retried in place", 74, "EngineDied", IN_PLACE),
    Case("transient error is retried in place", 75, "TransientError", IN_PLACE),
    Case("unknown exit code is a crash", 1, "TrainerCrashed", IN_PLACE, want_message="exit code 1"),
    Case("segmentation fault names its signal", 139, "TrainerCrashed", IN_PLACE, want_message="SIGSEGV"),
    Case("signal as Python reports it", -9, "TrainerCrashed", IN_PLACE, want_message="SIGKILL"),
    Case("the trainer's reason is finer than its exit code", 70, "NoProgress", IN_PLACE, result_reason="NoProgress"),
    Case("a reason nobody knows falls back to the exit code", 75, "TransientError", IN_PLACE, result_reason="Gremlins"),
    Case("SIGTERM that we did not send is a preemption", 143, "Preempted", IN_PLACE, want_free=True),
    Case("SIGTERM as Python reports it", -15, "Preempted", IN_PLACE, want_free=True),
    Case("exit 0 before the last step is no success", 0, "IncompleteTraining", IN_PLACE, result_reason="Completed"),
    Case("exit 0 without any report is no success", 0, "IncompleteTraining", IN_PLACE),
    Case(
        "supervisor died: the head is not trusted", 1, "RayJobLost", NEW_CLUSTER,
        error_type="JOB_SUPERVISOR_ACTOR_DIED", want_free=True,
    ),
    Case("environment of the job failed", 1, "RayJobFailedToStart", IN_PLACE, error_type="RUNTIME_ENV_SETUP_FAILURE"),
    Case("somebody ran `ray job stop`", 1, "StoppedExternally", END, status="STOPPED"),
    Case("stopped through Ray, after a checkpoint", 143, "StoppedExternally", END, "Stopped", status="STOPPED"),
    Case("engine died because a worker vanished", 74, "WorkerLost", NEW_CLUSTER, pods=GONE_WORKER, want_free=True),
    Case("transient error because a worker vanished", 75, "WorkerLost", NEW_CLUSTER, pods=GONE_WORKER, want_free=True),
    Case("bad data stays bad data when a worker vanishes", 65, "InvalidData", END, pods=GONE_WORKER),
    Case(
        "crash because the worker was out of memory", 1, "HostOutOfMemory", NEW_CLUSTER,
        pods={PodRole.WORKER: {"gone_time": START, "terminated_reason": "OOMKilled", "exit_code": 137}},
        want_message="workerResources",
    ),
    Case(
        "crash because a worker was preempted", 1, "Preempted", NEW_CLUSTER,
        pods={PodRole.WORKER: {"deleting": True, "disruption_reason": "PreemptionByScheduler"}}, want_free=True,
    ),
    Case(
        "crash because a worker was evicted by the kubelet", 1, "Evicted", NEW_CLUSTER,
        pods={PodRole.WORKER: {"phase": "Failed", "status_reason": "Evicted", "status_message": "disk pressure"}},
        want_free=True, want_message="disk pressure",
    ),
    Case(
        "exit 143 while the head is drained", 143, "Evicted", NEW_CLUSTER,
        pods={PodRole.HEAD: {"deleting": True, "disruption_reason": "EvictionByEvictionAPI"}}, want_free=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ended_submission(case):
    world = World()
    world.run(step=50, checkpoint_step=30)
    world.end_trainer(case.exit_code, step=case.step, reason=case.result_reason)
    submission = world.current
    submission.error_type = case.error_type if case.error_type is not None else submission.error_type
    if case.status is not None:
        submission.status, submission.exit_code = case.status, None
    for role, changes in case.pods.items():
        changes = {**changes, "gone_time": world.now} if "gone_time" in changes else changes
        world.change_pod(role, ready=False, **changes)
    world.wait(90)

    attempt = world.status.attempts[0]
    assert attempt.reason == case.want_reason
    assert case.want_message in attempt.message
    assert world.status.failures[0].reason == case.want_reason
    if case.want == END:
        assert world.state("Failed") == ("True", case.want_reason)
        assert world.posted_attempts == [1]
        assert world.clusters == {}
    else:
        assert world.posted_attempts == [1, 2]
        assert world.created_generations == ([1] if case.want == IN_PLACE else [1, 2])
        assert (world.status.retries.counted, world.status.retries.free) == ((0, 1) if case.want_free else (1, 0))


@pytest.mark.parametrize(
    ("name", "role", "state", "want_reason"),
    [
        ("head pod deleted", PodRole.HEAD, {"gone_time": START}, "HeadLost"),
        ("head container exits", PodRole.HEAD, {"exit_code": 1, "phase": "Failed"}, "HeadLost"),
        ("head out of memory", PodRole.HEAD, {"exit_code": 137, "terminated_reason": "OOMKilled"}, "HostOutOfMemory"),
        ("head evicted for disk pressure", PodRole.HEAD, {"status_reason": "Evicted", "phase": "Failed"}, "Evicted"),
        ("head on a drained node", PodRole.HEAD, {"disruption_reason": "DeletionByTaintManager"}, "Evicted"),
        ("worker deleted", PodRole.WORKER, {"gone_time": START}, "WorkerLost"),
        ("worker deleting", PodRole.WORKER, {"deleting": True}, "WorkerLost"),
        ("worker container exits", PodRole.WORKER, {"exit_code": 1, "phase": "Failed"}, "WorkerLost"),
        ("worker preempted", PodRole.WORKER, {"disruption_reason": "PreemptionByScheduler"}, "Preempted"),
    ],
)
def test_lost_pod_ends_the_attempt_while_ray_still_says_running(name, role, state, want_reason):
    world = World()
    world.run(step=50, checkpoint_step=30)
    state = {**state, "gone_time": world.now} if "gone_time" in state else state
    world.change_pod(role, ready=False, **state)
    world.reconcile()
    assert world.status.attempts[0].reason == want_reason, name
    assert world.status.cluster_released
    world.wait(60)
    assert world.posted_attempts == [1, 2]
    assert world.created_generations == [1, 2]


def test_pod_that_misses_a_readiness_probe_is_not_lost():
    world = World()
    world.run()
    world.change_pod(PodRole.WORKER, ready=False)
    world.change_pod(PodRole.HEAD, ready=False)
    world.wait(120)
    assert world.posted_attempts == [1]
    assert world.status.failures == []


def test_worker_replaced_behind_our_back_is_noticed_by_its_uid():
    world = World()
    world.run()
    old = next(p for p in world.pods.values() if p.role == PodRole.WORKER)
    del world.pods[old.name]  # the watch missed the deletion altogether
    world._add_pod(1, PodRole.WORKER)
    world.reconcile()
    assert world.status.attempts[0].reason == "WorkerLost"
    assert "was not seen" in world.status.attempts[0].message


def test_pod_that_died_while_the_cluster_started_does_not_count_against_the_attempt():
    world = World(starts_pods=False)
    world.settle()
    world.step_environment()
    world._add_pod(1, PodRole.WORKER)
    early = next(iter(world.pods.values()))
    world.pods[early.name] = replace(early, gone_time=world.now, terminated_reason="OOMKilled", exit_code=137)
    world.starts_pods = True
    world.wait(10)
    world.run()
    world.wait(60)
    assert world.status.failures == []
    assert world.posted_attempts == [1]


def test_root_cause_wins_when_several_pods_are_lost():
    world = World()
    world.run()
    workers = [p for p in world.pods.values() if p.role == PodRole.WORKER]
    world.pods[workers[0].name] = replace(workers[0], phase="Failed", exit_code=1)
    world.pods[workers[1].name] = replace(workers[1], deleting=True, disruption_reason="PreemptionByScheduler")
    world.starts_pods = world.finishes_deletions = False
    world.reconcile()
    assert world.status.attempts[0].reason == "Preempted"


def test_ambiguous_error_waits_for_the_dead_pod_that_explains_it():
    world = World()
    world.run(step=50, checkpoint_step=30)
    world.end_trainer(74)
    world.wait(5)
    assert world.status.failures == []
    world.lose_pod(PodRole.WORKER, disruption_reason="DeletionByTaintManager")
    world.wait(5)
    assert world.status.failures[0].reason == "Evicted"
    assert world.status.retries.counted == 0


def test_verdict_about_the_job_does_not_wait():
    world = World()
    world.run()
    world.end_trainer(65, reason="InvalidData", message="/data/train.jsonl: no such file")
    world.reconcile()
    assert world.state("Failed") == ("True", "InvalidData")


def test_unreadable_log_is_waited_for_since_only_it_holds_the_final_report():
    world = World()
    world.run(step=50)
    world.end_trainer(0)
    world.current.log_error = "timed out"
    world.wait(40)
    assert world.status.failures == []
    world.current.log_error = ""
    world.end_trainer(0, step=TOTAL_STEPS, reason="Completed")
    world.wait(5)
    assert world.state("Succeeded")[0] == "True"


def test_log_that_stays_unreadable_is_not_waited_for_for_ever():
    world = World()
    world.run(step=50)
    world.end_trainer(0)
    world.current.log_error = "timed out"
    world.wait(80)
    assert world.status.failures[0].reason == "IncompleteTraining"
    assert "timed out" in world.status.failures[0].evidence


def test_vanished_job_table_is_a_lost_job_and_not_a_running_one():
    world = World()
    world.run(step=50, checkpoint_step=30)
    world.submissions.clear()
    world.reconcile()
    assert world.status.attempts[0].reason == "RayJobLost"
    world.wait(60)
    assert world.created_generations == [1, 2]
    assert world.status.retries.free == 1


def test_lost_submission_is_posted_again_with_the_same_id():
    world = World()
    world.crash(0)
    world.reconcile()
    world.step_environment()
    world.crash(1)  # attempt 1 is in the status, the POST never happened
    assert world.status.attempt == 1
    assert world.posted_attempts == []
    world.settle()
    assert world.posted_attempts == [1]
    assert world.status.attempt == 1


def test_deleted_raycluster_is_a_free_retry_on_the_next_generation():
    world = World()
    world.run(step=50, checkpoint_step=30)
    world.delete_cluster(1)
    world.wait(60)
    assert world.status.attempts[0].reason == "RayClusterDeleted"
    assert world.created_generations == [1, 2]
    assert world.status.retries.free == 1


def test_suspended_raycluster_is_a_preemption():
    world = World()
    world.run(step=50, checkpoint_step=30)
    world.clusters[1] = replace(world.clusters[1], suspended=True)
    world.wait(60)
    assert world.status.attempts[0].reason == "Preempted"
    assert world.created_generations == [1, 2]


def test_refused_submission_is_retried_and_counted():
    world = World()
    world.settle()
    observed = replace(world.observe(), ray_job=RayJobRejected("entrypoint: wrong type"))
    answer = plan(observed, world.now)
    assert answer.status.attempts[0].reason == "RayJobFailedToStart"
    assert answer.status.retries.counted == 1


def test_stall_stops_the_submission_and_retries_in_place():
    world = World(spec=make_spec(failurePolicy={"stallTimeoutSeconds": 120}))
    world.run(step=50, checkpoint_step=30)
    hung = world.current
    world.beat = lambda: None
    world.wait(110)
    assert world.status.failures == []
    world.wait(60)
    assert world.status.failures[0].reason == "NoProgress"
    assert hung.status == "STOPPED"
    assert world.count(StopRayJob) == 1
    assert world.posted_attempts == [1, 2]
    assert world.created_generations == [1]


def test_stalled_submission_that_cannot_be_stopped_costs_the_cluster():
    world = World(spec=make_spec(failurePolicy={"stallTimeoutSeconds": 60}))
    world.run(step=50, checkpoint_step=30)
    hung = world.current
    world.beat = lambda: None
    world._execute = lambda action, execute=world._execute: None if isinstance(action, StopRayJob) else execute(action)
    world.wait(80)
    assert world.status.failures[0].reason == "NoProgress"
    assert hung.is_live
    assert world.posted_attempts == [1]
    world.wait(120)
    assert not hung.is_live
    assert world.created_generations == [1, 2]
    assert world.posted_attempts == [1, 2]


def test_clock_skew_in_the_pods_is_no_stall():
    world = World(spec=make_spec(failurePolicy={"stallTimeoutSeconds": 60}))
    world.run(step=50)
    # The world's heartbeats are stamped hours behind the operator's clock already; they only have to change.
    world.wait(3600, interval_seconds=20)
    assert world.status.failures == []


def test_short_outage_of_the_head_changes_nothing():
    world = World(spec=make_spec(failurePolicy={"stallTimeoutSeconds": 60}))
    world.run(step=50)
    num_writes = len(world.written)
    world.is_dashboard_up = world.is_trainer_up = False
    world.wait(250)
    world.is_dashboard_up = world.is_trainer_up = True
    world.wait(60)
    assert world.status.failures == []
    assert len(world.written) == num_writes


def test_long_outage_is_shown_and_then_ends_the_attempt():
    world = World(spec=make_spec(failurePolicy={"stallTimeoutSeconds": 900}))
    world.run(step=50, checkpoint_step=30)
    world.is_dashboard_up = world.is_trainer_up = False
    world.wait(320)
    assert world.state("Running") == ("Unknown", "ClusterUnreachable")
    assert world.state("Ready")[0] == "True"
    assert world.event_reasons().count("ClusterUnreachable") == 1
    assert world.status.failures == []
    world.wait(600)
    assert world.status.failures[0].reason == "NoProgress"
    assert "connection refused" in world.status.failures[0].evidence


def test_outage_of_the_dashboard_alone_does_not_touch_a_trainer_that_reports():
    world = World()
    world.run(step=50)
    world.is_dashboard_up = False
    world.wait(3600, interval_seconds=30)
    assert world.state("Running")[0] == "True"
    assert world.status.failures == []


def test_submission_that_never_reports_is_a_startup_timeout():
    world = World(spec=make_spec(failurePolicy={"startupTimeoutSeconds": 300}))
    world.reconcile()
    world.step_environment()
    world.reconcile()
    world.current.has_reported = False
    world.wait(280)
    assert world.status.failures == []
    world.wait(60)
    assert world.status.failures[0].reason == "StartupTimeout"
    assert world.created_generations == [1, 2]


def test_startup_timeout_names_what_the_cluster_waited_for():
    world = World(spec=make_spec(failurePolicy={"startupTimeoutSeconds": 300, "maxRetries": 0}), starts_pods=False)
    world.settle()
    world._add_pod(1, PodRole.HEAD)
    world.change_pod(PodRole.HEAD, phase="Pending", ready=False, unschedulable_message="0/3 nodes: insufficient gpu")
    world.wait(320)
    assert world.state("Failed") == ("True", "StartupTimeout")
    assert "0/3 nodes: insufficient gpu" in world.condition("Failed").message


def test_time_in_a_queue_is_no_startup_time():
    world = World(spec=make_spec(failurePolicy={"startupTimeoutSeconds": 300}))
    world.reconcile()
    world.clusters[1] = replace(world.clusters[1], suspended=True)
    world.wait(7200, interval_seconds=60)
    assert world.state("Admitted") == ("False", "Queued")
    assert world.status.failures == []
    world.clusters[1] = replace(world.clusters[1], suspended=False)
    world.settle()
    assert world.state("Admitted")[0] == "True"
    assert world.state("Running")[0] == "True"


def test_active_deadline_counts_running_time_of_all_attempts_and_is_final():
    rules = [{"onReason": "DeadlineExceeded", "action": "RetryFree"}]
    world = World(spec=make_spec(activeDeadlineSeconds=600, failurePolicy={"rules": rules}))
    world.run(step=20, checkpoint_step=20)
    world.wait(280)
    world.edit_spec(make_spec(activeDeadlineSeconds=600, suspend=True, failurePolicy={"rules": rules}))
    world.settle()
    world.end_trainer(143, reason="Stopped")
    world.wait(86_400, interval_seconds=3600)  # suspended for a day
    world.edit_spec(make_spec(activeDeadlineSeconds=600, failurePolicy={"rules": rules}))
    world.settle()
    world.wait(280)
    assert world.state("Running")[0] == "True"
    world.wait(40)
    assert world.state("Failed") == ("True", "DeadlineExceeded")
    assert "checkpoint: step 20" in world.condition("Failed").message
    assert world.clusters == {}
    assert world.live_submissions == []


def test_unpullable_image_is_shown_first_and_fails_after_its_grace():
    world = World(starts_pods=False)
    world.settle()
    world._add_pod(1, PodRole.HEAD)
    waiting = {"phase": "Pending", "ready": False, "image": "repo/verl:tyop", "waiting_message": "not found"}
    world.change_pod(PodRole.HEAD, waiting_reason="ErrImagePull", **waiting)
    world.wait(30)
    assert world.state("ClusterReady") == ("False", "ErrImagePull")
    assert "repo/verl:tyop: not found" in world.condition("ClusterReady").message
    for _ in range(4):  # kubelet flips between the two
        world.change_pod(PodRole.HEAD, waiting_reason="ImagePullBackOff")
        world.wait(12)
        world.change_pod(PodRole.HEAD, waiting_reason="ErrImagePull")
        world.wait(12)
    assert world.state("Failed") == ("True", "ImagePullFailed")
    assert sum(reason in ("ErrImagePull", "ImagePullBackOff") for reason in world.event_reasons()) == 1
    assert len(world.written) <= 5
    assert world.clusters == {}


def test_image_that_arrives_within_its_grace_is_fine():
    world = World(starts_pods=False)
    world.settle()
    world._add_pod(1, PodRole.HEAD)
    world.change_pod(PodRole.HEAD, phase="Pending", ready=False, waiting_reason="ErrImagePull")
    world.wait(100)
    world.change_pod(PodRole.HEAD, phase="Running", ready=True, waiting_reason="")
    world.starts_pods = True
    world.wait(60)
    assert world.state("Running")[0] == "True"


def test_missing_secret_is_a_pod_configuration_error():
    world = World(starts_pods=False)
    world.settle()
    world._add_pod(1, PodRole.HEAD)
    waiting = {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hf" not found'}
    world.change_pod(PodRole.HEAD, phase="Pending", ready=False, **waiting)
    world.wait(130)
    assert world.state("Failed") == ("True", "PodConfigurationError")
    assert 'secret "hf" not found' in world.condition("Failed").message


def test_refused_child_is_terminal_and_not_a_silent_loop():
    world = World(refuse_children=(422, "metadata.name: too long"))
    world.wait(60)
    assert world.state("Failed") == ("True", "ChildInvalid")
    assert "metadata.name: too long" in world.condition("Failed").message
    assert world.created_generations == []


def test_refused_child_of_an_old_generation_does_not_condemn_the_next():
    rules = [{"onReason": "ChildInvalid", "action": "Retry"}]
    world = World(spec=make_spec(failurePolicy={"rules": rules}), refuse_children=(422, "webhook says no"))
    world.wait(10)
    assert world.status.retries.counted == 1
    world.refuse_children = None
    world.wait(30)
    assert world.state("Running")[0] == "True"
    assert world.status.retries.counted == 1


def test_forbidden_child_is_asked_again_until_quota_comes():
    world = World(refuse_children=(403, "exceeded quota: gpus"))
    world.wait(120)
    assert world.state("ClusterReady") == ("False", "ChildForbidden")
    assert "exceeded quota" in world.condition("ClusterReady").message
    assert world.state("Failed")[0] == "False"
    assert len(world.actions) <= 6
    world.refuse_children = None
    world.wait(60)
    assert world.state("Running")[0] == "True"


def test_operator_without_kuberay_says_so_and_picks_it_up():
    world = World(kuberay_installed=False)
    world.wait(60)
    assert world.actions == []
    assert world.state("ClusterReady") == ("False", "KubeRayNotInstalled")
    assert world.event_reasons() == ["KubeRayNotInstalled"]
    world.kuberay_installed = True
    world.wait(30)
    assert world.state("Running")[0] == "True"


def test_kuberay_that_does_nothing_is_named():
    world = World(starts_pods=False)
    world.wait(90)
    assert world.state("ClusterReady") == ("False", "KubeRayNotReconciling")


def test_quota_that_keeps_kuberay_from_making_pods_is_shown():
    world = World(starts_pods=False)
    world.settle()
    condition = ObservedCondition("ReplicaFailure", "True", "FailedCreateWorkerPod", "exceeded quota: gpu")
    world.clusters[1] = replace(world.clusters[1], conditions=(condition,))
    world.wait(30)
    assert world.state("ClusterReady") == ("False", "ReplicaFailure")
    assert "exceeded quota: gpu" in world.condition("ClusterReady").message


def test_counter_in_a_message_is_not_written_at_every_change():
    spec = make_spec(cluster={"nodes": 200})
    world = World(spec=spec, starts_pods=False)
    world.settle()
    num_writes = len(world.written)
    for _ in range(60):
        world._add_pod(1, PodRole.WORKER)
        world.wait(2, interval_seconds=2)
    assert len(world.written) - num_writes <= 3


def test_five_preemptions_do_not_use_up_one_retry():
    world = World(spec=make_spec(failurePolicy={"maxRetries": 0}))
    world.run(step=10, checkpoint_step=10)
    for count in range(1, 6):
        world.lose_pod(PodRole.WORKER, disruption_reason="PreemptionByScheduler")
        world.wait(400)
        assert world.state("Running")[0] == "True", count
    assert (world.status.retries.counted, world.status.retries.free) == (0, 5)
    world.lose_pod(PodRole.WORKER, disruption_reason="PreemptionByScheduler")
    world.wait(400)
    assert world.state("Failed") == ("True", "Preempted")
    assert "maxFreeRetries = 5" in world.condition("Failed").message


def test_counted_retries_end_the_job_and_release_the_cluster():
    world = World()
    world.run(step=10)
    for _ in range(3):
        world.end_trainer(70, reason="InternalError", message="boom")
        world.wait(120)
    assert world.posted_attempts == [1, 2, 3]
    assert world.state("Failed") == ("True", "InternalError")
    assert "boom; spec.failurePolicy.maxRetries = 2 is used up" in world.condition("Failed").message
    assert world.clusters == {}


def test_failed_cluster_is_kept_for_debugging_but_trains_no_more():
    world = World(spec=make_spec(keepClusterOnFailureSeconds=600, activeDeadlineSeconds=100))
    world.run(step=10)
    world.wait(120)
    assert world.state("Failed") == ("True", "DeadlineExceeded")
    assert set(world.clusters) == {1}
    assert world.live_submissions == []
    world.wait(400, interval_seconds=60)
    assert set(world.clusters) == {1}
    world.wait(200, interval_seconds=60)
    assert world.clusters == {}


def test_ttl_deletes_the_job_after_it_finished():
    world = World(spec=make_spec(ttlSecondsAfterFinished=300))
    world.settle()
    world.end_trainer(0, step=TOTAL_STEPS, reason="Completed")
    world.wait(280)
    assert world.count(DeleteJob) == 0
    world.wait(30)
    assert world.count(DeleteJob) == 1
    assert world.is_job_deleted


def test_rules_override_the_default_action():
    policy = make_spec(failurePolicy={"rules": [
        {"onReason": "NumericalError", "action": "Retry"},
        {"onReason": "TransientError", "action": "RetryFree"},
        {"onReason": "HeadLost", "action": "Fail"},
        {"onReason": "HeadLost", "action": "Retry"},
    ]}).failure_policy  # fmt: skip
    assert choose_action(FailureReason.NUMERICAL_ERROR, policy) == FailureAction.RETRY
    assert choose_action(FailureReason.TRANSIENT_ERROR, policy) == FailureAction.RETRY_FREE
    assert choose_action(FailureReason.HEAD_LOST, policy) == FailureAction.FAIL
    assert choose_action(FailureReason.ENGINE_DIED, policy) == DEFAULT_ACTIONS[FailureReason.ENGINE_DIED]


def test_every_reason_has_a_default_action():
    assert set(DEFAULT_ACTIONS) == set(FailureReason)


@pytest.mark.parametrize(
    ("base_seconds", "retries", "want_seconds"),
    [(10, 1, 10), (10, 2, 20), (10, 6, 320), (10, 7, 600), (10, 1000, 600), (0, 5, 0), (900, 3, 900), (10, 0, 10)],
)
def test_backoff(base_seconds, retries, want_seconds):
    assert compute_backoff_seconds(base_seconds, retries) == want_seconds


def test_backoff_starts_again_when_a_newer_checkpoint_appears():
    world = World(spec=make_spec(failurePolicy={"maxRetries": 10}))
    world.run(step=10, checkpoint_step=10)
    delays = []
    for checkpoint in (10, 10, 10, 20, 20):
        world.current.checkpoint_step = checkpoint
        world.wait(20)
        world.end_trainer(75)
        num_attempts = world.status.attempt
        while world.status.retries.counted <= len(delays):
            world.wait(1, interval_seconds=1)
        delays.append(compute_backoff_seconds(10, world.status.retries.without_progress))
        while world.status.attempt == num_attempts:
            world.wait(1, interval_seconds=1)
        world.wait(20)
    assert delays == [10, 20, 40, 10, 20]


@pytest.mark.parametrize(("driver_exit_code", "want"), [(None, None), (0, 0), (75, 75), (-15, 143), (-9, 137)])
def test_exit_code_as_a_shell_reports_it(driver_exit_code, want):
    assert compute_exit_code(RayJobFound("id", "FAILED", driver_exit_code=driver_exit_code)) == want


def test_report_of_another_attempt_is_not_ours():
    world = World()
    world.reconcile()
    world.step_environment()
    world.reconcile()
    stranger = world.make_report(world.current).model_copy(update={"attempt": 7})
    answer = plan(replace(world.observe(), trainer=stranger), world.now)
    assert answer.status.progress is None
    running = next(c for c in answer.status.conditions if c.type == "Running")
    assert running.status == "False"


def test_exit_code_lost_in_a_pipeline_is_taken_from_the_result_line():
    world = World()
    world.run(step=50)
    world.end_trainer(65, reason="InvalidData", message="/data/train.jsonl: no such file")
    world.current.status, world.current.exit_code = "SUCCEEDED", 0
    world.settle()
    assert world.state("Failed") == ("True", "InvalidData")


def test_life_with_two_retries_stays_within_its_write_budget():
    world = World()
    world.run(step=10, checkpoint_step=10)
    world.end_trainer(75)
    world.wait(60)
    world.lose_pod(PodRole.HEAD)
    world.wait(120)
    world.end_trainer(0, step=TOTAL_STEPS, reason="Completed")
    world.wait(60)
    assert world.state("Succeeded")[0] == "True"
    num_objects = 4  # Secret, ConfigMap, NetworkPolicy, RayCluster: applied once and deleted once per cluster
    num_calls = len(world.written) + 2 * num_objects * len(world.created_generations)
    assert world.created_generations == [1, 2]
    assert num_calls <= 2 * 25
    assert len(world.written) <= 12


@pytest.mark.parametrize(
    ("change", "want_submission", "want_log", "want_trainer"),
    [
        ({}, "5f0c6a52-2a51-4f0e-9f43-2f8a3a1f8d10-1", True, True),
        ({"cluster_released": True}, None, False, False),
        ({"cluster_generation": 2}, None, False, False),
        ({"attempts": []}, None, False, False),
    ],
)
def test_only_what_the_next_plan_can_use_is_asked_for(change, want_submission, want_log, want_trainer):
    world = World()
    world.run()
    asked = questions("demo", world.status.model_copy(update=change))
    assert (asked.submission_id, asked.log_wanted, asked.trainer) == (want_submission, want_log, want_trainer)


def test_ended_attempt_on_a_kept_cluster_is_still_watched_but_not_read():
    world = World()
    world.run()
    world.end_trainer(75)
    world.wait(16)
    asked = questions("demo", world.status)
    assert asked.submission_id is not None
    assert not asked.log_wanted
    assert not asked.trainer


def test_submission_carries_attempt_and_floor():
    world = World()
    world.run(step=40, checkpoint_step=30)
    world.end_trainer(75)
    world.wait(40)
    last = [a for a in world.actions if isinstance(a, SubmitTrainer)][-1]
    assert (last.cluster_generation, last.attempt, last.resume_floor_step) == (1, 2, 30)


def test_observed_pod_knows_when_it_is_gone():
    pod = ObservedPod("p", "u", 1, PodRole.WORKER, "Running")
    assert not pod.gone
    assert replace(pod, gone_time=START).gone
