"""The closed list of failure reasons, their default action, and the exit codes of the trainer's driver."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from rljob_api.v1alpha1.failure import FailureAction, FailureReason

__all__ = ["DEFAULT_ACTIONS", "REASON_OF_EXIT_CODE", "ExitCode", "FailureReason"]


class ExitCode(IntEnum):
    """Exit codes of `python -m rljob_trainer` (a contract, DESIGN of the project)."""

    DONE = 0
    BAD_CONFIGURATION = 64
    BAD_DATA = 65
    CHECKPOINT_UNUSABLE = 66
    INTERNAL_ERROR = 70
    GPU_MEMORY = 71
    NUMERICAL = 72
    REWARD_FUNCTION = 73
    ENGINE_DIED = 74
    TRANSIENT = 75
    STOPPED = 143


DEFAULT_ACTIONS: Final[dict[FailureReason, FailureAction]] = {
    FailureReason.INVALID_CONFIGURATION: FailureAction.FAIL,
    FailureReason.INVALID_DATA: FailureAction.FAIL,
    FailureReason.CHECKPOINT_UNUSABLE: FailureAction.FAIL,
    FailureReason.INTERNAL_ERROR: FailureAction.RETRY,
    FailureReason.GPU_OUT_OF_MEMORY: FailureAction.RETRY,
    FailureReason.HOST_OUT_OF_MEMORY: FailureAction.RETRY,
    FailureReason.NUMERICAL_ERROR: FailureAction.FAIL,
    FailureReason.REWARD_FUNCTION_ERROR: FailureAction.FAIL,
    FailureReason.ENGINE_DIED: FailureAction.RETRY,
    FailureReason.TRANSIENT_ERROR: FailureAction.RETRY,
    FailureReason.INCOMPLETE_TRAINING: FailureAction.RETRY,
    FailureReason.TRAINER_CRASHED: FailureAction.RETRY,
    FailureReason.NO_PROGRESS: FailureAction.RETRY,
    FailureReason.STARTUP_TIMEOUT: FailureAction.RETRY,
    FailureReason.DEADLINE_EXCEEDED: FailureAction.FAIL,
    FailureReason.HEAD_LOST: FailureAction.RETRY_FREE,
    FailureReason.WORKER_LOST: FailureAction.RETRY_FREE,
    FailureReason.PREEMPTED: FailureAction.RETRY_FREE,
    FailureReason.EVICTED: FailureAction.RETRY_FREE,
    FailureReason.RAY_JOB_LOST: FailureAction.RETRY_FREE,
    FailureReason.RAY_JOB_FAILED_TO_START: FailureAction.RETRY,
    FailureReason.STOPPED_EXTERNALLY: FailureAction.FAIL,
    FailureReason.RAY_CLUSTER_DELETED: FailureAction.RETRY_FREE,
    FailureReason.IMAGE_PULL_FAILED: FailureAction.FAIL,
    FailureReason.POD_CONFIGURATION_ERROR: FailureAction.FAIL,
    FailureReason.CHILD_INVALID: FailureAction.FAIL,
}

REASON_OF_EXIT_CODE: Final[dict[int, FailureReason]] = {
    ExitCode.BAD_CONFIGURATION: FailureReason.INVALID_CONFIGURATION,
    ExitCode.BAD_DATA: FailureReason.INVALID_DATA,
    ExitCode.CHECKPOINT_UNUSABLE: FailureReason.CHECKPOINT_UNUSABLE,
    ExitCode.INTERNAL_ERROR: FailureReason.INTERNAL_ERROR,
    ExitCode.GPU_MEMORY: FailureReason.GPU_OUT_OF_MEMORY,
    ExitCode.NUMERICAL: FailureReason.NUMERICAL_ERROR,
    ExitCode.REWARD_FUNCTION: FailureReason.REWARD_FUNCTION_ERROR,
    ExitCode.ENGINE_DIED: FailureReason.ENGINE_DIED,
    ExitCode.TRANSIENT: FailureReason.TRANSIENT_ERROR,
}
"""0 and 143 are verdicts of their own; any other code is TrainerCrashed."""
