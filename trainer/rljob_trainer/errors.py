"""Typed failures of the trainer: each names its reason and exit code (`rljob_api.reasons`), so nobody has to guess."""

from __future__ import annotations

from typing import ClassVar

from rljob_api.reasons import ExitCode, FailureReason


class TrainerError(Exception):
    """A failure with a verdict. Subclasses take exactly one message, so they travel through pickle unchanged."""

    reason: ClassVar[FailureReason] = FailureReason.INTERNAL_ERROR
    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL_ERROR

    @property
    def message(self) -> str:
        """What went wrong, with field, value and a value that works."""
        return str(self)


class ConfigurationError(TrainerError):
    """job.json, the model directory or the environment cannot work."""

    reason = FailureReason.INVALID_CONFIGURATION
    exit_code = ExitCode.BAD_CONFIGURATION


class DataError(TrainerError):
    """Prompts or answers cannot be used."""

    reason = FailureReason.INVALID_DATA
    exit_code = ExitCode.BAD_DATA


class CheckpointError(TrainerError):
    """A checkpoint cannot be found, read or written."""

    reason = FailureReason.CHECKPOINT_UNUSABLE
    exit_code = ExitCode.CHECKPOINT_UNUSABLE


class GPUMemoryError(TrainerError):
    """A GPU ran out of memory."""

    reason = FailureReason.GPU_OUT_OF_MEMORY
    exit_code = ExitCode.GPU_MEMORY


class NumericalError(TrainerError):
    """NaN or Inf in too many consecutive updates."""

    reason = FailureReason.NUMERICAL_ERROR
    exit_code = ExitCode.NUMERICAL


class RewardError(TrainerError):
    """A reward function failed or ran out of time."""

    reason = FailureReason.REWARD_FUNCTION_ERROR
    exit_code = ExitCode.REWARD_FUNCTION


class EngineDied(TrainerError):  # noqa: N818 - the API's name of this failure
    """A rollout engine is gone or does not answer."""

    reason = FailureReason.ENGINE_DIED
    exit_code = ExitCode.ENGINE_DIED


class TransientError(TrainerError):
    """A rank, node or deadline was lost; another attempt may work."""

    reason = FailureReason.TRANSIENT_ERROR
    exit_code = ExitCode.TRANSIENT


class StopRequested(Exception):  # noqa: N818 - not a failure
    """A stop was asked for; the loop unwinds to its last finished step and publishes a checkpoint."""
