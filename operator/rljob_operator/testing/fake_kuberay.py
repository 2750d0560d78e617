"""Stands in for KubeRay, kubelet and garbage collector on a bare API server: makes pods, marks them ready, cleans up.

Behaves as read in KubeRay 1.6.2 where it matters to a controller on top: failed or deleted workers are replaced
without a word, a head is not once provisioned, conditions latch, `.status.state` is never reset. Pods are a cluster's
own by their label `ray.io/cluster`, whoever owns them and even while they terminate (association.go): a RayCluster of
an old name is provisioned by the old one's dying pods.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.fake_ray import FakeRay

_POLL_SECONDS: Final = 0.1
_WATCHED_KINDS: Final = ("apis/ray.io/v1", "rayclusters"), ("api/v1", "pods"), ("apis/rljob.io/v1alpha1", "rljobs")
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_MAX_EVENT_BYTES: Final = 2**22
_MERGE_PATCH: Final = "application/merge-patch+json"
_OWNED_KINDS: Final = (
    "apis/ray.io/v1/namespaces/{}/rayclusters",
    "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "api/v1/namespaces/{}/configmaps",
    "api/v1/namespaces/{}/secrets",
)
_NODE: Final = "node"
"""The API server removes a pod without a node at once, without any grace."""


class FakeKubeRay:
    """Serves one namespace until stopped."""

    def __init__(self, environment: Envtest, namespace: str, ray: FakeRay) -> None:
        self._environment = environment
        self._namespace = namespace
        self._ray = ray
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_changed = True
        self.is_installed = True
        """False: as if there were no KubeRay at all."""
        self.unschedulable = False
        """New pods stay Pending: no node fits."""
        self.pod_status: dict[str, Any] | None = None
        """Status that new pods get instead of Running and ready."""
        self.collects_garbage = True
        """False: the garbage collector lags behind, what deleted RLJobs owned stays."""
        self.finishes_deletions = True
        """False: deleted pods stay in their preStop hooks, running and ready."""
        self.created_pods = 0
        """Pods made so far."""

    async def __aenter__(self) -> FakeKubeRay:
        context = ssl.create_default_context(cafile=str(self._environment.ca_path))
        self._session = aiohttp.ClientSession(
            base_url=self._environment.server,
            headers={"Authorization": f"Bearer {self._environment.token}", "User-Agent": "fake-kuberay"},
            connector=aiohttp.TCPConnector(ssl=context),
            timeout=aiohttp.ClientTimeout(total=30),
        )
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._session is not None:
            await self._session.close()

    def raise_if_died(self) -> None:
        """The stand-in's own failure must not look like the operator's."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def list_clusters(self) -> list[dict[str, Any]]:
        """RayClusters of the namespace."""
        return await self._list(f"/apis/ray.io/v1/namespaces/{self._namespace}/rayclusters")

    async def list_pods(self) -> list[dict[str, Any]]:
        """Pods of the namespace."""
        return await self._list(f"/api/v1/namespaces/{self._namespace}/pods")

    async def delete_pod(self, name: str) -> None:
        """A node dies with the pod on it: at once, no grace."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        await self.request("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{name}", options)

    async def set_pod_status(self, name: str, status: Mapping[str, Any]) -> None:
        """What a kubelet would report."""
        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}/status"
        await self.request("PATCH", path, {"status": dict(status)}, _MERGE_PATCH)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for api, plural in _WATCHED_KINDS:
                group.create_task(self._watch(f"/{api}/namespaces/{self._namespace}/{plural}"))
            last: object = None
            while True:
                # What a round depends on besides the objects.
                switches = (self.collects_garbage, self.finishes_deletions, frozenset(self._ray.heads))
                if self.is_installed and (self._has_changed or switches != last):
                    self._has_changed, last = False, switches
                    await self._go_round()
                await asyncio.sleep(_POLL_SECONDS)

    async def _go_round(self) -> None:
        if self.collects_garbage:
            await self._collect_garbage()
        clusters, pods = await asyncio.gather(self.list_clusters(), self.list_pods())
        living = {cluster["metadata"]["uid"] for cluster in clusters}
        for pod in pods:
            owner = pod["metadata"]["ownerReferences"][0]
            if owner["uid"] not in living:
                with self._tolerate_races():
                    await self._remove_pod(pod, owner["name"])
        for cluster in clusters:
            with self._tolerate_races():
                await self._reconcile(cluster, [p for p in pods if _is_labelled(p, cluster)])

    async def _watch(self, path: str) -> None:
        """Tells of changes, not which: listing in every round instead was half of what tests cost."""
        assert self._session is not None
        options: dict[str, Any] = {
            "params": {"watch": "true"},
            "headers": {"Accept": _METADATA_ONLY},
            "timeout": aiohttp.ClientTimeout(total=None),
            "read_bufsize": _MAX_EVENT_BYTES,
        }
        while True:
            if self.is_installed:
                async with self._session.get(path, **options) as response:
                    if response.status == 200:
                        async for line in response.content:
                            # Of the jobs only their end matters; their status changes all the time.
                            if not path.endswith("/rljobs") or json.loads(line)["type"] == "DELETED":
                                self._has_changed = True
                        self._has_changed = True
                    elif response.status != 404:  # 404: a definition that is installed later
                        raise RuntimeError(f"watch of {path}: {response.status} {await response.text()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _collect_garbage(self) -> None:
        """Delete what RLJobs owned that are gone; their pods follow as those of any deleted RayCluster."""
        clusters = await self.list_clusters()  # before the jobs: what is listed here has an owner that is listed below
        if not any(_is_garbage(cluster, set()) for cluster in clusters):
            return  # none is owned by any RLJob; that kind need not even be installed
        jobs = await self._list(f"/apis/rljob.io/v1alpha1/namespaces/{self._namespace}/rljobs")
        uids = {job["metadata"]["uid"] for job in jobs}
        if not self.collects_garbage or not any(_is_garbage(cluster, uids) for cluster in clusters):
            return  # the switch may have been turned while the jobs were listed
        for kind in _OWNED_KINDS:
            path = f"/{kind.format(self._namespace)}"
            for document in await self._list(path):
                if _is_garbage(document, uids):
                    options = {"preconditions": {"uid": document["metadata"]["uid"]}}
                    with self._tolerate_races():
                        await self.request("DELETE", f"{path}/{document['metadata']['name']}", options)

    async def _remove_pod(self, pod: Mapping[str, Any], cluster: str) -> None:
        metadata = pod["metadata"]
        if self.finishes_deletions:
            if metadata["labels"]["ray.io/node-type"] == "head":
                self._ray.stop_head(self._namespace, cluster)
            await self.delete_pod(metadata["name"])
        elif "deletionTimestamp" not in metadata:
            await self.request("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{metadata['name']}")

    async def _reconcile(self, cluster: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        name = cluster["metadata"]["name"]
        was_provisioned = _has_condition(cluster, "RayClusterProvisioned")
        heads = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "head"]
        if not heads and was_provisioned:  # annotation ray.io/disable-provisioned-head-restart
            self._ray.stop_head(self._namespace, name)
            if _has_condition(cluster, "HeadPodReady"):
                await self._set_conditions(cluster, {"HeadPodReady": ("False", "HeadPodNotFound")}, len(pods))
            return
        num_created_before = self.created_pods
        if not heads:
            await self._create_pod(cluster, cluster["spec"]["headGroupSpec"]["template"], "head", "headgroup", 0)
        num_workers = len(pods) - len(heads)
        for group in cluster["spec"].get("workerGroupSpecs") or []:
            for index in range(num_workers, int(group["replicas"])):
                await self._create_pod(cluster, group["template"], "worker", group["groupName"], index)
        num_ready = sum(1 for pod in pods if _is_ready(pod))
        if heads and _is_ready(heads[0]) and (self._namespace, name) not in self._ray.heads:
            self._ray.start_head(self._namespace, name, await self._read_token(cluster))
        # CheckAllPodsRunning: all there are, dying ones too.
        if num_ready == len(pods) and num_created_before == self.created_pods and not was_provisioned:
            conditions = {
                "HeadPodReady": ("True", "HeadPodRunningAndReady"),
                "RayClusterProvisioned": ("True", "AllPodRunningAndReadyFirstTime"),
            }
            await self._set_conditions(cluster, conditions, num_ready)

    async def _create_pod(
        self, cluster: Mapping[str, Any], template: Mapping[str, Any], role: str, group: str, index: int
    ) -> None:
        metadata = cluster["metadata"]
        self.created_pods += 1
        name = f"{metadata['name']}-{role}-{index}-{self.created_pods}"
        template_metadata = template.get("metadata") or {}
        labels = {
            **(template_metadata.get("labels") or {}),
            "ray.io/cluster": metadata["name"],
            "ray.io/node-type": role,
            "ray.io/group": group,
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": template_metadata.get("annotations") or {},
                "ownerReferences": [
                    {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": metadata["name"], "uid": metadata["uid"]}
                ],
            },
            "spec": template["spec"] if self.unschedulable else {**template["spec"], "nodeName": _NODE},
        }
        await self.request("POST", f"/api/v1/namespaces/{self._namespace}/pods", pod)
        status = self._build_pod_status(template)
        if role == "head" and _is_ready({"status": status}):  # it serves before its probe says so
            self._ray.start_head(self._namespace, metadata["name"], await self._read_token(cluster))
        await self.set_pod_status(name, status)

    def _build_pod_status(self, template: Mapping[str, Any]) -> dict[str, Any]:
        if self.unschedulable:
            message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            return {"phase": "Pending", "conditions": [condition]}
        if self.pod_status is not None:
            return self.pod_status
        container = template["spec"]["containers"][0]
        running = {"running": {"startedAt": _now()}}
        return {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": running,
                }
            ],
        }

    async def _set_conditions(
        self, cluster: Mapping[str, Any], changes: Mapping[str, tuple[str, str]], num_ready: int
    ) -> None:
        conditions: dict[str, Any] = {c["type"]: c for c in (cluster.get("status") or {}).get("conditions") or []}
        for kind, (value, reason) in changes.items():
            conditions[kind] = {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": "",
                "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        path = f"/apis/ray.io/v1/namespaces/{self._namespace}/rayclusters/{cluster['metadata']['name']}/status"
        status = {"state": "ready", "readyWorkerReplicas": max(0, num_ready - 1), "conditions": [*conditions.values()]}
        await self.request("PATCH", path, {"status": status}, _MERGE_PATCH)

    async def _read_token(self, cluster: Mapping[str, Any]) -> str:
        path = f"/api/v1/namespaces/{self._namespace}/secrets/{cluster['metadata']['name']}-auth"
        secret = await self.request("GET", path)
        return base64.b64decode(secret["data"]["auth_token"]).decode()

    @contextmanager
    def _tolerate_races(self) -> Iterator[None]:
        """An object that vanished or changed under our hands is looked at again in the next round."""
        try:
            yield
        except aiohttp.ClientResponseError as error:
            if error.status not in (404, 409):
                raise
            self._has_changed = True

    async def _list(self, path: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await self.request("GET", path))["items"]
        return items

    async def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """One API call as admin. Raises aiohttp.ClientResponseError with the server's words."""
        assert self._session is not None, "use `async with FakeKubeRay(...)`"
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers={"Content-Type": content_type}) as response:
            if response.status >= 400:
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=response.status, message=await response.text()
                )
            document: dict[str, Any] = await response.json()
            return document


def _is_labelled(pod: Mapping[str, Any], cluster: Mapping[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"]["ray.io/cluster"] == cluster["metadata"]["name"])


def _is_garbage(document: Mapping[str, Any], job_uids: set[str]) -> bool:
    owners = document["metadata"].get("ownerReferences") or []
    return bool(owners) and all(owner["kind"] == "RLJob" and owner["uid"] not in job_uids for owner in owners)


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _has_condition(cluster: Mapping[str, Any], kind: str) -> bool:
    conditions = (cluster.get("status") or {}).get("conditions") or []
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
