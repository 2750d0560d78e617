"""Everything one plan is made from, read at once: the RLJob, its children, its Ray job, its trainer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rljob_api.contract import Progress
from rljob_api.names import LABEL_JOB, LABEL_JOB_UID, compute_ray_cluster_name
from rljob_operator.adapters.access import Head
from rljob_operator.adapters.kube import PODS, RAY_CLUSTERS, RLJOBS, SECRETS, Document, Kube, KubeError
from rljob_operator.adapters.ray_jobs import RayJobs
from rljob_operator.adapters.trainer import TrainerClient
from rljob_operator.job_state import JobState, Snapshot
from rljob_operator.observe import is_child, observe_namesake, observe_ray_cluster, observe_status, parse_time
from rljob_operator.plan import questions
from rljob_operator.plan.types import (
    Observed,
    ObservedPod,
    PodRole,
    Questions,
    RayJobNotAsked,
    RayJobView,
    TrainerNotAsked,
    TrainerUnreachable,
)
from rljob_operator.pod_history import PodHistory
from rljob_operator.render import AUTH_TOKEN_KEY, compute_auth_secret_name
from rljob_operator.settings import Settings
from rljob_operator.validate import validate_document


class Gatherer:
    """Reads come from the API server itself: what a plan takes for absent is absent."""

    def __init__(
        self, kube: Kube, ray_jobs: RayJobs, trainer: TrainerClient, pod_history: PodHistory, settings: Settings
    ) -> None:
        self._kube = kube
        self._ray_jobs = ray_jobs
        self._trainer = trainer
        self._pod_history = pod_history
        self._settings = settings

    async def read_job(self, namespace: str, name: str) -> Document | None:
        """The RLJob, or None when it is gone."""
        return await self._kube.get(RLJOBS, namespace, name)

    async def read(self, document: Document, num_events: int) -> Snapshot:
        """The job's children, to go with the job. Raises KubeError when the API server cannot say."""
        metadata = document["metadata"]
        # By name, as the watches: the children of a deleted namesake, whose UID is another, must not be run into.
        selector = f"{LABEL_JOB}={metadata['name']},{LABEL_JOB_UID}"
        list_started, read_at = datetime.now(UTC), time.monotonic()
        clusters, pods = await asyncio.gather(
            self._list_ray_clusters(metadata["namespace"], selector),
            self._kube.list_all(PODS, metadata["namespace"], selector),
        )
        uid = metadata["uid"]
        return Snapshot(
            document=document,
            ray_clusters=None if clusters is None else tuple(c for c in clusters if is_child(c, uid)),
            pods=tuple(pod for pod in pods if is_child(pod, uid)),
            namesakes=tuple(child for child in (*(clusters or ()), *pods) if not is_child(child, uid)),
            list_started=list_started,
            read_at=read_at,
            num_events=num_events,
        )

    async def gather(self, state: JobState, snapshot: Snapshot) -> Observed:
        """The whole picture: the snapshot, the verdict on the spec, and what the head answers now."""
        document = snapshot.document
        metadata = document["metadata"]
        namespace, name, generation = metadata["namespace"], metadata["name"], int(metadata.get("generation") or 0)
        if state.validated is None or state.validated.generation != generation:
            state.validated = validate_document(
                document,
                catalogue=self._settings.catalogue,
                ip_family=self._settings.ip_family,
                options=self._settings.render_options,
            )
        status = observe_status(document)
        pods = self._pod_history.merge(state.uid, snapshot.pods, snapshot.list_started)
        ray_job, trainer = await self._ask(state, namespace, name, questions(name, status), pods)
        return Observed(
            name=name,
            namespace=namespace,
            uid=state.uid,
            generation=generation,
            created_time=parse_time(metadata.get("creationTimestamp")),
            spec=state.validated.spec,
            findings=state.validated.findings,
            status=status,
            deleting=bool(metadata.get("deletionTimestamp")),
            kuberay_installed=snapshot.ray_clusters is not None,
            ray_clusters=tuple(observe_ray_cluster(cluster) for cluster in snapshot.ray_clusters or ()),
            pods=pods,
            namesakes=tuple(observe_namesake(child) for child in snapshot.namesakes),
            child_error=state.find_child_error(generation),
            ray_job=ray_job,
            trainer=trainer,
            memory=state.memory,
        )

    async def find_head(
        self, state: JobState, namespace: str, name: str, cluster_generation: int, pods: tuple[ObservedPod, ...]
    ) -> Head:
        """Where the head of a cluster generation is, and its token."""
        if cluster_generation not in state.tokens:
            secret = await self._kube.get(SECRETS, namespace, compute_auth_secret_name(name, cluster_generation))
            token = read_token(secret)
            if token:
                state.tokens[cluster_generation] = token
        heads = [
            pod
            for pod in pods
            if pod.role is PodRole.HEAD
            and pod.cluster_generation == cluster_generation
            and not pod.gone
            and not pod.deleting
        ]
        return Head(
            namespace=namespace,
            ray_cluster=compute_ray_cluster_name(name, cluster_generation),
            pod_name=heads[-1].name if heads else None,
            token=state.tokens.get(cluster_generation, ""),
        )

    async def _list_ray_clusters(self, namespace: str, selector: str) -> list[Document] | None:
        """None: the kind is not installed."""
        try:
            return await self._kube.list_all(RAY_CLUSTERS, namespace, selector)
        except KubeError as error:
            if error.is_not_found:
                return None
            raise

    async def _ask(
        self,
        state: JobState,
        namespace: str,
        name: str,
        wanted: Questions | None,
        pods: tuple[ObservedPod, ...],
    ) -> tuple[RayJobView, Progress | TrainerUnreachable | TrainerNotAsked]:
        if wanted is None or (wanted.submission_id is None and not wanted.trainer):
            return RayJobNotAsked(), TrainerNotAsked()
        head = await self.find_head(state, namespace, name, wanted.cluster_generation, pods)
        return await asyncio.gather(
            self._ask_ray_job(state, head, wanted),
            self._trainer.get_progress(head) if wanted.trainer else _not_asked(),
        )

    async def _ask_ray_job(self, state: JobState, head: Head, wanted: Questions) -> RayJobView:
        if wanted.submission_id is None:
            return RayJobNotAsked()
        if wanted.submission_id in state.rejections:
            return state.rejections[wanted.submission_id]
        return await self._ray_jobs.get(head, wanted.submission_id, with_log=wanted.log_wanted)


async def _not_asked() -> TrainerNotAsked:
    return TrainerNotAsked()


def read_token(secret: Mapping[str, Any] | None) -> str:
    """The Ray token of a Secret; empty when there is none."""
    encoded = ((secret or {}).get("data") or {}).get(AUTH_TOKEN_KEY) or ""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
