"""Whole lives of a job, told with the pure world."""

from __future__ import annotations

from dataclasses import replace

from plan_world import TOTAL_STEPS, UID, World, make_spec

from rljob_api.findings import Finding, Severity
from rljob_api.v1alpha1.status import ConditionType, PhaseSeconds, ProgressStatus
from rljob_operator.plan.progress import round_statistics
from rljob_operator.plan.types import (
    DeleteCluster,
    EnsureClusterObjects,
    PodRole,
    RequestStop,
    SubmitTrainer,
)


def test_first_look_sets_every_condition_and_begins_the_first_cluster():
    world = World()
    world.reconcile()
    assert {c.type for c in world.status.conditions} == {str(kind) for kind in ConditionType}
    assert all(c.observed_generation == 1 for c in world.status.conditions)
    assert world.status.cluster_generation == 1
    assert world.actions == [EnsureClusterObjects(1)]
    assert world.state("Ready") == ("False", "Creating")
    assert world.state("Reconciling") == ("True", "Creating")


def test_clean_run_takes_four_writes_and_one_submission():
    world = World()
    world.settle()
    num_writes_started = len(world.written)
    world.current.step = TOTAL_STEPS
    world.end_trainer(0, reason="Completed", message="done")
    world.settle()

    assert num_writes_started == 3  # begun, submitted, running
    assert len(world.written) == 4
    assert world.posted_attempts == [1]
    assert world.state("Succeeded") == ("True", "Completed")
    assert world.state("Ready") == ("True", "Completed")
    assert world.state("Stalled")[0] == "False"
    assert world.status.phase == "Succeeded"
    assert world.status.progress.step == TOTAL_STEPS
    assert world.status.attempts[0].outcome == "Succeeded"
    assert world.clusters == {}
    assert world.event_reasons() == ["ClusterCreated", "Submitted", "Running", "Succeeded"]


def test_status_is_written_before_the_action_that_depends_on_it():
    world = World()
    seen = []
    world.on_action = lambda action: seen.append((action, world.status.cluster_generation, world.status.attempt))
    world.settle()
    assert seen == [
        (EnsureClusterObjects(1), 1, 0),
        (SubmitTrainer(1, 1, f"{UID}-1", 0), 1, 1),
    ]


def test_running_job_is_ready_for_kstatus_and_nothing_is_written_while_nothing_changes():
    world = World()
    world.run()
    assert world.state("Ready") == ("True", "TrainerRunning")
    assert world.state("Reconciling")[0] == "False"
    num_writes = len(world.written)
    world.wait(300)
    assert len(world.written) == num_writes


def test_progress_is_written_at_most_every_fifteen_seconds():
    world = World()
    world.run(step=1)
    num_writes = len(world.written)
    for step in range(2, 62):
        world.current.step = step
        world.wait(1, interval_seconds=1)
    assert 3 <= len(world.written) - num_writes <= 4
    world.wait(15)
    assert world.status.progress.step == 61


def test_last_step_is_written_at_once():
    world = World()
    world.run(step=1)
    world.current.step = 2
    world.wait(15)
    world.current.step = TOTAL_STEPS
    world.reconcile()
    assert world.status.progress.step == TOTAL_STEPS


def test_retry_in_place_keeps_the_cluster_and_resumes_from_the_checkpoint():
    world = World()
    world.run(step=40, checkpoint_step=30)
    world.end_trainer(75, reason="TransientError", message="storage timed out")
    world.wait(30)

    assert world.created_generations == [1]
    assert world.posted_attempts == [1, 2]
    assert world.current.resume_floor_step == 30
    assert world.state("Running")[0] == "True"
    assert (world.status.retries.counted, world.status.retries.free) == (1, 0)
    first = world.status.attempts[0]
    assert (first.outcome, first.reason, first.message) == ("Failed", "TransientError", "storage timed out")
    assert world.status.failures[0].attempt == 1


def test_lost_worker_moves_the_job_to_a_new_cluster_without_using_up_retries():
    world = World(spec=make_spec(failurePolicy={"maxRetries": 0}))
    world.run(step=40, checkpoint_step=30)
    world.lose_pod(PodRole.WORKER, disruption_reason="PreemptionByScheduler")
    world.wait(60)

    assert world.created_generations == [1, 2]
    assert world.posted_attempts == [1, 2]
    assert (world.status.retries.counted, world.status.retries.free) == (0, 1)
    assert world.status.attempts[0].reason == "Preempted"
    assert world.status.attempts[1].resumed_from_step == 30
    assert set(world.clusters) == {2}


def test_next_cluster_waits_for_the_pods_of_the_one_before():
    world = World()
    world.run()
    world.finishes_deletions = False
    world.lose_pod(PodRole.HEAD, exit_code=1)
    world.wait(60)
    assert world.created_generations == [1]
    assert world.state("ClusterReady") == ("False", "ReleasingCluster")
    world.finishes_deletions = True
    world.wait(20)
    assert world.created_generations == [1, 2]


def test_pod_that_never_goes_away_holds_the_next_cluster_up_for_its_grace_period_only():
    world = World()
    world.run()
    world.finishes_deletions = False
    world.lose_pod(PodRole.HEAD, exit_code=1)
    world.wait(30 + 60 + 30)
    assert world.created_generations == [1, 2]


def test_suspend_stops_saves_releases_and_resumes_on_a_new_cluster():
    world = World()
    world.run(step=40, checkpoint_step=30)
    world.edit_spec(make_spec(suspend=True))
    world.settle()
    assert world.actions[-1] == RequestStop(1, 30)
    assert world.status.phase == "Suspending"
    assert world.state("Ready")[0] == "False"

    world.current.checkpoint_step = 41
    world.end_trainer(143, step=41, reason="Stopped", message="stopped after a checkpoint")
    world.wait(10)
    assert world.state("Suspended") == ("True", "SuspendedByUser")
    assert world.state("Ready") == ("True", "SuspendedByUser")
    assert world.status.checkpoint.step == 41
    assert world.clusters == {}
    assert world.status.attempts[0].outcome == "Suspended"
    world.wait(3600, interval_seconds=60)
    assert world.created_generations == [1]

    world.edit_spec(make_spec(suspend=False))
    world.settle()
    assert world.created_generations == [1, 2]
    assert world.current.resume_floor_step == 41
    assert (world.status.retries.counted, world.status.retries.free) == (0, 0)
    assert world.status.failures == []


def test_suspended_trainer_that_does_not_stop_loses_its_cluster_after_the_grace_period():
    world = World()
    world.run(step=40, checkpoint_step=30)
    world.edit_spec(make_spec(suspend=True))
    world.wait(30 + 60 - 10)
    assert world.count(DeleteCluster) == 0
    assert world.count(RequestStop) >= 2  # repeated, in case the first was lost
    world.wait(20)
    assert world.state("Suspended")[0] == "True"
    assert "did not stop within 90 s" in world.status.attempts[0].message
    assert world.live_submissions == []


def test_job_created_suspended_creates_nothing():
    world = World(spec=make_spec(suspend=True))
    world.wait(600)
    assert world.actions == []
    assert world.state("Suspended")[0] == "True"
    assert len(world.written) == 1


def test_suspending_a_starting_cluster_deletes_it_and_its_number_is_not_used_again():
    world = World(starts_pods=False)
    world.settle()
    world.edit_spec(make_spec(suspend=True))
    world.settle()
    assert world.clusters == {}
    assert world.state("Suspended")[0] == "True"
    world.edit_spec(make_spec())
    world.settle()
    assert world.created_generations == [1, 2]


def test_taking_suspend_back_while_stopping_goes_on_in_place():
    world = World()
    world.run(step=40, checkpoint_step=30)
    world.edit_spec(make_spec(suspend=True))
    world.settle()
    world.edit_spec(make_spec(suspend=False))
    world.settle()
    world.end_trainer(143, reason="Stopped")
    world.wait(20)
    assert world.created_generations == [1]
    assert world.posted_attempts == [1, 2]
    assert world.state("Suspended")[0] == "False"


def test_trainer_that_finishes_while_stopping_has_succeeded():
    world = World()
    world.run(step=99)
    world.edit_spec(make_spec(suspend=True))
    world.settle()
    world.end_trainer(0, step=TOTAL_STEPS, reason="Completed")
    world.settle()
    assert world.state("Succeeded")[0] == "True"
    assert world.state("Suspended")[0] == "False"


def test_invalid_job_fails_before_any_child_exists():
    finding = Finding(
        Severity.ERROR, "InvalidValue", "spec.rollout.tensorParallelSize", "3 does not divide 2; use 1 or 2"
    )
    world = World(findings=(finding,))
    world.wait(60)
    assert world.actions == []
    assert world.state("Validated") == ("False", "InvalidConfiguration")
    assert world.state("Failed") == ("True", "InvalidConfiguration")
    assert world.state("Stalled")[0] == "True"
    assert "use 1 or 2" in world.condition("Failed").message
    assert len(world.written) == 1
    assert world.event_reasons() == ["InvalidConfiguration"]


def test_unsupported_field_is_refused_and_not_ignored():
    finding = Finding(Severity.WARNING, "NotSupportedYet", "spec.model.lora", "LoRA is not built yet; leave it out")
    world = World(findings=(finding,))
    world.settle()
    assert world.actions == []
    assert world.state("Validated") == ("False", "NotSupportedYet")
    assert world.state("Failed") == ("True", "InvalidConfiguration")


def test_unreadable_spec_is_refused():
    world = World(spec=None, findings=(Finding(Severity.ERROR, "UnknownField", "spec.rolout", "unknown"),))
    world.settle()
    assert world.actions == []
    assert world.state("Failed")[0] == "True"


def test_warnings_are_told_once():
    world = World(findings=(Finding(Severity.WARNING, "ApproximateRatio", "spec.rollout.topP", "0.9 is approximate"),))
    world.run()
    assert world.event_reasons().count("ConfigurationWarning") == 1
    assert world.state("Running")[0] == "True"


def test_terminal_job_ignores_everything():
    world = World()
    world.settle()
    world.end_trainer(64, reason="InvalidConfiguration", message="spec.model.source: /models/tiny is no directory")
    world.settle()
    assert world.state("Failed") == ("True", "InvalidConfiguration")
    assert "is no directory" in world.condition("Failed").message
    num_actions = len(world.actions)
    world.edit_spec(make_spec(model={"source": "/models/other"}))
    world.wait(3600, interval_seconds=60)
    world.edit_spec(make_spec(suspend=True))
    world.wait(60)
    assert len(world.actions) == num_actions
    assert world.state("Failed") == ("True", "InvalidConfiguration")
    assert world.status.observed_generation == 3


def test_edited_spec_waits_for_the_next_cluster_and_the_user_is_told_once():
    world = World()
    world.run()
    world.edit_spec(make_spec(training={"learningRate": 1e-5}))
    world.wait(60)
    assert world.created_generations == [1]
    assert world.event_reasons().count("SpecChangeIgnored") == 1
    assert world.status.observed_generation == 2
    world.end_trainer(75)
    world.wait(60)
    assert world.created_generations == [1, 2]


def test_policy_edits_take_effect_at_once_and_need_no_new_cluster():
    world = World()
    world.run()
    world.edit_spec(make_spec(failurePolicy={"maxRetries": 0}))
    world.settle()
    assert "SpecChangeIgnored" not in world.event_reasons()
    world.end_trainer(70)
    world.wait(20)
    assert world.state("Failed") == ("True", "InternalError")
    assert "maxRetries = 0" in world.condition("Failed").message


def test_spec_fixed_while_the_cluster_cannot_start_replaces_the_cluster():
    world = World()
    world.starts_pods = False
    world.settle()
    world.edit_spec(make_spec(cluster={"image": "repo/right:1"}))
    world.starts_pods = True
    world.settle()
    assert world.created_generations == [1, 2]
    assert world.state("Running")[0] == "True"
    assert world.status.retries.counted + world.status.retries.free == 0


def test_spec_made_invalid_while_running_hurts_only_the_next_attempt():
    world = World()
    world.run()
    bad = Finding(Severity.ERROR, "InvalidValue", "spec.training.promptsPerStep", "0 is not positive; use 128")
    world.edit_spec(make_spec(training={"learningRate": 1e-5}), (bad,))
    world.wait(60)
    assert world.state("Running")[0] == "True"
    assert world.state("Validated") == ("False", "InvalidConfiguration")
    assert world.event_reasons().count("InvalidConfiguration") == 1
    world.end_trainer(75)
    world.wait(60)
    assert world.posted_attempts == [1]
    assert world.state("Failed") == ("True", "InvalidConfiguration")
    assert world.clusters == {}


def test_deleting_job_is_left_to_garbage_collection():
    world = World()
    world.run()
    num_writes, num_actions = len(world.written), len(world.actions)
    world.is_job_deleted = True
    world.delete_cluster(1)
    world.settle()
    assert (len(world.written), len(world.actions)) == (num_writes, num_actions)
    assert world.last_plan.wake_after_seconds is None


def test_lost_status_never_leads_to_two_clusters_or_two_trainers():
    world = World()
    world.run()
    world.status = type(world.status)()
    world.on_action = lambda action: None if not isinstance(action, EnsureClusterObjects) else _assert_empty(world)
    world.settle()
    assert len(world.clusters) == 1
    assert len(world.live_submissions) == 1


def test_cluster_that_cannot_be_deleted_does_not_lend_its_name_to_the_next():
    world = World()
    world.run()
    stuck = world.clusters[1]
    world.status = type(world.status)()
    for _ in range(40):
        world.clusters[1] = replace(stuck, deleting=True)
        world.wait(5)
    assert world.created_generations == [1, 2]


def _assert_empty(world):
    assert world.clusters == {}


def test_statistics_are_stored_with_four_significant_digits():
    exact = ProgressStatus(
        step=12345, tokens_per_second=6154.743762556613, reward_mean=0.8125, phase_seconds=PhaseSeconds(rollout=1 / 3)
    )
    rounded = round_statistics(exact)
    assert rounded.step == 12345
    assert rounded.tokens_per_second == 6155
    assert rounded.reward_mean == 0.8125
    assert rounded.phase_seconds == PhaseSeconds(rollout=0.3333)
