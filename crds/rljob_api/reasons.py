"""The closed list of failure reasons, their default action, and the exit codes of the trainer's driver."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from rljob_api.v1alpha1.failure import FailureAction, FailureReason

__all__ = [
    "DEFAULT_ACTIONS",
    "DESCRIPTIONS",
    "REASON_OF_EXIT_CODE",
    "ExitCode",
    "FailureReason",
    "ReasonDescription",
]


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


@dataclass(frozen=True)
class ReasonDescription:
    """What a reason means and what a person can do about it."""

    meaning: str
    remedy: str


DESCRIPTIONS: Final[dict[FailureReason, ReasonDescription]] = {
    FailureReason.INVALID_CONFIGURATION: ReasonDescription(
        "The job breaks a rule, asks for a feature that is not built, or names a model that cannot be read.",
        "Read the message: it names the field, the value and a value that works. `rljob validate job.yaml` says the "
        "same "
        "before anything is created.",
    ),
    FailureReason.INVALID_DATA: ReasonDescription(
        "A data file is missing or unreadable, a column is absent, or no usable prompt is left after filtering.",
        "Check `spec.data` against the files in the pods; the message names the file, the columns found and the files "
        "beside it.",
    ),
    FailureReason.CHECKPOINT_UNUSABLE: ReasonDescription(
        "Checkpoints exist but cannot be used: they belong to another RLJob, are damaged, or `resume: Required` "
        "found none.",
        "Set `spec.checkpoint.adopt: true` to take over the state of a deleted job of the same name, "
        "`spec.checkpoint.resumeFromPath` to start from a certain checkpoint, or use another directory.",
    ),
    FailureReason.INTERNAL_ERROR: ReasonDescription(
        "The trainer failed in a way it does not know.",
        "The message holds the exception; `kubectl logs` of the head pod holds the whole traceback. Please report it.",
    ),
    FailureReason.GPU_OUT_OF_MEMORY: ReasonDescription(
        "Trainer or engine ran out of GPU memory.",
        "Lower `spec.rollout.memoryFraction` or `spec.training.microBatchTokens`, or raise "
        "`spec.rollout.tensorParallelSize` or `spec.cluster.gpusPerNode`.",
    ),
    FailureReason.HOST_OUT_OF_MEMORY: ReasonDescription(
        "A container was killed for memory (OOMKilled), or Ray's memory monitor killed a worker.",
        "Raise `spec.cluster.workerResources.memory` (or `headResources.memory`), or lower "
        "`spec.cluster.sharedMemory`, "
        "whose pages count as memory.",
    ),
    FailureReason.NUMERICAL_ERROR: ReasonDescription(
        "Loss or gradient was NaN or infinite in `spec.training.maxNanSteps` consecutive updates.",
        "Lower `spec.training.learningRate` or `gradientClip`; start again from an earlier checkpoint with "
        "`spec.checkpoint.resumeFromPath`.",
    ),
    FailureReason.REWARD_FUNCTION_ERROR: ReasonDescription(
        "A reward function raised, returned something that is no number, or ran into its time limit.",
        "Correct the function, raise `timeoutSeconds`, or set `spec.reward.onError: DropSample`.",
    ),
    FailureReason.ENGINE_DIED: ReasonDescription(
        "A rollout engine ended or stopped answering.",
        "The message holds the engine's last lines. Out of memory is the usual cause: lower "
        "`spec.rollout.memoryFraction`.",
    ),
    FailureReason.TRANSIENT_ERROR: ReasonDescription(
        "The trainer met a condition that goes away by itself, for example a network timeout.",
        "Nothing; when it repeats, the message names the peer.",
    ),
    FailureReason.INCOMPLETE_TRAINING: ReasonDescription(
        "The trainer ended without an error, but before its last step.",
        "Look at the log of the head pod for what ended the driver.",
    ),
    FailureReason.TRAINER_CRASHED: ReasonDescription(
        "The driver ended with an exit code it never returns itself: a signal, or a crash in native code.",
        "The message holds the code; 139 is a segmentation fault, 137 a kill (often memory).",
    ),
    FailureReason.NO_PROGRESS: ReasonDescription(
        "No phase of the trainer gave a sign of progress for `spec.failurePolicy.stallTimeoutSeconds`.",
        "The head pod's log holds the stacks of the driver, the ranks and the engines, and who gave none. Raise the "
        "limit when single phases take longer than it.",
    ),
    FailureReason.STARTUP_TIMEOUT: ReasonDescription(
        "The trainer did not report within `spec.failurePolicy.startupTimeoutSeconds` after the cluster was created.",
        "The message names the pods that are missing and why (unschedulable, image, mount). Free the resources or "
        "raise "
        "the limit.",
    ),
    FailureReason.DEADLINE_EXCEEDED: ReasonDescription(
        "The running time over all attempts exceeded `spec.activeDeadlineSeconds`; queueing and suspension do not "
        "count.",
        "Raise the deadline; a new job with `spec.checkpoint.adopt: true` continues from the last checkpoint.",
    ),
    FailureReason.HEAD_LOST: ReasonDescription(
        "The head pod, and with it the driver, was lost.",
        "Nothing: the job continues from its last checkpoint on a new cluster.",
    ),
    FailureReason.WORKER_LOST: ReasonDescription(
        "A worker pod was lost or replaced.",
        "Nothing: the job continues from its last checkpoint on a new cluster. When it repeats, look at the node.",
    ),
    FailureReason.PREEMPTED: ReasonDescription(
        "The scheduler or the queue took the pods for something more important.",
        "Nothing: the job continues when there is room. A higher priority class prevents it.",
    ),
    FailureReason.EVICTED: ReasonDescription(
        "The kubelet evicted a pod, mostly for a full disk or memory pressure of the node.",
        "The message is the kubelet's. Raise `ephemeralStorage` in `spec.cluster.workerResources` or `headResources`.",
    ),
    FailureReason.RAY_JOB_LOST: ReasonDescription(
        "Ray no longer knows the submission, although its head pod is there: Ray was restarted inside the pod.",
        "Nothing: the next attempt submits again.",
    ),
    FailureReason.RAY_JOB_FAILED_TO_START: ReasonDescription(
        "Ray could not start the driver.",
        "The message is Ray's. A wrong image (no rljob in it, another Ray or Python version) is the usual cause.",
    ),
    FailureReason.STOPPED_EXTERNALLY: ReasonDescription(
        "Somebody stopped the Ray job, not the operator.",
        "Use `spec.suspend: true` to stop a job: it checkpoints first and can be resumed.",
    ),
    FailureReason.RAY_CLUSTER_DELETED: ReasonDescription(
        "Somebody deleted the RayCluster, not the operator.",
        "Nothing: the job continues from its last checkpoint on a new cluster. Delete the RLJob to stop it for good.",
    ),
    FailureReason.IMAGE_PULL_FAILED: ReasonDescription(
        "The image cannot be pulled.",
        "The message is the registry's. Check `spec.cluster.image` and `spec.cluster.imagePullSecrets`.",
    ),
    FailureReason.POD_CONFIGURATION_ERROR: ReasonDescription(
        "A container cannot be created: a Secret, ConfigMap or key that is not there, or a forbidden setting.",
        "The message names the object; check `spec.cluster.env`, `envFrom`, `volumes` and the pod templates.",
    ),
    FailureReason.CHILD_INVALID: ReasonDescription(
        "The API server or KubeRay refused an object made for the job.",
        "The message is theirs; a pod template is the usual cause. `rljob render job.yaml` shows the objects.",
    ),
}
