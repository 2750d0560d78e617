"""One namespace of a real API server with a fake KubeRay and fake heads, and operators that come and go in it."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rljob_operator.app import Hooks, Operator
from rljob_operator.settings import Settings
from rljob_operator.testing.envtest import Envtest, apply_crd, find_kuberay_crd
from rljob_operator.testing.fake_kuberay import FakeKubeRay
from rljob_operator.testing.fake_ray import FakeRay, LoopbackAccess

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1

JOB: Final[dict[str, Any]] = {
    "apiVersion": "rljob.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {"source": "/models/tiny"},
        "data": {"train": ["/data/train.jsonl"], "promptField": "question", "answerField": "answer"},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "rollout": {"engine": "Native", "samplesPerPrompt": 4, "maxResponseTokens": 32},
        "training": {"promptsPerStep": 8, "totalSteps": 4},
        "checkpoint": {"everySteps": 2, "storage": {"claimName": "checkpoints"}},
        "cluster": {"nodes": 2, "gpusPerNode": 0, "ranksPerNode": 1},
        "failurePolicy": {"backoffSeconds": 0},
    },
}
"""A job on CPUs that this build supports."""


@dataclass
class RunningOperator:
    """An operator in this process."""

    operator: Operator
    task: asyncio.Task[None]

    async def stop(self) -> None:
        """As SIGTERM does it."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class Killer:
    """Ends an operator right after one of its effects on the outside: nothing that follows in the program happens."""

    def __init__(self, kill_at: tuple[str, int] | None = None) -> None:
        """
        Args:
            kill_at: name of the effect, and which of those of its name (from 1).
        """
        self._kill_at = kill_at
        self.points: list[str] = []
        """Names of the effects so far."""
        self.killed = asyncio.Event()

    async def __call__(self, point: str) -> None:
        """A crash point was reached."""
        if self.killed.is_set():
            await asyncio.Event().wait()
        self.points.append(point)
        if self._kill_at == (point, self.points.count(point)):
            self.killed.set()
            await asyncio.Event().wait()  # a dead process never comes back from here


@dataclass
class World:
    """What a test sees."""

    envtest: Envtest
    namespace: str
    ray: FakeRay
    kuberay: FakeKubeRay
    operators: list[RunningOperator] = field(default_factory=list)

    def start_operator(
        self,
        *,
        crash_point: Callable[[str], Awaitable[None]] | None = None,
        kubeconfig: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        longest_wait_seconds: float | None = 0.1,
        definition_poll_seconds: float = 30.0,
    ) -> RunningOperator:
        """Start an operator for this namespace; the world stops it at the end."""
        hooks = Hooks(
            access=lambda _settings, _kube, session: LoopbackAccess(session, self.ray),
            longest_wait_seconds=longest_wait_seconds,
            definition_poll_seconds=definition_poll_seconds,
        )
        if crash_point is not None:
            hooks.crash_point = crash_point
        values = {
            "namespaces": (self.namespace,),
            "kubeconfig": kubeconfig or self.envtest.kubeconfig,
            "metrics_port": 0,
            "health_port": 0,
            **(settings or {}),
        }
        operator = Operator(Settings(**values), hooks)
        running = RunningOperator(operator, asyncio.create_task(operator.run()))
        self.operators.append(running)
        return running

    async def install_kuberay(self) -> None:
        """`helm install kuberay-operator`, on a world opened without it."""
        await asyncio.to_thread(lambda: apply_crd(self.envtest, find_kuberay_crd()))
        self.kuberay.is_installed = True

    async def apply_job(self, name: str = "tiny", **spec: Any) -> dict[str, Any]:
        """`kubectl apply` of JOB with parts of the spec replaced (None removes a section)."""
        document = copy.deepcopy(JOB)
        document["metadata"] = {"name": name, "namespace": self.namespace}
        for section, value in spec.items():
            if isinstance(value, Mapping) and isinstance(document["spec"].get(section), Mapping):
                document["spec"][section] = {**document["spec"][section], **value}
            elif value is None:
                document["spec"].pop(section, None)
            else:
                document["spec"][section] = value
        path = f"{self._jobs_path}/{name}?fieldManager=test&force=true&fieldValidation=Strict"
        return await self.request("PATCH", path, document, "application/apply-patch+yaml")

    async def patch_job(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Change parts of the spec."""
        path = f"{self._jobs_path}/{name}"
        return await self.request("PATCH", path, {"spec": dict(spec)}, "application/merge-patch+json")

    async def get_job(self, name: str = "tiny") -> dict[str, Any]:
        """The RLJob."""
        return await self.request("GET", f"{self._jobs_path}/{name}")

    async def delete_job(self, name: str = "tiny") -> None:
        """`kubectl delete`."""
        await self.request("DELETE", f"{self._jobs_path}/{name}")

    async def list_objects(self, path: str) -> list[dict[str, Any]]:
        """Objects of a namespaced kind, for example `api/v1/secrets` or `apis/ray.io/v1/rayclusters`."""
        prefix, _, plural = path.rpartition("/")
        items: list[dict[str, Any]] = (await self.request("GET", f"/{prefix}/namespaces/{self.namespace}/{plural}"))[
            "items"
        ]
        return items

    async def wait_for_condition(
        self, kind: str, *, status: str = "True", name: str = "tiny", timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """`kubectl wait --for=condition=...`; the job. A time-out shows the whole status."""
        return await self.wait_for_job(
            lambda job: (find_condition(job, kind) or {}).get("status") == status,
            f"condition {kind}={status}",
            name=name,
            timeout_seconds=timeout_seconds,
        )

    async def wait_for_job(
        self,
        is_met: Callable[[dict[str, Any]], bool],
        what: str,
        *,
        name: str = "tiny",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """Until the job looks as wanted. A time-out shows the whole status."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.raise_if_operator_died()
            job = await self.get_job(name)
            if is_met(job):
                return job
            failed = find_condition(job, "Failed")
            if failed is not None and failed["status"] == "True":
                raise AssertionError(f"the job failed while the test waited for {what}: {job['status']}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_seconds:.0f} s for {what}; status: {job.get('status')}")
            await asyncio.sleep(_POLL_SECONDS)

    async def wait_until(
        self, is_met: Callable[[], Awaitable[bool]], what: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        """Until anything else is true."""
        deadline = time.monotonic() + timeout_seconds
        while not await is_met():
            self.raise_if_operator_died()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_seconds:.0f} s for {what}")
            await asyncio.sleep(_POLL_SECONDS)

    def raise_if_operator_died(self) -> None:
        """What ended with an error fails the test with that error, not with a time-out."""
        self.kuberay.raise_if_died()
        for running in self.operators:
            if running.task.done() and not running.task.cancelled() and running.task.exception() is not None:
                running.task.result()

    def count_operator_writes(self) -> Counter[tuple[str, str]]:
        """Writes of all operators in this namespace by (verb, resource), from the API server's audit log."""
        return self.envtest.count_writes(user_agent_prefix="rljob-operator/", namespace=self.namespace)

    async def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """An API call as admin. Raises aiohttp.ClientResponseError with the server's words."""
        return await self.kuberay.request(method, path, body, content_type)

    @property
    def _jobs_path(self) -> str:
        return f"/apis/rljob.io/v1alpha1/namespaces/{self.namespace}/rljobs"


@asynccontextmanager
async def open_world(environment: Envtest, *, with_kuberay: bool = True) -> AsyncIterator[World]:
    """A fresh namespace with everything in it; operators are stopped at the end."""
    namespace = f"test-{uuid.uuid4().hex[:10]}"
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await asyncio.to_thread(environment.request, "POST", "/api/v1/namespaces", document)
    ray = FakeRay()
    await ray.start()
    try:
        async with FakeKubeRay(environment, namespace, ray) as kuberay:
            kuberay.is_installed = with_kuberay
            world = World(environment, namespace, ray, kuberay)
            try:
                yield world
            finally:
                for running in world.operators:
                    with suppress(Exception):  # its error was raised in the test already
                        await running.stop()
    finally:
        await ray.stop()


def find_condition(document: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """A condition of an object, or None."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), None)
