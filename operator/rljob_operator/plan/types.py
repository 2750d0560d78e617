"""What the planner is told and what it answers: plain frozen data, no client types.

`gather` (adapters) fills `Observed`; `plan(observed, now)` answers with a `Plan`; `execute` (adapters) carries it out.

What `gather` owes the planner:

* `status` is at least as new as the last status this process wrote (read it back, or keep the answer of the write).
* `ray_clusters` and `pods` come from the API server or from a synchronised cache: an empty list means "there is none",
  never "not known". When they cannot be read, do not plan.
* `ray_job` and `trainer` are asked for exactly when `questions(observed.name, status)` says so.
* `child_error` is what the last EnsureClusterObjects of the current generation met; a success clears it.
* `memory` is the `memory` of the previous plan for the same UID, `Memory()` after a restart: losing it only makes
  waits start again.

What `execute` owes the planner, in this order:

1. `plan.status` is written when it differs from `observed.status`, with the resource version it was computed from.
   When the write fails, nothing else of the plan happens and `plan.memory` is dropped. A field that became None has
   to vanish from the API (send null in a merge patch, or leave it out of a server-side apply).
2. `plan.events` are recorded (best effort).
3. `plan.actions` run in order; the first failure stops the rest. Every action can be repeated without harm.
4. The next look is due on a watch event or after `plan.wake_after_seconds`, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Final

from rljob_api.contract import Progress, Result
from rljob_api.findings import Finding
from rljob_api.v1alpha1.base import StrEnum
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus

# --- what is seen ------------------------------------------------------------------------------------------------


class PodRole(StrEnum):
    """Label `rljob.io/role`."""

    HEAD = "head"
    WORKER = "worker"


@dataclass(frozen=True)
class ObservedCondition:
    """A metav1.Condition of a child, as it is."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class ObservedRayCluster:
    """One RayCluster that carries the job's UID label, of any generation."""

    name: str
    uid: str
    cluster_generation: int
    """Label `rljob.io/cluster-generation`."""
    created_time: datetime
    desired_workers: int
    """Sum over worker groups of replicas x numOfHosts, from the object's own spec."""
    deleting: bool = False
    """Has a deletionTimestamp."""
    suspended: bool = False
    """`spec.suspend` is true (Kueue, or somebody by hand)."""
    conditions: tuple[ObservedCondition, ...] = ()


@dataclass(frozen=True)
class ObservedPod:
    """One pod that carries the job's UID label, of any generation.

    KubeRay replaces failed pods without a word, and exit codes vanish with them: so a deleted pod stays in the list
    with `gone_time` set and the last state the watch delivered, for at least ten minutes.
    """

    name: str
    uid: str
    cluster_generation: int
    """Label `rljob.io/cluster-generation`."""
    role: PodRole
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    ready: bool = False
    """Condition Ready is True."""
    deleting: bool = False
    """Has a deletionTimestamp."""
    gone_time: datetime | None = None
    """When the watch saw it vanish from the API server; the rest is then its last known state."""
    waiting_reason: str = ""
    """First container or init container that waits, e.g. ImagePullBackOff; empty when none does."""
    waiting_message: str = ""
    image: str = ""
    """Image of that container, else of the Ray container."""
    terminated_reason: str = ""
    """Ray container, current state terminated: OOMKilled, Error, Completed, ContainerStatusUnknown."""
    exit_code: int | None = None
    """Ray container, current state terminated (our pods never restart a container)."""
    unschedulable_message: str = ""
    """Message of PodScheduled=False with reason Unschedulable; empty otherwise."""
    disruption_reason: str = ""
    """Reason of DisruptionTarget=True: PreemptionByScheduler, EvictionByEvictionAPI, DeletionByTaintManager, ..."""
    status_reason: str = ""
    """`status.reason`: Evicted, NodeLost, Preempting, ... (kubelet)."""
    status_message: str = ""
    """`status.message`."""
    node: str = ""

    @property
    def gone(self) -> bool:
        """No longer on the API server."""
        return self.gone_time is not None


@dataclass(frozen=True)
class ObservedNamesake:
    """A RayCluster or pod of another RLJob of this name: that one was deleted, its children outlive it for a while.

    `kubectl delete` and `kubectl apply` in one line, garbage collection that lags behind, or `--cascade=orphan`.
    """

    name: str
    cluster_generation: int
    """Label `rljob.io/cluster-generation`."""


NAME_TAKEN_STATUS: Final = 409


@dataclass(frozen=True)
class ChildError:
    """The API server refused a child object (400, 403, 422), or its name belongs to an object of somebody else (409).

    Conflicts of a write, 429 and 5xx are the executor's to retry and never come here. 403 is asked again (quota, RBAC),
    409 leads to the next cluster generation, the others end the job.
    """

    cluster_generation: int
    """Whose child."""
    kind: str
    name: str
    status_code: int
    message: str

    @property
    def is_name_taken(self) -> bool:
        """Nothing was applied: an object of that name exists and is not this job's."""
        return self.status_code == NAME_TAKEN_STATUS


@dataclass(frozen=True)
class RayJobNotAsked:
    """There was nothing to ask."""


@dataclass(frozen=True)
class RayJobUnreachable:
    """The Jobs API did not answer (refused, timed out, 401, 403, 5xx)."""

    error: str


@dataclass(frozen=True)
class RayJobNotFound:
    """404: the head does not know the submission."""


@dataclass(frozen=True)
class RayJobRejected:
    """The head refused the submission itself with 400; repeating it cannot help."""

    message: str


@dataclass(frozen=True)
class RayJobFound:
    """`GET /api/jobs/<submission id>`."""

    submission_id: str
    status: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    error_type: str = ""
    driver_exit_code: int | None = None
    message: str = ""
    end_time: datetime | None = None
    result: Result | None = None
    """From `find_result` over the end of the log; asked for once the status is terminal."""
    log_error: str = ""
    """Why the log could not be read; then `result` is not known rather than absent."""
    log_tail: str = ""
    """Last lines of the log, at most 4 KiB, once the status is terminal."""


RayJobView = RayJobNotAsked | RayJobUnreachable | RayJobNotFound | RayJobRejected | RayJobFound


@dataclass(frozen=True)
class TrainerNotAsked:
    """There was nothing to ask."""


@dataclass(frozen=True)
class TrainerUnreachable:
    """`GET /v1/progress` did not answer."""

    error: str


TrainerView = TrainerNotAsked | TrainerUnreachable | Progress


@dataclass(frozen=True)
class Memory:
    """What the planner remembers from one call to the next. Losing it is harmless."""

    since: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))
    """Signal -> when it was first seen without a break."""
    heartbeat: str = ""
    """Newest heartbeat time the trainer reported, by its own clock."""
    heartbeat_seen_time: datetime | None = None
    """When that heartbeat was first seen, by our clock: a skewed clock in a pod must not look like a stall."""
    progress_written_time: datetime | None = None
    """When progress was last put into the status."""


@dataclass(frozen=True)
class Observed:
    """Everything one plan is made from."""

    name: str
    namespace: str
    uid: str
    generation: int
    created_time: datetime
    spec: RLJobSpec | None
    """None when it could not be parsed; then `findings` holds errors."""
    findings: tuple[Finding, ...] = ()
    """From parse_job, check_job and find_unsupported (those come as warnings with reason NotSupportedYet)."""
    status: RLJobStatus = field(default_factory=RLJobStatus)
    deleting: bool = False
    """The RLJob has a deletionTimestamp."""
    kuberay_installed: bool = True
    """The API server serves ray.io/v1 RayCluster."""
    ray_clusters: tuple[ObservedRayCluster, ...] = ()
    pods: tuple[ObservedPod, ...] = ()
    namesakes: tuple[ObservedNamesake, ...] = ()
    """RayClusters and pods with the job's name and another UID in their labels: never touched, only kept clear of."""
    child_error: ChildError | None = None
    """Set by a failed EnsureClusterObjects of the current cluster generation."""
    ray_job: RayJobView = RayJobNotAsked()
    trainer: TrainerView = TrainerNotAsked()
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class Questions:
    """What `gather` should ask the job's head."""

    cluster_generation: int
    """Whose head."""
    submission_id: str | None
    """Ask the Jobs API for this submission; None: do not ask."""
    log_wanted: bool
    """When that submission has ended, read the log as well."""
    trainer: bool
    """Ask the trainer for its progress."""


# --- what is done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnsureClusterObjects:
    """Server-side apply of Secret, ConfigMap, NetworkPolicy and, last, RayCluster `<name>-<clusterGeneration>`.

    When one of these names belongs to an object that is not this job's, nothing is applied and the answer is a
    ChildError with status 409.
    """

    cluster_generation: int


@dataclass(frozen=True)
class SubmitTrainer:
    """POST /api/jobs/; "already exists" is success."""

    cluster_generation: int
    attempt: int
    submission_id: str
    resume_floor_step: int


@dataclass(frozen=True)
class RequestStop:
    """POST /v1/stop: checkpoint and exit 143. Failing is harmless: the deadline decides."""

    cluster_generation: int
    deadline_seconds: int


@dataclass(frozen=True)
class StopRayJob:
    """POST /api/jobs/<id>/stop. 404 is success."""

    cluster_generation: int
    submission_id: str


@dataclass(frozen=True)
class DeleteCluster:
    """Delete ConfigMap, Secret, NetworkPolicy and, last, the RayCluster (background), as far as they are this job's.

    404 is success. The RayCluster goes last, so that an interruption is seen as a RayCluster that is still there.
    """

    cluster_generation: int


@dataclass(frozen=True)
class DeleteJob:
    """Delete the RLJob itself (ttlSecondsAfterFinished), with its UID as precondition."""

    uid: str


Action = EnsureClusterObjects | SubmitTrainer | RequestStop | StopRayJob | DeleteCluster | DeleteJob


class EventType(StrEnum):
    """Type of a Kubernetes Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Event:
    """One Event on the RLJob."""

    type: EventType
    reason: str
    message: str
    """At most 1024 characters."""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    status: RLJobStatus
    """The status to write; the very object of `observed.status` when nothing changed."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    memory: Memory = field(default_factory=Memory)
    wake_after_seconds: float | None = None
    """Look again after so long even without a watch event; None: never."""


MAX_EVENT_MESSAGE_LENGTH: Final = 1024
