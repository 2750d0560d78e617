"""Wiring: settings to a running operator. kopf watches; everything else is ours.

kopf serves `on.event` handlers only: diff handlers would copy the whole spec into an annotation, timers and daemons
would add finalizers, and its peering is no leader election (an object named "default" of another operator would
freeze this one).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient, Configuration

from rljob_api import __version__
from rljob_api.names import FIELD_MANAGER, GROUP, LABEL_JOB
from rljob_operator.adapters.access import Access, DirectAccess, ProxyAccess
from rljob_operator.adapters.events import EventRecorder
from rljob_operator.adapters.health import Health, build_health_app, build_metrics_app, serve
from rljob_operator.adapters.kube import (
    RAY_CLUSTERS,
    RLJOBS,
    Kube,
    KubeError,
    RateLimiter,
    Resource,
    load_configuration,
    make_client,
)
from rljob_operator.adapters.lease import Lease
from rljob_operator.adapters.metrics import Metrics
from rljob_operator.adapters.ray_jobs import RayJobs
from rljob_operator.adapters.trainer import TrainerClient
from rljob_operator.execute import ActionFailedError, CrashPoint, Executor
from rljob_operator.gather import Gatherer
from rljob_operator.pod_history import PodHistory
from rljob_operator.reconcile import Reconciler
from rljob_operator.scheduler import Key, Scheduler
from rljob_operator.settings import ClusterAccess, Settings

logger = logging.getLogger(__name__)


async def _no_crash(point: str) -> None:
    """Production has no crash points."""


@dataclass
class Hooks:
    """What tests replace."""

    access: Callable[[Settings, Kube, aiohttp.ClientSession], Access] = field(
        default=lambda s, k, c: make_access(s, k, c)
    )
    crash_point: CrashPoint = _no_crash
    longest_wait_seconds: float | None = None
    """Upper bound of the wait between two looks at a job; None: as planned."""
    definition_poll_seconds: float = 30.0
    """How often namespaced mode looks whether a missing definition (RLJob, KubeRay's RayCluster) was installed."""


class Operator:
    """One operator process."""

    def __init__(self, settings: Settings, hooks: Hooks | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._hooks = hooks or Hooks()
        self._user_agent = f"{FIELD_MANAGER}/{__version__}"

    async def run(self) -> None:
        """Serve health and metrics, wait for the Lease, work until cancelled or told to stop by SIGTERM or SIGINT.

        Raises LeadershipLostError when the Lease is lost: the process must exit, a successor may be at work.
        """
        async with AsyncExitStack() as stack:
            configuration = await load_configuration(self.settings.kubeconfig)
            client = make_client(configuration, self._user_agent)
            stack.push_async_callback(client.close)
            session = await stack.enter_async_context(aiohttp.ClientSession(headers={"User-Agent": self._user_agent}))
            kube = self._make_kube(client)
            pod_history = PodHistory()
            reconciler = self._make_reconciler(kube, session, pod_history)
            scheduler = self._make_scheduler(reconciler)
            health = Health(compute_overdue_seconds=scheduler.compute_overdue_seconds)
            self.metrics.watch_queue(lambda: scheduler.num_queued, lambda: scheduler.num_running)
            for app, port in (
                (build_health_app(health), self.settings.health_port),
                (build_metrics_app(self.metrics.registry), self.settings.metrics_port),
            ):
                runner = await serve(app, port)
                stack.push_async_callback(runner.cleanup)
            beating = asyncio.create_task(health.beat())
            stack.push_async_callback(_cancel_and_wait, beating)

            def wake(key: Key, resource_version: str | None = None) -> None:
                if reconciler.note_change(key, resource_version):
                    scheduler.wake(key)

            async def lead() -> None:
                self.metrics.leader.set(1)
                try:
                    await self._work(kube, scheduler, build_registry(configuration, wake, pod_history))
                finally:
                    self.metrics.leader.set(0)

            await self._with_lease(client, lead)

    async def _with_lease(self, client: ApiClient, lead: Callable[[], Awaitable[None]]) -> None:
        if self.settings.lease_namespace is None:
            logger.info("No Lease namespace given: running without leader election")
            await lead()
            return
        times = self.settings.lease_times
        # Not rate-limited and with its own deadline: a flood of reconciles must not cost the Lease.
        lease = Lease(
            Kube(client, request_timeout_seconds=times.request_seconds, observe=self.metrics.observe_request),
            namespace=self.settings.lease_namespace,
            name=self.settings.lease_name,
            identity=self.settings.identity,
            times=times,
        )
        await lease.run(lead)

    async def _work(self, kube: Kube, scheduler: Scheduler, registry: kopf.OperatorRegistry) -> None:
        """Watch and reconcile. Ends when kopf does (a signal) or raises when either part breaks."""
        reconciling = asyncio.create_task(scheduler.run(), name="scheduler")
        watching = asyncio.create_task(self._watch(kube, registry), name="watches")
        try:
            done, _ = await asyncio.wait({reconciling, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            await _cancel_and_wait(watching)
            await _cancel_and_wait(reconciling)

    async def _watch(self, kube: Kube, registry: kopf.OperatorRegistry) -> None:
        """Run kopf. In namespaced mode it may not list CRDs and so cannot notice a definition that is installed later:
        then it is started again whenever one of those it watches has come."""
        while True:
            stop = asyncio.Event()
            # Before kopf looks: one that comes in between is then noticed by the next look of ours.
            missing = await self._find_missing_definitions(kube)
            waiting = asyncio.create_task(self._stop_when_one_appears(kube, missing, stop))
            try:
                tasks = await kopf.spawn_tasks(
                    registry=registry,
                    settings=build_kopf_settings(is_namespaced=bool(self.settings.namespaces)),
                    clusterwide=not self.settings.namespaces,
                    namespaces=self.settings.namespaces,
                    standalone=True,
                    # Otherwise kopf asks the password database for the user, whom a container need not have there.
                    identity=self.settings.identity,
                    stop_flag=stop,
                )
                await kopf.run_tasks(tasks, ignored=_ForeignTasks())
            finally:
                await _cancel_and_wait(waiting)
            if not stop.is_set():
                return

    async def _find_missing_definitions(self, kube: Kube) -> list[Resource]:
        if not self.settings.namespaces:
            return []
        missing = [resource for resource in (RLJOBS, RAY_CLUSTERS) if not await _is_served(kube, resource)]
        if missing:
            logger.warning("Waiting for the definition of %s", " and ".join(resource.kind for resource in missing))
        return missing

    async def _stop_when_one_appears(self, kube: Kube, missing: list[Resource], stop: asyncio.Event) -> None:
        while missing:
            await asyncio.sleep(self._hooks.definition_poll_seconds)
            arrived = [resource for resource in missing if await _is_served(kube, resource)]
            if arrived:
                logger.info("%s can be watched now", " and ".join(resource.kind for resource in arrived))
                stop.set()
                return

    def _make_kube(self, client: ApiClient) -> Kube:
        limiter = RateLimiter(self.settings.api_requests_per_second, self.settings.api_burst)
        return Kube(client, limiter=limiter, observe=self.metrics.observe_request)

    def _make_reconciler(self, kube: Kube, session: aiohttp.ClientSession, pod_history: PodHistory) -> Reconciler:
        access = self._hooks.access(self.settings, kube, session)
        ray_jobs, trainer = RayJobs(access), TrainerClient(access)
        gatherer = Gatherer(kube, ray_jobs, trainer, pod_history, self.settings)
        executor = Executor(kube, gatherer, ray_jobs, trainer, self.settings.render_options, self._hooks.crash_point)
        events = EventRecorder(kube, self.settings.identity)
        return Reconciler(kube, gatherer, executor, events, self.metrics, pod_history, self._hooks.crash_point)

    def _make_scheduler(self, reconciler: Reconciler) -> Scheduler:
        async def reconcile(key: Key) -> float | None:
            delay, longest = await reconciler.reconcile(key), self._hooks.longest_wait_seconds
            return delay if delay is None or longest is None else min(delay, longest)

        return Scheduler(reconcile, concurrency=self.settings.reconcile_concurrency, on_failure=_log_failure)


class _ForeignTasks(Collection[asyncio.Task[Any]]):
    """When it stops, kopf cancels every task that was made since it started, except those in this collection.

    Those are our reconciles, the Lease's requests, whatever else lives in this loop: so everything is in it. kopf's own
    watchers end with its root tasks.
    """

    def __contains__(self, task: object) -> bool:
        return True

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Wake(Protocol):
    """Says that a job changed; `resource_version` is given when the RLJob itself did."""

    def __call__(self, key: Key, resource_version: str | None = None) -> None: ...


def build_registry(configuration: Configuration, wake: Wake, pod_history: PodHistory) -> kopf.OperatorRegistry:
    """The watches. Every handler says "look at this job again"; none looks at what happened."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await build_connection_info(configuration)

    @kopf.on.event(GROUP, "v1alpha1", "rljobs", registry=registry)
    async def on_job(name: str, namespace: str, meta: kopf.Meta, **_: Any) -> None:
        wake(Key(namespace, name), meta["resourceVersion"])

    @kopf.on.event(RAY_CLUSTERS.group, RAY_CLUSTERS.version, RAY_CLUSTERS.plural, registry=registry)
    async def on_ray_cluster(namespace: str, labels: kopf.Labels, **_: Any) -> None:
        if LABEL_JOB in labels:
            wake(Key(namespace, labels[LABEL_JOB]))

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def on_pod(namespace: str, labels: kopf.Labels, body: kopf.Body, type: str | None, **_: Any) -> None:
        if LABEL_JOB in labels:
            pod_history.note(dict(body), deleted=type == "DELETED")
            wake(Key(namespace, labels[LABEL_JOB]))

    return registry


def build_kopf_settings(*, is_namespaced: bool) -> kopf.OperatorSettings:
    """kopf reduced to a watcher that neither writes nor hangs."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.posting.reporting_component = FIELD_MANAGER
    # Nothing is stored, but a handler added by mistake must not write under a foreign domain.
    settings.persistence.finalizer = f"{GROUP}/operator"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    for kind in ("pods", RAY_CLUSTERS.plural):
        settings.watching.label_selectors[kind] = LABEL_JOB
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.queueing.worker_limit = 64
    settings.execution.max_workers = 2
    # Namespaced mode has no permission to list CRDs or namespaces.
    settings.scanning.disabled = is_namespaced
    # kopf would SIGKILL the process some time after a signal; the kubelet does that.
    settings.process.ultimate_exiting_timeout = None
    return settings


async def build_connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """kopf logs in with the credentials of our own client; it asks again when they expire."""
    authorization = await configuration.get_api_key_with_prefix("BearerToken")
    scheme, _, token = (authorization or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() or "Bearer" if token else None,
        token=token or None,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
        proxy_url=configuration.proxy or None,
    )


def make_access(settings: Settings, kube: Kube, session: aiohttp.ClientSession) -> Access:
    """How heads are reached."""
    if settings.cluster_access is ClusterAccess.PROXY:
        return ProxyAccess(kube)
    return DirectAccess(session, settings.cluster_domain)


async def _is_served(kube: Kube, resource: Resource) -> bool:
    try:
        return await kube.is_served(resource)
    except KubeError as error:
        logger.warning("Could not ask whether the definition of %s is installed: %s", resource.kind, error)
        return False


def _log_failure(key: Key, error: BaseException) -> None:
    if isinstance(error, KubeError | ActionFailedError | TimeoutError):
        logger.warning("RLJob %s will be tried again: %s", key, str(error) or type(error).__name__)
    else:
        logger.error("RLJob %s will be tried again", key, exc_info=error)


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    if task.done():
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
