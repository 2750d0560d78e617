"""Documents of the API server to the planner's plain data. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from rljob_api.names import LABEL_CLUSTER_GENERATION, LABEL_JOB_UID, LABEL_ROLE
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.plan.types import ObservedCondition, ObservedNamesake, ObservedPod, ObservedRayCluster, PodRole

logger = logging.getLogger(__name__)

# Every pod waits like this while it starts; a more telling container of the same pod comes first.
_ORDINARY_WAITING_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
_MAX_GENERATION_DIGITS = 8


def parse_time(text: str | None) -> datetime:
    """An RFC 3339 time; the epoch when absent (an object that was never stored)."""
    return datetime.fromisoformat(text) if text else datetime.fromtimestamp(0, UTC)


def observe_status(document: Mapping[str, Any]) -> RLJobStatus:
    """`status` of an RLJob. Fields that a newer operator wrote are dropped, and said so."""
    raw = document.get("status") or {}
    try:
        return RLJobStatus.model_validate(raw)
    except ValidationError as error:
        unknown = [issue["loc"] for issue in error.errors() if issue["type"] == "extra_forbidden"]
        if not unknown:
            raise
    metadata = document.get("metadata", {})
    names = ", ".join(".".join(map(str, location)) for location in unknown)
    logger.warning("Ignored status fields of RLJob %s/%s: %s", metadata.get("namespace"), metadata.get("name"), names)
    return RLJobStatus.model_validate(_without(raw, unknown))


def observe_ray_cluster(document: Mapping[str, Any]) -> ObservedRayCluster:
    """One RayCluster."""
    metadata, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    return ObservedRayCluster(
        name=metadata["name"],
        uid=metadata["uid"],
        cluster_generation=_read_generation(metadata),
        created_time=parse_time(metadata.get("creationTimestamp")),
        desired_workers=sum(
            int(group.get("replicas") or 0) * int(group.get("numOfHosts") or 1)
            for group in spec.get("workerGroupSpecs") or []
        ),
        deleting=bool(metadata.get("deletionTimestamp")),
        suspended=bool(spec.get("suspend")),
        conditions=tuple(
            ObservedCondition(
                type=condition["type"],
                status=condition["status"],
                reason=condition.get("reason") or "",
                message=condition.get("message") or "",
            )
            for condition in status.get("conditions") or []
        ),
    )


def observe_pod(document: Mapping[str, Any], *, gone_time: datetime | None = None) -> ObservedPod:
    """One pod; `gone_time` says since when it is no longer on the API server."""
    metadata, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    containers: Sequence[Mapping[str, Any]] = status.get("containerStatuses") or []
    # KubeRay demands that the Ray container comes first in the spec; statuses are in no particular order.
    ray_name = next((container["name"] for container in spec.get("containers") or []), "")
    ray = next((container for container in containers if container.get("name") == ray_name), {})
    terminated = (ray.get("state") or {}).get("terminated") or {}
    waiting_container = _find_waiting([*(status.get("initContainerStatuses") or []), *containers])
    waiting = ((waiting_container or {}).get("state") or {}).get("waiting") or {}
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        cluster_generation=_read_generation(metadata),
        role=_read_role(metadata),
        phase=status.get("phase") or "Pending",
        ready=_is_true(conditions.get("Ready")) and gone_time is None,
        deleting=bool(metadata.get("deletionTimestamp")),
        gone_time=gone_time,
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        image=(waiting_container or ray).get("image")
        or next((c.get("image", "") for c in spec.get("containers") or []), ""),
        terminated_reason=terminated.get("reason") or "",
        exit_code=terminated.get("exitCode"),
        unschedulable_message=_read_unschedulable(conditions.get("PodScheduled")),
        disruption_reason=_read_true_reason(conditions.get("DisruptionTarget")),
        status_reason=status.get("reason") or "",
        status_message=status.get("message") or "",
        node=spec.get("nodeName") or "",
    )


def observe_namesake(document: Mapping[str, Any]) -> ObservedNamesake:
    """A RayCluster or pod of another RLJob of the same name."""
    return ObservedNamesake(document["metadata"]["name"], _read_generation(document["metadata"]))


def is_child(document: Mapping[str, Any], job_uid: str) -> bool:
    """Whether an object is this job's and not a namesake's: by its label or by its owner."""
    metadata = document["metadata"]
    owners = {owner.get("uid") for owner in metadata.get("ownerReferences") or []}
    return job_uid in owners or (metadata.get("labels") or {}).get(LABEL_JOB_UID) == job_uid


def _find_waiting(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    waiting = [c for c in containers if (c.get("state") or {}).get("waiting")]
    telling = [c for c in waiting if c["state"]["waiting"].get("reason") not in _ORDINARY_WAITING_REASONS]
    return next(iter(telling or waiting), None)


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _read_true_reason(condition: Mapping[str, Any] | None) -> str:
    return str(condition.get("reason") or "") if condition is not None and _is_true(condition) else ""


def _read_unschedulable(condition: Mapping[str, Any] | None) -> str:
    if condition is None or condition.get("status") != "False" or condition.get("reason") != "Unschedulable":
        return ""
    return str(condition.get("message") or "Unschedulable")


def _read_generation(metadata: Mapping[str, Any]) -> int:
    """0 for a missing or damaged label: no cluster has that number, so the object is never taken for a current one.

    More digits than a RayCluster's name has room for are damage too: new clusters are numbered above what is read here.
    """
    text = (metadata.get("labels") or {}).get(LABEL_CLUSTER_GENERATION, "")
    return int(text) if text.isdecimal() and len(text) <= _MAX_GENERATION_DIGITS else 0


def _read_role(metadata: Mapping[str, Any]) -> PodRole:
    labels = metadata.get("labels") or {}
    # KubeRay's own label stands in when a pod template of the user replaced ours.
    role = labels.get(LABEL_ROLE) or labels.get("ray.io/node-type")
    return PodRole.HEAD if role == PodRole.HEAD.value else PodRole.WORKER


def _without(raw: Any, locations: Sequence[tuple[int | str, ...]]) -> Any:
    """A copy of `raw` without the given paths."""
    if isinstance(raw, Mapping):
        return {
            key: _without(value, [location[1:] for location in locations if len(location) > 1 and location[0] == key])
            for key, value in raw.items()
            if (key,) not in locations
        }
    if isinstance(raw, list):
        return [
            _without(value, [location[1:] for location in locations if len(location) > 1 and location[0] == index])
            for index, value in enumerate(raw)
        ]
    return raw
