"""`spec.failurePolicy` and the closed list of failure reasons."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, Seconds, StrEnum, list_map


class FailureReason(StrEnum):
    """Why an attempt ended without success."""

    INVALID_CONFIGURATION = "InvalidConfiguration"
    INVALID_DATA = "InvalidData"
    CHECKPOINT_UNUSABLE = "CheckpointUnusable"
    INTERNAL_ERROR = "InternalError"
    GPU_OUT_OF_MEMORY = "GPUOutOfMemory"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    NUMERICAL_ERROR = "NumericalError"
    REWARD_FUNCTION_ERROR = "RewardFunctionError"
    ENGINE_DIED = "EngineDied"
    TRANSIENT_ERROR = "TransientError"
    INCOMPLETE_TRAINING = "IncompleteTraining"
    TRAINER_CRASHED = "TrainerCrashed"
    NO_PROGRESS = "NoProgress"
    STARTUP_TIMEOUT = "StartupTimeout"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    HEAD_LOST = "HeadLost"
    WORKER_LOST = "WorkerLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    RAY_JOB_LOST = "RayJobLost"
    RAY_JOB_FAILED_TO_START = "RayJobFailedToStart"
    STOPPED_EXTERNALLY = "StoppedExternally"
    RAY_CLUSTER_DELETED = "RayClusterDeleted"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    POD_CONFIGURATION_ERROR = "PodConfigurationError"
    CHILD_INVALID = "ChildInvalid"


class FailureAction(StrEnum):
    """What a failure reason leads to."""

    FAIL = "Fail"
    RETRY = "Retry"
    RETRY_FREE = "RetryFree"


class FailureRule(ApiModel):
    """Overrides the action of one failure reason."""

    on_reason: FailureReason
    """A failure reason (see the reference page)."""
    action: FailureAction
    """Fail, Retry (counted) or RetryFree (not counted)."""


class FailurePolicy(ApiModel):
    """What happens when something breaks. Infrastructure failures and preemptions do not use up maxRetries."""

    max_retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """Counted retries; 0 fails at the first counted failure."""
    max_free_retries: Annotated[int, Field(ge=0, le=10_000)] = 20
    """Retries that are not counted (lost pods, preemption)."""
    backoff_seconds: NonNegativeInt32 = 10
    """Delay before the first retry; doubles up to 10 minutes while no new checkpoint appears."""
    stall_timeout_seconds: Seconds = 1800
    """No heartbeat of a training phase for so long means NoProgress."""
    startup_timeout_seconds: Seconds = 1800
    """From cluster creation to the first trainer heartbeat (queueing excluded)."""
    rules: Annotated[list[FailureRule], Field(max_length=32, json_schema_extra=list_map("onReason"))] = []
    """Overrides, at most one per reason."""
