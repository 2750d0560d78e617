"""One cluster generation: begun, starting, ready, given up, gone.

A generation's number is in the status before the first of its objects exists, and it is never used again once the
generation is given up (`status.clusterReleased`).
"""

from __future__ import annotations

from typing import Final

from rljob_api.v1alpha1.failure import FailureReason
from rljob_api.v1alpha1.status import ConditionType
from rljob_operator.plan.draft import RELEASE_SLACK_SECONDS, Draft, compute_spec_hash
from rljob_operator.plan.limits import check_cluster_startup
from rljob_operator.plan.pods import (
    IMAGE_WAITING_REASONS,
    are_all_ready,
    find_start_blocker,
    get_head,
    get_workers,
    is_failing,
)
from rljob_operator.plan.retry import handle_failure
from rljob_operator.plan.times import compute_elapsed_seconds, format_time
from rljob_operator.plan.types import ChildError, DeleteCluster, EnsureClusterObjects, EventType, ObservedPod

START_BLOCKER_GRACE_SECONDS: Final = 120.0
"""Registries hiccup and Secrets arrive late; kubelet retries by itself meanwhile."""
KUBERAY_PATIENCE_SECONDS: Final = 60.0
SITUATION_SETTLE_SECONDS: Final = 10.0
"""A state a starting cluster only passes through is not worth a write."""
SITUATION_MESSAGE_SECONDS: Final = 60.0
"""How often a changed message alone (2 of 3 pods ready) is written."""
ENSURE_INTERVAL_SECONDS: Final = 30.0
KUBERAY_CHECK_SECONDS: Final = 15.0
CLUSTER_POLL_SECONDS: Final = 10.0
"""Watch events drive a starting cluster; this is the net below."""
WORRYING_SITUATIONS: Final = frozenset(
    {
        "KubeRayNotInstalled",
        "KubeRayNotReconciling",
        "ChildForbidden",
        "Unschedulable",
        "ReplicaFailure",
        "ImagePullBackOff",
        "ErrImagePull",
        "CreateContainerConfigError",
    }
)


def follow_startup(draft: Draft) -> None:
    """Give up a cluster that can never carry its first attempt (or must not: the spec has changed)."""
    if not draft.is_cluster_in_use or draft.last_attempt_on_cluster is not None:
        return
    spec = draft.observed.spec
    is_valid = draft.is_true(ConditionType.VALIDATED)
    if is_valid and spec is not None and compute_spec_hash(spec) != draft.status.cluster_spec_hash:
        release_cluster(draft, "the spec changed before the trainer was started")
        return
    if draft.is_suspend_wanted:
        return
    error = draft.child_error
    if error is not None and error.is_name_taken:
        _leave_name(draft, error)
        return
    if error is not None and error.status_code != 403:
        message = f"{error.kind} {error.name} was refused ({error.status_code}): {error.message}"
        _give_up(draft, FailureReason.CHILD_INVALID, message)
    elif (blocker := find_start_blocker(draft.pods)) is not None:
        reason, waiting_reason, message = blocker
        left = START_BLOCKER_GRACE_SECONDS - draft.measure(f"blocked/{reason}")
        if left > 0:
            draft.wake(left)
        else:
            _give_up(draft, reason, f"{waiting_reason}: {message}")
    if draft.is_cluster_in_use and (timeout := check_cluster_startup(draft)) is not None:
        _, situation = describe_situation(draft)
        _give_up(draft, FailureReason.STARTUP_TIMEOUT, f"{timeout}; {situation}")


def begin_cluster(draft: Draft) -> None:
    """Number the next cluster generation and create its objects, once nothing of the ones before is left."""
    observed, status = draft.observed, draft.status
    if observed.spec is None:
        raise ValueError("begin_cluster needs a spec that could be read")
    if not observed.kuberay_installed:
        note_missing_kuberay(draft)
        return
    if leftovers := find_leftovers(draft):
        note_situation(draft, "ReleasingCluster", f"waiting for {', '.join(leftovers[:3])} to go away")
        return
    if leftovers := find_namesakes(draft):
        whose = f"which a deleted RLJob {observed.name} has left,"
        note_situation(draft, "ReleasingCluster", f"waiting for {', '.join(leftovers[:3])}, {whose} to go away")
        return
    # KubeRay takes every pod with the label ray.io/cluster=<name> for the cluster's own, whoever its owner is. So a
    # status that was lost (restored backup, cleared by hand) or a namesake must not lead to a name that is in use.
    known = [cluster.cluster_generation for cluster in observed.ray_clusters]
    known += [pod.cluster_generation for pod in observed.pods]
    known += [namesake.cluster_generation for namesake in observed.namesakes]
    status.cluster_generation = max([status.cluster_generation, *known]) + 1
    status.cluster_released = False
    status.cluster_start_time = format_time(draft.now)
    status.cluster_spec_hash = compute_spec_hash(observed.spec)
    status.start_time = status.start_time or format_time(draft.now)
    draft.set(ConditionType.CLUSTER_READY, "False", "Creating", f"RayCluster {draft.cluster_name} is being created")
    draft.record(EventType.NORMAL, "ClusterCreated", f"RayCluster {draft.cluster_name}")
    ensure_cluster(draft)


def await_cluster(draft: Draft) -> bool:
    """Whether the current cluster is ready for an attempt; otherwise say what it waits for."""
    cluster = draft.cluster
    if not draft.observed.kuberay_installed:
        note_missing_kuberay(draft)
        return False
    if cluster is None and draft.last_attempt_on_cluster is None:
        # Nothing was submitted yet, so applying the objects (again) loses nothing.
        ensure_cluster(draft)
        if draft.child_error is not None:
            error = draft.child_error
            note_situation(draft, "ChildForbidden", f"{error.kind} {error.name} was refused: {error.message}")
        return False
    if cluster is None or cluster.deleting:
        release_cluster(draft, f"RayCluster {draft.cluster_name} was deleted, and not by the operator")
        draft.wake(1.0)
        return False
    if cluster.suspended:
        draft.set(ConditionType.ADMITTED, "False", "Queued", f"RayCluster {cluster.name} is suspended by its queue")
        draft.set(ConditionType.CLUSTER_READY, "False", "Queued", "waiting for admission")
        return False
    if not draft.is_true(ConditionType.ADMITTED):
        draft.set(ConditionType.ADMITTED, "True", "Admitted", "the queue has admitted the cluster")
    if are_all_ready(cluster, draft.pods):
        message = f"head and {cluster.desired_workers} worker pods of {cluster.name} are ready"
        draft.set(ConditionType.CLUSTER_READY, "True", "AllPodsReady", message)
        return True
    if draft.last_attempt_on_cluster is not None:
        # The start-up timeout guards the first attempt of a cluster only; this is its counterpart for a retry in place.
        left = draft.policy.startup_timeout_seconds - draft.measure("not-ready-again")
        if left <= 0:
            release_cluster(draft, "its pods did not become ready again")
            draft.wake(1.0)
            return False
        draft.wake(left)
    note_situation(draft, *describe_situation(draft))
    draft.wake(CLUSTER_POLL_SECONDS)
    return False


def ensure_cluster(draft: Draft) -> None:
    """Apply the current generation's objects, at most every 30 seconds after a refusal."""
    if draft.child_error is None or draft.is_due("ensure", ENSURE_INTERVAL_SECONDS):
        draft.act(EnsureClusterObjects(draft.status.cluster_generation))
    draft.wake(CLUSTER_POLL_SECONDS)


def release_cluster(draft: Draft, why: str) -> None:
    """Give the current generation up; its objects go away, and its number is never used again."""
    if not draft.is_cluster_in_use:
        return
    draft.status.cluster_released = True
    draft.set(ConditionType.CLUSTER_READY, "False", "Released", f"RayCluster {draft.cluster_name} is released: {why}")
    # Also when no RayCluster is seen: Secret, ConfigMap and NetworkPolicy come first and may exist alone.
    draft.act(DeleteCluster(draft.status.cluster_generation))


def delete_leftovers(draft: Draft) -> None:
    """Delete every cluster but the current one: what an interrupted deletion or a lost status left behind."""
    for cluster in draft.observed.ray_clusters:
        if not cluster.deleting and not _is_current(draft, cluster.cluster_generation):
            draft.act(DeleteCluster(cluster.cluster_generation))


def find_leftovers(draft: Draft) -> list[str]:
    """Names of clusters and pods of given-up generations that are still there.

    Two drivers must never write to one checkpoint directory, so the next cluster waits for the last pod. A pod on a
    dead node stays Terminating for ever, so the wait is limited: then the list is empty.
    """
    clusters = [c.name for c in draft.observed.ray_clusters if not _is_current(draft, c.cluster_generation)]
    pods = [p.name for p in draft.observed.pods if not p.gone and not _is_current(draft, p.cluster_generation)]
    return _limit_wait(draft, "releasing", [*clusters, *sorted(pods)])


def find_namesakes(draft: Draft) -> list[str]:
    """Names of what a deleted RLJob of the same name has left, while the first cluster has to wait for it.

    They hold GPUs, and with `checkpoint.adopt` the checkpoint directory too. They had all their time before the first
    cluster: what is left then stays for good (`kubectl delete --cascade=orphan`), and later clusters do not wait again.
    """
    if draft.status.cluster_generation > 0:
        return []
    return _limit_wait(draft, "namesakes", sorted(namesake.name for namesake in draft.observed.namesakes))


def note_missing_kuberay(draft: Draft) -> None:
    """KubeRay may be installed after us; no restart is needed then."""
    interval = f"{KUBERAY_CHECK_SECONDS:.0f} s"
    message = f"the API server does not know ray.io/v1 RayCluster; install KubeRay (checked every {interval})"
    note_situation(draft, "KubeRayNotInstalled", message)
    draft.wake(KUBERAY_CHECK_SECONDS)


def note_situation(draft: Draft, reason: str, message: str) -> None:
    """Show what a cluster waits for, without a write for each state it only passes through."""
    old = draft.condition(ConditionType.CLUSTER_READY)
    if old is not None and (old.reason, old.message) == (reason, message):
        return
    # kubelet flips between ErrImagePull and ImagePullBackOff: one situation, not a write and an event for each.
    is_same_reason = old is not None and (old.reason == reason or {old.reason, reason} <= IMAGE_WAITING_REASONS)
    if is_same_reason:
        left = SITUATION_MESSAGE_SECONDS - draft.measure("message")
    else:
        left = SITUATION_SETTLE_SECONDS - draft.measure(f"situation/{reason}")
    if left > 0:
        draft.wake(left)
        return
    draft.set(ConditionType.CLUSTER_READY, "False", reason, message)
    if reason in WORRYING_SITUATIONS and not is_same_reason:
        draft.record(EventType.WARNING, reason, message)


def describe_situation(draft: Draft) -> tuple[str, str]:
    """What the starting cluster waits for: reason and message, the most telling evidence first."""
    cluster, pods = draft.cluster, draft.pods
    if (error := draft.child_error) is not None:
        return "ChildForbidden", f"{error.kind} {error.name} was refused: {error.message}"
    if cluster is None:
        return "Creating", f"RayCluster {draft.cluster_name} does not exist yet"
    if (blocker := find_start_blocker(pods)) is not None:
        return blocker[1], blocker[2]
    if unschedulable := _pick([pod for pod in pods if pod.unschedulable_message]):
        return "Unschedulable", f"pod {unschedulable.name}: {unschedulable.unschedulable_message}"
    refused = next((c for c in cluster.conditions if c.type == "ReplicaFailure" and c.status == "True"), None)
    if refused is not None:
        return "ReplicaFailure", f"{refused.reason}: {refused.message}"
    if dying := _pick([pod for pod in pods if is_failing(pod)]):
        code = "" if dying.exit_code is None else f", exit code {dying.exit_code} {dying.terminated_reason}"
        return "PodFailing", f"pod {dying.name} is {dying.phase}{code}"
    age_seconds = compute_elapsed_seconds(cluster.created_time, draft.now)
    if not pods and not cluster.conditions and age_seconds > KUBERAY_PATIENCE_SECONDS:
        message = f"KubeRay has not touched RayCluster {cluster.name}: is it running and watching this namespace?"
        return "KubeRayNotReconciling", message
    head = get_head(pods)
    num_ready = sum(pod.ready for pod in get_workers(pods))
    head_state = "ready" if head is not None and head.ready else "not ready"
    return "PodsStarting", f"head {head_state}, {num_ready} of {cluster.desired_workers} workers ready"


def _limit_wait(draft: Draft, signal: str, names: list[str]) -> list[str]:
    """`names` for as long as pods may take to go away, then none."""
    if not names:
        return []
    left = draft.grace_seconds + RELEASE_SLACK_SECONDS - draft.measure(signal)
    if left <= 0:
        return []
    draft.wake(min(CLUSTER_POLL_SECONDS, left))
    return names


def _leave_name(draft: Draft, error: ChildError) -> None:
    """Somebody else's object has a name of this generation: it stays as it is, the next generation has other names."""
    message = f"{error.kind} {error.name} exists and is not this job's: {error.message}"
    draft.record(EventType.WARNING, "NameTaken", f"{message}; the next cluster generation is taken instead")
    release_cluster(draft, message)


def _give_up(draft: Draft, reason: FailureReason, message: str) -> None:
    release_cluster(draft, message)
    handle_failure(draft, reason, message)


def _is_current(draft: Draft, cluster_generation: int) -> bool:
    return draft.is_cluster_in_use and cluster_generation == draft.status.cluster_generation


def _pick(pods: list[ObservedPod]) -> ObservedPod | None:
    """The same pod each time, or a message would flicker between pods."""
    return min(pods, key=lambda pod: (pod.role, pod.name)) if pods else None
