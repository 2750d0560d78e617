"""`RLJob.status`. Undefined statistics are absent, never NaN."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rljob_api.v1alpha1.base import ApiModel, StrEnum

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Message = Annotated[str, Field(max_length=4096)]
Reason = Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", min_length=1, max_length=1024)]


def _drop_undefined(value: Any) -> Any:
    """NaN and infinities are not JSON: the API server refuses the whole status patch for one of them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Statistic = Annotated[float | None, BeforeValidator(_drop_undefined)]
"""A statistic; absent where it is undefined."""


class ConditionType(StrEnum):
    """Condition types of an RLJob."""

    VALIDATED = "Validated"
    ADMITTED = "Admitted"
    CLUSTER_READY = "ClusterReady"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    CHECKPOINT_AVAILABLE = "CheckpointAvailable"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


class Phase(StrEnum):
    """One-word summary for display; conditions are the contract."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RETRYING = "Retrying"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(ApiModel):
    """A metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Condition type."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation the condition was computed from."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Reason
    """CamelCase reason from a closed list."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """For people."""


class PhaseSeconds(ApiModel):
    """Where the last step's time went, in seconds."""

    rollout: Statistic = None
    """Generation."""
    reward: Statistic = None
    """Waiting for rewards after generation ended."""
    train: Statistic = None
    """Log-probabilities, advantages and updates."""
    sync: Statistic = None
    """Weight hand-over to the engines."""
    checkpoint: Statistic = None
    """Saving."""


class ProgressStatus(ApiModel):
    """Training progress; written at most every 15 seconds."""

    step: Count = 0
    """Finished steps."""
    total_steps: Count | None = None
    """Steps of the whole run."""
    epoch: Statistic = None
    """Passes over the training prompts so far."""
    reward_mean: Statistic = None
    """Mean reward of the last step's samples."""
    evaluation_reward_mean: Statistic = None
    """Mean reward of the last held-out evaluation."""
    kl_mean: Statistic = None
    """KL to the reference (or to the rollout policy when there is none), nats per token."""
    entropy: Statistic = None
    """Mean token entropy, nats."""
    response_tokens_mean: Statistic = None
    """Mean response length, tokens."""
    tokens_per_second: Statistic = None
    """Prompt and response tokens of the step / step seconds."""
    tokens_per_second_per_gpu: Statistic = Field(default=None, alias="tokensPerSecondPerGPU")
    """The same per rank."""
    step_seconds: Statistic = None
    """Wall time of the last step."""
    phase_seconds: PhaseSeconds | None = None
    """Where it went."""
    weight_version: Count | None = None
    """Version of the weights the engines hold."""
    estimated_completion_time: Time | None = None
    """Estimate from recent steps."""
    updated_time: Time | None = None
    """When the trainer reported this."""


class CheckpointStatus(ApiModel):
    """The newest complete checkpoint."""

    step: Count
    """Step it was taken after."""
    path: Annotated[str, Field(max_length=2048)]
    """Directory in the pods."""
    time: Time
    """When it was published."""


class AttemptStatus(ApiModel):
    """One submission of the trainer."""

    number: Count
    """1, 2, ..."""
    ray_cluster: Annotated[str, Field(max_length=63)]
    """RayCluster it ran on."""
    submission_id: Annotated[str, Field(max_length=128)]
    """Ray Jobs submission id."""
    start_time: Time | None = None
    """When it was submitted."""
    end_time: Time | None = None
    """When it ended."""
    outcome: Annotated[str, Field(max_length=32)] | None = None
    """Succeeded, Failed, Suspended or Superseded; absent while it runs."""
    reason: Annotated[str, Field(max_length=63)] | None = None
    """Failure reason."""
    message: Message | None = None
    """Failure message."""
    resumed_from_step: Count | None = None
    """Checkpoint step it started from; absent when it started from the beginning."""
    head_pod_uid: Annotated[str, Field(max_length=63)] | None = None
    """UID of the head pod it was submitted to; another UID later means the driver is lost."""
    worker_pods_hash: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the worker pods' UIDs at submission; another hash later means a worker was replaced."""
    stop_requested_time: Time | None = None
    """When the operator asked it to stop (suspension); exit 143 is then no failure."""


class RetriesStatus(ApiModel):
    """Retries so far."""

    counted: Count = 0
    """Against failurePolicy.maxRetries."""
    free: Count = 0
    """Infrastructure and preemption; against failurePolicy.maxFreeRetries."""
    without_progress: Count = 0
    """Retries in a row without a newer checkpoint; the delay doubles with each."""
    checkpoint_step: Count = 0
    """Checkpoint step at the last retry; 0 when there was none."""


class FailureStatus(ApiModel):
    """One classified failure."""

    reason: Annotated[str, Field(max_length=63)]
    """Failure reason."""
    evidence: Message
    """What was seen."""
    attempt: Count
    """Attempt it ended."""
    time: Time
    """When it was seen."""


class GoodputStatus(ApiModel):
    """GPU time spent and what of it led to the current state."""

    gpu_seconds: float = 0.0
    """GPUs x running seconds over all attempts."""
    useful_gpu_seconds: float = 0.0
    """The part whose steps were not lost."""


class RLJobStatus(ApiModel):
    """Observed state; written by the operator only, and only when it changed."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec this status was computed from."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=32, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = []
    """Conditions."""
    phase: Phase | None = None
    """Display only."""
    cluster_generation: Count = 0
    """Number of the current RayCluster `<name>-<clusterGeneration>`; 0 before the first."""
    cluster_start_time: Time | None = None
    """When the current cluster generation was begun."""
    cluster_released: bool = False
    """The current RayCluster is given up: it is deleted, and the next attempt takes a new generation."""
    cluster_spec_hash: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the part of the spec the current cluster was rendered from."""
    attempt: Count = 0
    """Number of the current attempt; 0 before the first."""
    next_attempt_time: Time | None = None
    """Not before this time is the next attempt started."""
    progress: ProgressStatus | None = None
    """Training progress."""
    checkpoint: CheckpointStatus | None = None
    """Newest complete checkpoint."""
    attempts: Annotated[list[AttemptStatus], Field(max_length=10)] = []
    """The last ten attempts."""
    retries: RetriesStatus = RetriesStatus()
    """Retries."""
    failures: Annotated[list[FailureStatus], Field(max_length=10)] = []
    """The last ten failures."""
    goodput: GoodputStatus | None = None
    """GPU time."""
    start_time: Time | None = None
    """When the first cluster was created."""
    completion_time: Time | None = None
    """When the job ended."""
    active_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Running time of ended attempts."""
