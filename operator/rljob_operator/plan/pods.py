"""What the pods of a cluster say: ready, unable to start, or lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import AttemptStatus
from rljob_operator.plan.times import parse_time
from rljob_operator.plan.types import ObservedPod, ObservedRayCluster, PodRole

IMAGE_WAITING_REASONS: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
CONFIGURATION_WAITING_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError"}
)
PREEMPTION_REASONS: Final = frozenset({"PreemptionByScheduler", "PreemptionByKubeScheduler", "Preempting"})
"""DisruptionTarget reasons (kube-scheduler) and the kubelet's status.reason for critical pods."""


@dataclass(frozen=True)
class Loss:
    """A pod that an attempt needs is gone, and what is known about why."""

    reason: FailureReason
    evidence: str


def compute_pod_set_hash(pods: Iterable[ObservedPod]) -> str:
    """One value for a set of pods: thousands of UIDs do not fit into a status."""
    return hashlib.sha256("\n".join(sorted(pod.uid for pod in pods)).encode()).hexdigest()[:16]


def get_head(pods: Sequence[ObservedPod]) -> ObservedPod | None:
    """The head pod to use: one that stays, if there is one."""
    heads = sorted((pod for pod in pods if pod.role == PodRole.HEAD), key=is_failing)
    return heads[0] if heads else None


def get_workers(pods: Iterable[ObservedPod]) -> tuple[ObservedPod, ...]:
    """Worker pods."""
    return tuple(pod for pod in pods if pod.role == PodRole.WORKER)


def is_failing(pod: ObservedPod) -> bool:
    """Whether the pod is dead or on its way out; a pod that only misses a readiness probe is neither."""
    return (
        pod.gone
        or pod.deleting
        or pod.phase in ("Failed", "Succeeded")
        or pod.exit_code is not None
        or bool(pod.disruption_reason)
        or pod.status_reason in ("NodeLost", "Evicted", "Preempting", "Terminated", "NodeShutdown")
    )


def are_all_ready(cluster: ObservedRayCluster, pods: Sequence[ObservedPod]) -> bool:
    """Head and every worker ready, none on its way out.

    Judged by the pods: KubeRay's own status lags and is never taken back when pods die.
    """
    head = get_head(pods)
    workers = [pod for pod in get_workers(pods) if pod.ready and not is_failing(pod)]
    return head is not None and head.ready and not is_failing(head) and len(workers) == cluster.desired_workers


def find_loss(all_pods: Sequence[ObservedPod], attempt: AttemptStatus, cluster_generation: int) -> Loss | None:
    """The first pod of an attempt that is lost (the head before workers), or None.

    `all_pods` holds vanished pods too. KubeRay replaces a dead worker within seconds, so a changed set of UIDs counts
    as a loss even when every pod looks healthy.
    """
    pods = [pod for pod in all_pods if pod.cluster_generation == cluster_generation]
    heads = [pod for pod in pods if pod.uid == attempt.head_pod_uid]
    if not heads:
        return Loss(FailureReason.HEAD_LOST, "the head pod the trainer was submitted to no longer exists")
    if is_failing(heads[0]):
        return explain_loss(heads[0])

    workers = get_workers(pods)
    failing = [pod for pod in workers if is_failing(pod) and not _left_before(pod, attempt)]
    living = [pod for pod in workers if not pod.gone]
    if compute_pod_set_hash(living) == attempt.worker_pods_hash and not any(is_failing(pod) for pod in living):
        return None
    if not failing:
        return Loss(FailureReason.WORKER_LOST, "a worker pod was replaced or deleted; its last state was not seen")
    return explain_loss(min(failing, key=_rank_evidence))


def explain_loss(pod: ObservedPod) -> Loss:
    """Why a pod is lost: preemption and eviction (nobody's fault), then memory, then just lost."""
    where = f"pod {pod.name}" + (f" on node {pod.node}" if pod.node else "")
    detail = f": {pod.status_message}" if pod.status_message else ""
    cause = pod.disruption_reason or pod.status_reason
    if cause in PREEMPTION_REASONS:
        return Loss(FailureReason.PREEMPTED, f"{where} was preempted ({cause}){detail}")
    if cause:
        return Loss(FailureReason.EVICTED, f"{where} was evicted ({cause}){detail}")
    if pod.terminated_reason == "OOMKilled":
        return Loss(
            FailureReason.HOST_OUT_OF_MEMORY,
            f"{where} was killed because it used more memory than its limit (OOMKilled); raise the memory of "
            f"spec.cluster.{'headResources' if pod.role == PodRole.HEAD else 'workerResources'}",
        )
    reason = FailureReason.HEAD_LOST if pod.role == PodRole.HEAD else FailureReason.WORKER_LOST
    if pod.exit_code is not None:
        why = f" ({pod.terminated_reason})" if pod.terminated_reason else ""
        return Loss(reason, f"{where} ended with exit code {pod.exit_code}{why}{detail}")
    if pod.deleting or pod.gone:
        return Loss(reason, f"{where} was deleted{detail}")
    return Loss(reason, f"{where} is {pod.phase}{detail}")


def find_start_blocker(pods: Iterable[ObservedPod]) -> tuple[FailureReason, str, str] | None:
    """A pod that cannot start by itself: failure reason, kubelet's reason, text. Image problems come first."""
    blocked = [pod for pod in pods if pod.waiting_reason in IMAGE_WAITING_REASONS]
    reason = FailureReason.IMAGE_PULL_FAILED
    if not blocked:
        blocked = [pod for pod in pods if pod.waiting_reason in CONFIGURATION_WAITING_REASONS]
        reason = FailureReason.POD_CONFIGURATION_ERROR
    if not blocked:
        return None
    pod = min(blocked, key=lambda pod: pod.name)
    message = f": {pod.waiting_message}" if pod.waiting_message else ""
    return reason, pod.waiting_reason, f"pod {pod.name}, image {pod.image or '(unknown)'}{message}"


def _left_before(pod: ObservedPod, attempt: AttemptStatus) -> bool:
    """Whether the pod vanished before the attempt began, so that it says nothing about it."""
    if pod.gone_time is None or attempt.start_time is None:
        return False
    started: datetime = parse_time(attempt.start_time)
    return pod.gone_time < started


def _rank_evidence(pod: ObservedPod) -> tuple[int, str]:
    """Root cause first: one evicted worker makes its peers exit with errors of their own."""
    if pod.disruption_reason or pod.status_reason:
        return 0, pod.name
    if pod.terminated_reason == "OOMKilled":
        return 1, pod.name
    if pod.deleting or pod.gone:
        return 2, pod.name
    return 3, pod.name
