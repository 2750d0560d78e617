"""A name that is used again: `kubectl delete` and `kubectl apply` of one job, and objects that somebody else made."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.plan import cluster
from rljob_operator.testing.fake_ray import Script
from rljob_operator.testing.world import World, find_condition

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CLUSTERS = "apis/ray.io/v1/rayclusters"
OWNED_KINDS = (CLUSTERS, "api/v1/secrets", "api/v1/configmaps", "apis/networking.k8s.io/v1/networkpolicies")
TIMEOUT_SECONDS = 180.0


async def run_first_job(world: World, **cluster_fields: Any) -> str:
    """Bring a job to a running trainer that never ends; its UID."""
    world.ray.scripts = lambda attempt: Script(hangs_at_step=3)
    world.start_operator()
    cluster_fields = {"nodes": 2, "gpusPerNode": 0, "ranksPerNode": 1, **cluster_fields}
    applied = await world.apply_job(cluster=cluster_fields)
    await world.wait_for_condition("Running", timeout_seconds=TIMEOUT_SECONDS)
    world.ray.scripts = lambda attempt: Script()
    uid: str = applied["metadata"]["uid"]
    return uid


async def apply_again(world: World, **cluster_fields: Any) -> str:
    """`kubectl delete rljob tiny; kubectl apply -f tiny.yaml`; the UID of the new job."""
    await world.delete_job()
    cluster_fields = {"nodes": 2, "gpusPerNode": 0, "ranksPerNode": 1, **cluster_fields}
    uid: str = (await world.apply_job(cluster=cluster_fields))["metadata"]["uid"]
    return uid


async def list_by_uid(world: World, path: str, uid: str) -> list[dict[str, Any]]:
    objects = await world.list_objects(path)
    return [item for item in objects if (item["metadata"].get("labels") or {}).get("rljob.io/job-uid") == uid]


async def test_job_applied_again_waits_for_the_pods_of_the_deleted_one_and_runs_once(world: World):
    """The old pods stay ready in their preStop hooks. A new RayCluster of their name would be provisioned by them."""
    old_uid = await run_first_job(world)
    world.kuberay.finishes_deletions = False
    new_uid = await apply_again(world)

    job = await world.wait_for_job(
        lambda job: (find_condition(job, "ClusterReady") or {}).get("reason") == "ReleasingCluster",
        "the job to wait for the old pods",
        timeout_seconds=TIMEOUT_SECONDS,
    )
    assert "tiny-1-" in find_condition(job, "ClusterReady")["message"]
    pods = await world.kuberay.list_pods()
    assert {pod["metadata"]["labels"]["rljob.io/job-uid"] for pod in pods} == {old_uid}
    assert all("deletionTimestamp" in pod["metadata"] for pod in pods)
    assert await world.list_objects(CLUSTERS) == []

    world.kuberay.finishes_deletions = True
    job = await world.wait_for_condition("Succeeded", timeout_seconds=TIMEOUT_SECONDS)
    assert job["metadata"]["uid"] == new_uid
    assert (job["status"]["attempt"], job["status"]["retries"]["counted"]) == (1, 0)
    assert dict(world.ray.accepted) == {f"{old_uid}-1": 1, f"{new_uid}-1": 1}
    assert len(world.envtest.list_created(resource="rayclusters", namespace=world.namespace)) == 2


async def test_pods_that_never_go_away_do_not_share_a_name_with_the_new_cluster(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """A dead node keeps its pods Terminating for ever: the wait ends, and the number alone keeps clear of them."""
    monkeypatch.setattr(cluster, "RELEASE_SLACK_SECONDS", 0.0)
    old_uid = await run_first_job(world, terminationGracePeriodSeconds=1)
    world.kuberay.finishes_deletions = False
    new_uid = await apply_again(world, terminationGracePeriodSeconds=1)

    job = await world.wait_for_condition("Succeeded", timeout_seconds=TIMEOUT_SECONDS)
    assert job["status"]["clusterGeneration"] == 2
    assert dict(world.ray.accepted) == {f"{old_uid}-1": 1, f"{new_uid}-1": 1}
    assert world.envtest.list_created(resource="rayclusters", namespace=world.namespace) == ["tiny-1", "tiny-2"]
    pods = await world.kuberay.list_pods()
    assert old_uid in {pod["metadata"]["labels"]["rljob.io/job-uid"] for pod in pods}, "nobody removed them by force"


async def test_cluster_of_a_deleted_job_is_not_taken_over(world: World, monkeypatch: pytest.MonkeyPatch):
    """`--cascade=orphan`, or garbage collection that lags behind: a forced apply would swap its owner and its UID."""
    monkeypatch.setattr(cluster, "RELEASE_SLACK_SECONDS", 0.0)
    old_uid = await run_first_job(world, terminationGracePeriodSeconds=1)
    before = {path: await list_by_uid(world, path, old_uid) for path in OWNED_KINDS}
    assert all(before.values())
    world.kuberay.collects_garbage = False
    new_uid = await apply_again(world, terminationGracePeriodSeconds=1)

    job = await world.wait_for_condition("Succeeded", timeout_seconds=TIMEOUT_SECONDS)
    assert job["status"]["clusterGeneration"] == 2
    assert dict(world.ray.accepted) == {f"{old_uid}-1": 1, f"{new_uid}-1": 1}

    async def is_released() -> bool:
        return not any([await list_by_uid(world, path, new_uid) for path in OWNED_KINDS])

    await world.wait_until(is_released, "the new cluster to be released", TIMEOUT_SECONDS)
    for path in OWNED_KINDS:
        after = await list_by_uid(world, path, old_uid)
        assert [strip_status(item) for item in after] == [strip_status(item) for item in before[path]], path


async def test_objects_that_somebody_made_by_hand_are_neither_taken_over_nor_deleted(world: World):
    template = {"spec": {"containers": [{"name": "ray-head", "image": "rayproject/ray:2.60.0"}]}}
    spec = {"headGroupSpec": {"rayStartParams": {}, "template": template}}
    by_hand = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "tiny-1"}, "spec": spec}
    await world.request("POST", f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters", by_hand)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tiny-2-auth"}, "stringData": {"key": "mine"}}
    await world.request("POST", f"/api/v1/namespaces/{world.namespace}/secrets", secret)

    world.start_operator()
    applied = await world.apply_job()
    job = await world.wait_for_condition("Succeeded", timeout_seconds=TIMEOUT_SECONDS)
    uid = applied["metadata"]["uid"]
    assert job["status"]["clusterGeneration"] == 3
    assert dict(world.ray.accepted) == {f"{uid}-1": 1}
    messages = [e["message"] for e in await world.list_objects("api/v1/events") if e["reason"] == "NameTaken"]
    assert len(messages) == 2
    assert any("RayCluster tiny-1 exists" in message for message in messages)
    assert any("Secret tiny-2-auth exists" in message for message in messages)

    async def is_released() -> bool:
        return [c["metadata"]["name"] for c in await world.list_objects(CLUSTERS)] == ["tiny-1"]

    await world.wait_until(is_released, "the job's own cluster to be released", TIMEOUT_SECONDS)
    (cluster_by_hand,) = await world.list_objects(CLUSTERS)
    assert "ownerReferences" not in cluster_by_hand["metadata"]
    assert "labels" not in cluster_by_hand["metadata"]
    (kept,) = await world.list_objects("api/v1/secrets")
    assert (kept["metadata"]["name"], list(kept["data"])) == ("tiny-2-auth", ["key"])


def strip_status(document: dict[str, Any]) -> dict[str, Any]:
    """Without what KubeRay writes."""
    metadata = {key: document["metadata"][key] for key in ("name", "uid", "labels", "ownerReferences")}
    return {"metadata": metadata, "content": document.get("spec") or document.get("data")}
