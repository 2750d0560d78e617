"""Carries out a plan's actions. Each can be repeated without harm: names are fixed, applies are idempotent."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, assert_never

from rljob_api.contract import ResolvedJob
from rljob_operator.adapters.access import Head, UnreachableError
from rljob_operator.adapters.kube import (
    RAY_CLUSTERS,
    RLJOBS,
    SECRETS,
    Document,
    Kube,
    KubeError,
    Resource,
    resource_of,
)
from rljob_operator.adapters.ray_jobs import RayJobs
from rljob_operator.adapters.trainer import TrainerClient
from rljob_operator.gather import Gatherer, read_token
from rljob_operator.job_state import JobState
from rljob_operator.observe import is_child
from rljob_operator.plan.types import (
    NAME_TAKEN_STATUS,
    Action,
    ChildError,
    DeleteCluster,
    DeleteJob,
    EnsureClusterObjects,
    Observed,
    RequestStop,
    StopRayJob,
    SubmitTrainer,
)
from rljob_operator.render import (
    ObjectReference,
    OwnerRef,
    RenderOptions,
    list_cluster_object_references,
    render_cluster_objects,
    render_submission,
)

logger = logging.getLogger(__name__)

_TOKEN_BYTES: Final = 32

_Existing = list[tuple[ObjectReference, Document | None]]
CrashPoint = Callable[[str], Awaitable[None]]
"""Called after every effect on the outside, with its name. Tests end the process there."""


class ActionFailedError(Exception):
    """An action did not succeed; the rest of the plan was not begun and the job is looked at again after a back-off."""


class Executor:
    """One method per action."""

    def __init__(
        self,
        kube: Kube,
        gatherer: Gatherer,
        ray_jobs: RayJobs,
        trainer: TrainerClient,
        options: RenderOptions,
        crash_point: CrashPoint,
    ) -> None:
        self._kube = kube
        self._gatherer = gatherer
        self._ray_jobs = ray_jobs
        self._trainer = trainer
        self._options = options
        self._crash_point = crash_point

    async def execute(self, observed: Observed, state: JobState, actions: Sequence[Action]) -> None:
        """Run the actions in order; the first failure stops the rest.

        A refusal that repeating cannot cure (a child the API server or Ray calls invalid) is remembered in `state`
        for the planner instead. Raises KubeError or ActionFailedError.
        """
        for action in actions:
            try:
                is_refused = await self._execute_one(observed, state, action)
            except UnreachableError as error:
                raise ActionFailedError(f"{type(action).__name__}: {error}") from error
            await self._crash_point(type(action).__name__)
            if is_refused:
                return

    async def _execute_one(self, observed: Observed, state: JobState, action: Action) -> bool:
        """True when the action was refused for good."""
        logger.info("RLJob %s/%s: %s", observed.namespace, observed.name, action)
        match action:
            case EnsureClusterObjects():
                return await self._ensure_cluster_objects(observed, state, action)
            case SubmitTrainer():
                return await self._submit_trainer(observed, state, action)
            case RequestStop():
                await self._request_stop(observed, state, action)
            case StopRayJob():
                head = await self._find_head(observed, state, action.cluster_generation)
                await self._ray_jobs.stop(head, action.submission_id)
            case DeleteCluster():
                await self._delete_cluster(observed, state, action)
            case DeleteJob():
                await self._kube.delete(RLJOBS, observed.namespace, observed.name, uid=action.uid)
            case _:
                assert_never(action)
        return False

    async def _ensure_cluster_objects(self, observed: Observed, state: JobState, action: EnsureClusterObjects) -> bool:
        generation = action.cluster_generation
        existing = await self._read_cluster_objects(observed, generation)
        if (taken := _find_taken_name(existing, observed.uid, generation)) is not None:
            logger.warning("RLJob %s/%s: %s", observed.namespace, observed.name, taken)
            state.child_error, state.child_error_generation = taken, observed.generation
            return True
        # One token per cluster, read back after a restart: pods that run already hold it.
        token = read_token(next(found for reference, found in existing if reference.kind == SECRETS.kind))
        token = state.tokens.setdefault(generation, token or secrets.token_urlsafe(_TOKEN_BYTES))
        documents = render_cluster_objects(
            _resolved(state),
            owner=OwnerRef(observed.name, observed.uid),
            cluster_generation=generation,
            auth_token=token,
            options=self._options,
        )
        for document in documents:
            kind, name = document["kind"], document["metadata"]["name"]
            try:
                await self._kube.apply(document)
            except KubeError as error:
                # 404 for a RayCluster: its definition is not installed; the planner sees that by itself.
                if resource_of(document) is RAY_CLUSTERS and error.is_not_found:
                    return True
                if not error.is_refused:
                    raise
                logger.warning("RLJob %s/%s: %s", observed.namespace, observed.name, error)
                state.child_error = ChildError(generation, kind, name, error.status, error.message)
                state.child_error_generation = observed.generation
                return True
            await self._crash_point(f"applied {kind}")
        state.child_error = None
        return False

    async def _read_cluster_objects(self, observed: Observed, generation: int) -> _Existing:
        """What exists under the names of a generation, in the order to delete it: cluster first."""
        references = list_cluster_object_references(observed.name, observed.namespace, generation)
        found = await asyncio.gather(*(self._kube.get(_find_resource(r), r.namespace, r.name) for r in references))
        return list(zip(references, found, strict=True))

    async def _submit_trainer(self, observed: Observed, state: JobState, action: SubmitTrainer) -> bool:
        head = await self._find_head(observed, state, action.cluster_generation)
        submission = render_submission(_resolved(state), action.attempt, action.submission_id, action.resume_floor_step)
        rejection = await self._ray_jobs.submit(head, submission)
        if rejection is None:
            return False
        state.rejections[action.submission_id] = rejection
        return True

    async def _request_stop(self, observed: Observed, state: JobState, action: RequestStop) -> None:
        head = await self._find_head(observed, state, action.cluster_generation)
        try:
            await self._trainer.request_stop(head, action.deadline_seconds)
        except UnreachableError as error:
            # The stop's own deadline decides what happens to a trainer that cannot be asked.
            logger.warning("RLJob %s/%s: stop was not requested: %s", observed.namespace, observed.name, error)

    async def _delete_cluster(self, observed: Observed, state: JobState, action: DeleteCluster) -> None:
        # The RayCluster goes last: an interruption is then seen as a RayCluster that is still there.
        for reference, found in reversed(await self._read_cluster_objects(observed, action.cluster_generation)):
            if found is not None and is_child(found, observed.uid):
                uid = found["metadata"]["uid"]
                await self._kube.delete(_find_resource(reference), reference.namespace, reference.name, uid=uid)
            await self._crash_point(f"deleted {reference.kind}")
        state.tokens.pop(action.cluster_generation, None)

    async def _find_head(self, observed: Observed, state: JobState, cluster_generation: int) -> Head:
        return await self._gatherer.find_head(
            state, observed.namespace, observed.name, cluster_generation, observed.pods
        )


def _find_resource(reference: ObjectReference) -> Resource:
    return resource_of({"apiVersion": reference.api_version, "kind": reference.kind})


def _find_taken_name(existing: _Existing, job_uid: str, generation: int) -> ChildError | None:
    """An object that has one of the generation's names and is not this job's.

    A forced apply would take it over, owner and all: a running cluster of a deleted namesake (`--cascade=orphan`,
    garbage collection that lags behind) or one that somebody made by hand.
    """
    for reference, found in existing:
        if found is not None and not is_child(found, job_uid):
            references = found["metadata"].get("ownerReferences") or []
            owners = [f"{owner['kind']} {owner['name']}, UID {owner['uid']}" for owner in references]
            message = f"its owner is {'; '.join(owners)}" if owners else "it has no owner"
            return ChildError(generation, reference.kind, reference.name, NAME_TAKEN_STATUS, message)
    return None


def _resolved(state: JobState) -> ResolvedJob:
    if state.validated is None or state.validated.resolved is None:
        raise ActionFailedError("the job cannot be rendered: its spec has errors")
    return state.validated.resolved
