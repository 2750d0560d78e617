"""Random lives: whatever breaks, and wherever the operator is killed, the invariants hold."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plan_world import TOTAL_STEPS, World, make_spec

from rljob_api.reasons import FailureReason
from rljob_api.v1alpha1.failure import FailureAction
from rljob_api.v1alpha1.status import ConditionType, RLJobStatus
from rljob_operator.plan import plan
from rljob_operator.plan.conditions import is_terminal
from rljob_operator.plan.retry import choose_action
from rljob_operator.plan.times import parse_time
from rljob_operator.plan.types import EnsureClusterObjects, ObservedNamesake, PodRole, SubmitTrainer

POD_STATES = st.sampled_from(
    [
        {},
        {"exit_code": 1},
        {"terminated_reason": "OOMKilled", "exit_code": 137},
        {"disruption_reason": "PreemptionByScheduler"},
        {"status_reason": "Evicted"},
    ]
)


class JobLife(RuleBasedStateMachine):
    """Faults in any order; the checks hang on the world's writes and actions."""

    @initialize(
        max_retries=st.integers(0, 3),
        max_free_retries=st.integers(0, 4),
        keep=st.sampled_from([0, 120]),
        is_running=st.sampled_from([True, True, False]),
        namesakes=st.sampled_from([(), (), (ObservedNamesake("demo-1", 1), ObservedNamesake("demo-2-head-a", 2))]),
        taken_generations=st.frozensets(st.integers(1, 5), max_size=2),
    )
    def begin(self, max_retries, max_free_retries, keep, is_running, namesakes, taken_generations):
        self.policy = {"maxRetries": max_retries, "maxFreeRetries": max_free_retries, "stallTimeoutSeconds": 300}
        self.fields = {"failurePolicy": self.policy, "keepClusterOnFailureSeconds": keep}
        self.world = World(spec=make_spec(**self.fields), namesakes=namesakes, taken_generations=set(taken_generations))
        self.world.on_write = self.check_write
        self.world.on_action = self.check_action
        self.released: dict[int, datetime] = {}
        self.submitted_generations: set[int] = set()
        if is_running:  # most faults need a trainer to hurt
            self.world.wait(100 if namesakes else 1)
            self.world.run()

    # --- what may happen -----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 7, 20, 90, 700]))
    def time_passes(self, seconds):
        self.world.wait(seconds, interval_seconds=max(5.0, seconds / 10))

    @rule(crash_after=st.integers(0, 4))
    def operator_is_killed(self, crash_after):
        self.world.crash(crash_after)

    @rule()
    def one_look(self):
        self.world.reconcile()

    @rule()
    def environment_moves(self):
        self.world.step_environment()

    @rule(stuck=st.booleans())
    def pods_get_stuck_or_loose(self, stuck):
        self.world.finishes_deletions = not stuck

    @rule(up=st.booleans(), trainer_up=st.booleans())
    def network_changes(self, up, trainer_up):
        self.world.is_dashboard_up, self.world.is_trainer_up = up, trainer_up

    @precondition(lambda self: self.world.live_submissions)
    @rule(step=st.integers(1, TOTAL_STEPS), saved=st.booleans())
    def trainer_works(self, step, saved):
        submission = self.world.current
        submission.step = max(submission.step, step)
        submission.checkpoint_step = submission.step if saved else submission.checkpoint_step
        self.world.beat()

    @precondition(lambda self: self.world.live_submissions)
    @rule(code=st.sampled_from([0, 1, 64, 65, 70, 72, 74, 75, 143, -9]), reports=st.booleans())
    def trainer_exits(self, code, reports):
        step = TOTAL_STEPS if code == 0 and reports else None
        self.world.end_trainer(code, step=step, reason="Completed" if reports else "")

    @precondition(lambda self: self.world.live_submissions)
    @rule()
    def trainer_hangs_until_it_is_given_up(self):
        self.world.current.is_hung = True
        self.world.wait(320, interval_seconds=40)

    @precondition(lambda self: self.world.live_submissions)
    @rule()
    def somebody_stops_the_ray_job(self):
        self.world.current.status = "STOPPED"

    @precondition(lambda self: any(p.role == PodRole.WORKER and not p.gone for p in self.world.pods.values()))
    @rule(state=POD_STATES)
    def worker_is_lost(self, state):
        self.world.lose_pod(PodRole.WORKER, **state)

    @precondition(lambda self: any(p.role == PodRole.HEAD and not p.gone for p in self.world.pods.values()))
    @rule(state=POD_STATES)
    def head_is_lost(self, state):
        self.world.lose_pod(PodRole.HEAD, **state)

    @precondition(lambda self: self.world.clusters)
    @rule()
    def cluster_is_deleted(self):
        self.world.delete_cluster(max(self.world.clusters))

    @precondition(lambda self: self.world.clusters)
    @rule(suspended=st.booleans())
    def queue_suspends_or_admits(self, suspended):
        generation = max(self.world.clusters)
        self.world.clusters[generation] = replace(self.world.clusters[generation], suspended=suspended)

    @rule(suspend=st.booleans(), learning_rate=st.sampled_from([1e-6, 2e-6]))
    def user_edits_the_spec(self, suspend, learning_rate):
        spec = make_spec(suspend=suspend, training={"learningRate": learning_rate}, **self.fields)
        if spec != self.world.spec:
            self.world.edit_spec(spec)

    # --- what must hold ------------------------------------------------------------------------------------------

    def check_action(self, action):
        status = self.world.status
        if isinstance(action, EnsureClusterObjects | SubmitTrainer):
            assert not is_terminal(status), "terminal is terminal"
            assert action.cluster_generation == status.cluster_generation, "written before it is done"
            assert action.cluster_generation not in self.released, "a generation is never used again"
        if isinstance(action, EnsureClusterObjects):
            assert action.cluster_generation not in self.submitted_generations, "no second life for a used cluster"
            namesakes = {namesake.cluster_generation for namesake in self.world.namesakes}
            assert action.cluster_generation not in namesakes, "what a namesake has left is kept clear of"
        if isinstance(action, SubmitTrainer):
            assert action.cluster_generation not in self.world.taken_generations, "nobody else's cluster is used"
            assert status.attempts[-1].submission_id == action.submission_id, "written before it is done"
            for key in self.world.live_submissions:
                generation = self.world.submissions[key].cluster_generation
                # Only a pod that will not go away may outlive its grace period and the slack on top.
                is_given_up = generation in self.released and self.measure_released(generation) >= 30 + 60
                assert key == action.submission_id or is_given_up, "never two live submissions"
            self.submitted_generations.add(action.cluster_generation)

    def measure_released(self, generation: int) -> float:
        return (self.world.now - self.released[generation]).total_seconds()

    def check_write(self, old: RLJobStatus, new: RLJobStatus):
        assert new.attempt >= old.attempt
        assert new.cluster_generation >= old.cluster_generation
        assert new.active_seconds >= old.active_seconds
        if is_terminal(old):
            for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED):
                assert self.get(old, kind).status == self.get(new, kind).status, "terminal stays terminal"
            assert (new.attempt, new.cluster_generation) == (old.attempt, old.cluster_generation)
        if new.cluster_released:
            self.released.setdefault(new.cluster_generation, self.world.now)
        for condition in new.conditions:
            before = self.get(old, condition.type)
            assert condition.observed_generation == self.world.generation
            if before is not None and before.status == condition.status:
                assert condition.last_transition_time == before.last_transition_time, "moves only on a flip"
            else:
                assert parse_time(condition.last_transition_time) <= self.world.now
        self.check_counters(old, new)

    def check_counters(self, old: RLJobStatus, new: RLJobStatus):
        policy = self.world.spec.failure_policy
        assert new.retries.counted <= policy.max_retries
        assert new.retries.free <= policy.max_free_retries
        known = [(f.time, f.attempt, f.reason) for f in old.failures]
        fresh = [f for f in new.failures if (f.time, f.attempt, f.reason) not in known]
        actions = [choose_action(FailureReason(f.reason), policy) for f in fresh]
        assert new.retries.counted - old.retries.counted <= actions.count(FailureAction.RETRY)
        assert new.retries.free - old.retries.free <= actions.count(FailureAction.RETRY_FREE)

    @staticmethod
    def get(status: RLJobStatus, kind):
        return next((c for c in status.conditions if c.type == kind), None)

    @invariant()
    def numbers_increase(self):
        if not hasattr(self, "world"):
            return
        posted = self.world.posted_attempts
        assert posted == sorted(set(posted)), "attempt numbers strictly increase, each is posted once"
        numbers = [attempt.number for attempt in self.world.status.attempts]
        assert numbers == sorted(set(numbers))
        assert sum(a.outcome is None for a in self.world.status.attempts) <= 1

    @invariant()
    def kstatus_is_consistent(self):
        if not hasattr(self, "world") or not self.world.status.conditions:
            return
        state = {c.type: c.status for c in self.world.status.conditions}
        assert set(state) == {str(kind) for kind in ConditionType}
        assert [state["Ready"], state["Reconciling"], state["Stalled"]].count("True") == 1
        assert (state["Stalled"] == "True") == (state["Failed"] == "True")
        assert not (state["Succeeded"] == "True" and state["Failed"] == "True")

    @invariant()
    def plan_is_deterministic_and_leaves_its_input_alone(self):
        if not hasattr(self, "world"):
            return
        observed = self.world.observe()
        before = observed.status.model_copy(deep=True)
        assert plan(observed, self.world.now) == plan(observed, self.world.now)
        assert observed.status == before

    def teardown(self):
        """However it went: once faults end, the job comes to a fixed point, and a finished one has given all back."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.finishes_deletions = world.is_dashboard_up = world.is_trainer_up = True
        world.clusters = {key: replace(cluster, suspended=False) for key, cluster in world.clusters.items()}
        world.wait(2000, interval_seconds=60)
        num_writes, num_actions = len(world.written), len(world.actions)
        world.settle()
        assert (len(world.written), len(world.actions)) == (num_writes, num_actions)
        if is_terminal(world.status):
            assert world.clusters == {}
            assert world.live_submissions == []
        elif world.spec.suspend:
            assert world.state("Suspended")[0] == "True"
            assert world.clusters == {}
        else:
            assert world.state("Running")[0] == "True"
            assert len(world.live_submissions) == 1


JobLife.TestCase.settings = settings(
    max_examples=50, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
# Half a minute of CPU; a loaded machine must not turn that into a failure.
TestJobLife = pytest.mark.timeout(1200)(JobLife.TestCase)


def test_killing_the_operator_at_every_point_of_a_life_changes_nothing_about_its_end():
    """Kill it after each step of each look in turn: one cluster, one submission, and the job succeeds."""
    for look in range(8):
        for crash_after in range(5):
            world = World()
            for index in range(12):
                if index == look:
                    world.crash(crash_after)
                else:
                    world.reconcile()
                world.step_environment()
            assert world.state("Running")[0] == "True", (look, crash_after)
            world.end_trainer(0, step=TOTAL_STEPS, reason="Completed")
            world.crash(crash_after)
            world.settle()
            assert world.created_generations == [1], (look, crash_after)
            assert world.posted_attempts == [1], (look, crash_after)
            assert world.state("Succeeded")[0] == "True", (look, crash_after)
            assert world.clusters == {}
