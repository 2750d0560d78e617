"""A small pure world around the planner: API server, KubeRay, kubelet, Ray's job table and a trainer, on a fake clock.

It keeps the executor's side of the contract (`rljob_operator.plan.types`) and can crash at any point of it. Nothing
here decides anything the planner should decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rljob_api.contract import Progress, Result, TrainerPhase, TrainerState, Verdict
from rljob_api.findings import Finding
from rljob_api.names import compute_ray_cluster_name
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import CheckpointStatus, Condition, ProgressStatus, RLJobStatus
from rljob_operator.plan import plan, questions
from rljob_operator.plan.times import format_time
from rljob_operator.plan.types import (
    NAME_TAKEN_STATUS,
    Action,
    ChildError,
    DeleteCluster,
    DeleteJob,
    EnsureClusterObjects,
    Event,
    Memory,
    Observed,
    ObservedCondition,
    ObservedNamesake,
    ObservedPod,
    ObservedRayCluster,
    Plan,
    PodRole,
    RayJobFound,
    RayJobNotAsked,
    RayJobNotFound,
    RayJobUnreachable,
    RequestStop,
    StopRayJob,
    SubmitTrainer,
    TrainerNotAsked,
    TrainerUnreachable,
)

START = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
NAME = "demo"
UID = "5f0c6a52-2a51-4f0e-9f43-2f8a3a1f8d10"
TOTAL_STEPS = 100


def make_spec(**overrides: Any) -> RLJobSpec:
    """A small valid job: one head, two workers with a GPU each."""
    document: dict[str, Any] = {
        "model": {"source": "/models/tiny"},
        "data": {"train": ["/data/train.jsonl"]},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "training": {"totalSteps": TOTAL_STEPS},
        "cluster": {"nodes": 2, "gpusPerNode": 1, "terminationGracePeriodSeconds": 30},
        "failurePolicy": {"maxRetries": 2, "maxFreeRetries": 5, "backoffSeconds": 10},
    }
    for key, value in overrides.items():
        document[key] = {**document[key], **value} if isinstance(value, dict) and key in document else value
    return RLJobSpec.model_validate(document)


@dataclass
class Submission:
    """A row of a head's job table, and the trainer process behind it."""

    attempt: int
    cluster_generation: int
    head_uid: str
    resume_floor_step: int
    status: str = "RUNNING"
    exit_code: int | None = None
    error_type: str = ""
    message: str = ""
    result: Result | None = None
    log_error: str = ""
    step: int = 0
    checkpoint_step: int | None = None
    heartbeat: int = 0
    has_reported: bool = True
    is_hung: bool = False

    @property
    def is_live(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


def make_checkpoint(step: int) -> CheckpointStatus:
    """A complete checkpoint."""
    return CheckpointStatus(step=step, path=f"/var/lib/rljob/rl/demo/step-{step}", time=format_time(START))


class CrashError(Exception):
    """The operator dies here."""


@dataclass
class World:
    """Everything outside the planner."""

    spec: RLJobSpec | None = field(default_factory=make_spec)
    now: datetime = START
    generation: int = 1
    findings: tuple[Finding, ...] = ()
    status: RLJobStatus = field(default_factory=RLJobStatus)
    memory: Memory = field(default_factory=Memory)
    is_job_deleted: bool = False
    kuberay_installed: bool = True
    child_error: ChildError | None = None
    refuse_children: tuple[int, str] | None = None
    """Status code and message with which the API server refuses the RayCluster."""
    namesakes: tuple[ObservedNamesake, ...] = ()
    """What a deleted job of the same name has left."""
    taken_generations: set[int] = field(default_factory=set)
    """Somebody else's object has a name of these."""
    clusters: dict[int, ObservedRayCluster] = field(default_factory=dict)
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    submissions: dict[str, Submission] = field(default_factory=dict)
    is_dashboard_up: bool = True
    is_trainer_up: bool = True
    starts_pods: bool = True
    finishes_deletions: bool = True
    actions: list[Action] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    written: list[RLJobStatus] = field(default_factory=list)
    created_generations: list[int] = field(default_factory=list)
    posted_attempts: list[int] = field(default_factory=list)
    last_plan: Plan | None = None
    on_write: Callable[[RLJobStatus, RLJobStatus], None] = lambda old, new: None
    on_action: Callable[[Action], None] = lambda action: None
    _num_pods: int = 0

    # --- what the operator does ----------------------------------------------------------------------------------

    def observe(self) -> Observed:
        asked = questions(NAME, self.status)
        ray_job: Any = RayJobNotAsked()
        trainer: Any = TrainerNotAsked()
        if asked.submission_id is not None:
            ray_job = self._answer_ray(asked.submission_id, log_wanted=asked.log_wanted)
        if asked.trainer and asked.submission_id is not None:
            trainer = self._answer_trainer(asked.submission_id)
        return Observed(
            name=NAME,
            namespace="rl",
            uid=UID,
            generation=self.generation,
            created_time=START,
            spec=self.spec,
            findings=self.findings,
            status=self.status.model_copy(deep=True),
            deleting=self.is_job_deleted,
            kuberay_installed=self.kuberay_installed,
            ray_clusters=tuple(self.clusters.values()),
            pods=tuple(self.pods.values()),
            namesakes=self.namesakes,
            child_error=self.child_error,
            ray_job=ray_job,
            trainer=trainer,
            memory=self.memory,
        )

    def reconcile(self, crash_after: int | None = None) -> Plan:
        """One look. `crash_after` n: die before the write (0), after it (1), after the k-th action (1 + k)."""
        before = self.observe()
        answer = plan(before, self.now)
        self.last_plan = answer
        if crash_after == 0:
            raise CrashError
        if answer.status is not before.status:
            document = answer.status.model_dump(mode="json", exclude_none=True)
            new = RLJobStatus.model_validate(document)
            self.on_write(self.status, new)
            self.status = new
            self.written.append(new)
        self.memory = answer.memory
        self.events.extend(answer.events)
        for index, action in enumerate(answer.actions):
            if crash_after is not None and index + 1 >= crash_after:
                raise CrashError
            self.on_action(action)
            self.actions.append(action)
            self._execute(action)
        if crash_after is not None:
            raise CrashError
        return answer

    def crash(self, crash_after: int) -> None:
        """Die in the middle of a look and come back without memory."""
        try:
            self.reconcile(crash_after)
        except CrashError:
            self.memory = Memory()

    def settle(self, max_looks: int = 12) -> None:
        """Look until nothing happens any more at this moment; the environment moves between looks."""
        for _ in range(max_looks):
            num_written, num_actions = len(self.written), len(self.actions)
            self.reconcile()
            is_quiet = (num_written, num_actions) == (len(self.written), len(self.actions))
            if not self.step_environment() and is_quiet:
                return
        raise AssertionError(f"no fixed point after {max_looks} looks; last plan: {self.last_plan}")

    def wait(self, seconds: float, interval_seconds: float = 5.0) -> None:
        """Let time pass, with a look as often as the planner asks for (at most every `interval_seconds`)."""
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            wake = self.last_plan.wake_after_seconds if self.last_plan is not None else None
            step = interval_seconds if wake is None else max(1.0, min(wake, interval_seconds))
            self.now = min(end, self.now + timedelta(seconds=step))
            self.beat()
            self.settle()

    # --- what the environment does -------------------------------------------------------------------------------

    def step_environment(self) -> bool:
        """KubeRay makes and replaces pods, kubelet finishes deletions; True when something changed."""
        changed = self._finish_deletions() if self.finishes_deletions else False
        return (self._make_pods() if self.starts_pods else False) or changed

    def beat(self) -> None:
        """Every live trainer works on."""
        for submission in self.submissions.values():
            submission.heartbeat += 1 if submission.is_live and not submission.is_hung else 0

    def run(self, step: int = 5, checkpoint_step: int | None = None) -> Submission:
        """Bring the job to a running trainer that reports `step`."""
        self.settle()
        submission = self.current
        submission.step, submission.checkpoint_step, submission.has_reported = step, checkpoint_step, True
        submission.heartbeat += 1
        self.wait(20)
        return submission

    def end_trainer(self, exit_code: int, *, step: int | None = None, reason: str = "", message: str = "") -> None:
        """The driver exits with its result line, if it gives a reason."""
        submission = self.current
        if step is not None:
            submission.step = step
        submission.status = "SUCCEEDED" if exit_code == 0 else "FAILED"
        submission.exit_code = exit_code
        submission.error_type = "" if exit_code == 0 else "JOB_ENTRYPOINT_COMMAND_ERROR"
        if reason:
            verdict = Verdict(exit_code=exit_code, reason=reason, message=message or reason)
            submission.result = Result(verdict=verdict, progress=self.make_report(submission))

    def change_pod(self, role: PodRole, **changes: Any) -> ObservedPod:
        """Change the first living pod of a role."""
        pod = next(p for p in self.pods.values() if p.role == role and not p.gone)
        self.pods[pod.name] = replace(pod, **changes)
        return self.pods[pod.name]

    def lose_pod(self, role: PodRole, **last_state: Any) -> None:
        """A pod vanishes; its last state stays known, as the watch delivered it."""
        pod = self.change_pod(role, ready=False, gone_time=self.now, **last_state)
        self._drop_driver(pod)

    def edit_spec(self, spec: RLJobSpec | None, findings: tuple[Finding, ...] = ()) -> None:
        self.spec, self.findings, self.generation = spec, findings, self.generation + 1

    @property
    def current(self) -> Submission:
        """The newest submission."""
        return list(self.submissions.values())[-1]

    @property
    def live_submissions(self) -> list[str]:
        return [key for key, submission in self.submissions.items() if submission.is_live]

    def condition(self, kind: str) -> Condition:
        return next(c for c in self.status.conditions if c.type == kind)

    def state(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        return self.condition(kind).status, self.condition(kind).reason

    def count(self, kind: type) -> int:
        return sum(isinstance(action, kind) for action in self.actions)

    def event_reasons(self) -> list[str]:
        return [event.reason for event in self.events]

    def make_report(self, submission: Submission) -> Progress:
        moment = format_time(START + timedelta(seconds=submission.heartbeat))
        checkpoint = submission.checkpoint_step
        return Progress(
            job_uid=UID,
            attempt=submission.attempt,
            state=TrainerState.RUNNING,
            phase=TrainerPhase.TRAIN,
            heartbeat_time=moment,
            start_time=format_time(START),
            resumed_from_step=submission.resume_floor_step or None,
            progress=ProgressStatus(step=submission.step, total_steps=TOTAL_STEPS),
            checkpoint=None if checkpoint is None else make_checkpoint(checkpoint),
        )

    # --- inside --------------------------------------------------------------------------------------------------

    def _execute(self, action: Action) -> None:
        match action:
            case EnsureClusterObjects(cluster_generation=generation):
                self._ensure(generation)
            case SubmitTrainer():
                self._submit(action)
            case RequestStop():
                pass  # the trainer's answer is the test's to play
            case DeleteJob():
                self.is_job_deleted = True
            case StopRayJob(submission_id=submission_id):
                submission = self.submissions.get(submission_id)
                if submission is not None and submission.is_live:
                    submission.status = "STOPPED"
            case DeleteCluster(cluster_generation=generation):
                self.delete_cluster(generation)

    def _ensure(self, generation: int) -> None:
        name = compute_ray_cluster_name(NAME, generation)
        if self.refuse_children is not None:
            code, message = self.refuse_children
            self.child_error = ChildError(generation, "RayCluster", name, code, message)
            return
        if generation in self.taken_generations:
            self.child_error = ChildError(generation, "RayCluster", name, NAME_TAKEN_STATUS, "it has no owner")
            return
        self.child_error = None
        if generation not in self.clusters:
            self.created_generations.append(generation)
            self.pods = {p.name: p for p in self.pods.values() if p.cluster_generation != generation or not p.gone}
            nodes = self.spec.cluster.nodes if self.spec is not None else 2
            self.clusters[generation] = ObservedRayCluster(name, f"cluster-{generation}", generation, self.now, nodes)

    def _submit(self, action: SubmitTrainer) -> None:
        head = self._find_head(action.cluster_generation)
        if head is None or not self.is_dashboard_up:
            return  # connection refused: the executor tries again
        known = self.submissions.pop(action.submission_id, None)
        if known is not None and known.head_uid == head.uid:
            self.submissions[action.submission_id] = known  # "already exists"
        else:
            self.posted_attempts.append(action.attempt)
            self.submissions[action.submission_id] = Submission(
                action.attempt,
                action.cluster_generation,
                head.uid,
                action.resume_floor_step,
                step=action.resume_floor_step,
                checkpoint_step=action.resume_floor_step or None,
            )

    def delete_cluster(self, generation: int) -> None:
        """The RayCluster vanishes, its pods begin to terminate."""
        self.clusters.pop(generation, None)
        for pod in list(self.pods.values()):
            if pod.cluster_generation == generation and not pod.gone:
                self.pods[pod.name] = replace(pod, deleting=True, ready=False)

    def _finish_deletions(self) -> bool:
        changed = False
        for pod in list(self.pods.values()):
            if pod.deleting and not pod.gone:
                self.pods[pod.name] = replace(pod, gone_time=self.now)
                self._drop_driver(pod)
                changed = True
        return changed

    def _drop_driver(self, pod: ObservedPod) -> None:
        for submission in self.submissions.values():
            if submission.head_uid == pod.uid and submission.is_live:
                submission.status = "GONE"

    def _make_pods(self) -> bool:
        changed = False
        for generation, cluster in self.clusters.items():
            if cluster.deleting or cluster.suspended:
                continue
            mine = [p for p in self.pods.values() if p.cluster_generation == generation]
            had_head = any(p.role == PodRole.HEAD for p in mine)
            if not had_head:  # disable-provisioned-head-restart: a lost head is not made again
                self._add_pod(generation, PodRole.HEAD)
                changed = True
            for pod in mine:
                if pod.role == PodRole.WORKER and pod.phase == "Failed" and not pod.gone:
                    self.pods[pod.name] = replace(pod, gone_time=self.now)
            living = [p for p in self.pods.values() if p.cluster_generation == generation and not p.gone]
            workers = [p for p in living if p.role == PodRole.WORKER]
            for _ in range(cluster.desired_workers - len(workers)):
                self._add_pod(generation, PodRole.WORKER)
                changed = True
            if not cluster.conditions:
                head_ready = ObservedCondition("HeadPodReady", "True", "HeadPodRunningAndReady")
                self.clusters[generation] = replace(cluster, conditions=(head_ready,))
                changed = True
        return changed

    def _add_pod(self, generation: int, role: PodRole) -> None:
        self._num_pods += 1
        name = f"{NAME}-{generation}-{role}-{self._num_pods}"
        self.pods[name] = ObservedPod(name, f"uid-{self._num_pods}", generation, role, "Running", ready=True)

    def _find_head(self, generation: int) -> ObservedPod | None:
        heads = [p for p in self.pods.values() if p.cluster_generation == generation and p.role == PodRole.HEAD]
        return next((p for p in heads if not p.gone), None)

    def _answer_ray(self, submission_id: str, *, log_wanted: bool) -> Any:
        submission = self.submissions.get(submission_id)
        generation = self.status.cluster_generation
        head = self._find_head(generation)
        if not self.is_dashboard_up or head is None:
            return RayJobUnreachable("connection refused")
        if submission is None or submission.head_uid != head.uid:
            return RayJobNotFound()
        return RayJobFound(
            submission_id,
            submission.status,
            error_type=submission.error_type,
            driver_exit_code=submission.exit_code,
            message=submission.message,
            result=submission.result if log_wanted and not submission.is_live else None,
            log_error=submission.log_error if log_wanted else "",
        )

    def _answer_trainer(self, submission_id: str) -> Any:
        submission = self.submissions.get(submission_id)
        if submission is None or not submission.is_live or not self.is_trainer_up or not submission.has_reported:
            return TrainerUnreachable("connection refused")
        return self.make_report(submission)
