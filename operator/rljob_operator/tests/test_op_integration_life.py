"""Whole lives of jobs on a real API server."""

from __future__ import annotations

import pytest

from rljob_operator.testing.fake_ray import Script
from rljob_operator.testing.world import World, find_condition

pytestmark = pytest.mark.integration

MAX_WRITES = 25
CHILDREN = (
    "apis/ray.io/v1/rayclusters",
    "api/v1/secrets",
    "api/v1/configmaps",
    "apis/networking.k8s.io/v1/networkpolicies",
)


async def list_children(world: World) -> list[dict]:
    """Everything the operator made, without pods and without what the API server puts into each namespace."""
    children = [item for path in CHILDREN for item in await world.list_objects(path)]
    return [child for child in children if child["metadata"]["name"] != "kube-root-ca.crt"]


async def list_event_reasons(world: World) -> dict[str, dict]:
    return {event["reason"]: event for event in await world.list_objects("api/v1/events")}


async def test_happy_life(world: World):
    running = world.start_operator()
    await world.apply_job()
    job = await world.wait_for_condition("Succeeded")
    status = job["status"]
    assert status["phase"] == "Succeeded"
    assert status["observedGeneration"] == 1
    assert (status["progress"]["step"], status["progress"]["totalSteps"]) == (4, 4)
    assert status["checkpoint"]["step"] == 4
    assert [attempt["outcome"] for attempt in status["attempts"]] == ["Succeeded"]
    assert find_condition(job, "Failed")["status"] == "False"
    assert find_condition(job, "Validated")["status"] == "True"

    async def is_released() -> bool:
        return not await list_children(world)

    await world.wait_until(is_released, "the cluster to be released")
    counts = world.count_operator_writes()
    writes = {what: n for what, n in counts.items() if what[1] != "events"}
    print(f"{sum(writes.values())} API writes (limit {MAX_WRITES}): {writes}")
    assert sum(writes.values()) <= MAX_WRITES
    reasons = await list_event_reasons(world)
    assert {"Submitted", "Running", "Succeeded"} <= set(reasons)
    # Terminal is terminal: nothing is made again, nothing is written again.
    metrics = running.operator.metrics.registry
    assert metrics.get_sample_value("rljob_job_step", {"namespace": world.namespace, "name": "tiny"}) == 4
    await world.delete_job()

    async def is_forgotten() -> bool:
        return metrics.get_sample_value("rljob_job_step", {"namespace": world.namespace, "name": "tiny"}) is None

    await world.wait_until(is_forgotten, "the series of the deleted job to vanish")
    assert world.count_operator_writes() == counts
    assert len(world.envtest.list_created(resource="rayclusters", namespace=world.namespace)) == 1


async def test_children_are_owned_by_the_job_and_its_spec_is_never_written(world: World):
    world.kuberay.unschedulable = True
    world.start_operator()
    applied = await world.apply_job()

    async def is_rendered() -> bool:
        return len(await list_children(world)) == 4 and bool(await world.kuberay.list_pods())

    await world.wait_until(is_rendered, "four children and the pods")
    for child in await list_children(world):
        assert child["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "rljob.io/v1alpha1",
                "kind": "RLJob",
                "name": "tiny",
                "uid": applied["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ], child["kind"]
    job = await world.wait_for_job(
        lambda job: "Insufficient" in (find_condition(job, "ClusterReady") or {}).get("message", ""),
        "the scheduler's words in ClusterReady",
        timeout_seconds=90,
    )
    assert find_condition(job, "ClusterReady")["status"] == "False"
    assert job["spec"] == applied["spec"]
    assert job["metadata"]["generation"] == 1
    assert "finalizers" not in job["metadata"]
    assert "annotations" not in job["metadata"]


async def test_bad_job_fails_before_any_child_exists(world: World):
    world.start_operator()
    # Valid for the schema, refused by a rule that CEL does not repeat.
    volume = {"name": "code", "mountPath": "/etc/rljob", "emptyDir": {}}
    await world.apply_job(cluster={"nodes": 1, "gpusPerNode": 0, "ranksPerNode": 1, "volumes": [volume]})
    job = await world.wait_for_condition("Failed")
    validated = find_condition(job, "Validated")
    assert validated["status"] == "False"
    assert "spec.cluster.volumes[0].mountPath" in validated["message"]
    assert find_condition(job, "Stalled")["status"] == "True"
    assert await list_children(world) == []
    assert world.envtest.list_created(resource="rayclusters", namespace=world.namespace) == []


async def test_unsupported_feature_is_refused_and_named(world: World):
    world.start_operator()
    await world.apply_job(cluster={"nodes": 2, "gpusPerNode": 0, "ranksPerNode": 1, "queueName": "rl"})
    job = await world.wait_for_condition("Failed")
    assert "queueName" in find_condition(job, "Validated")["message"]
    assert await list_children(world) == []


async def test_trainer_that_finds_no_data_fails_the_job_in_its_own_words(world: World):
    message = "spec.data.train[0]: /data/train.jsonl does not exist"
    world.ray.scripts = lambda attempt: Script(fail_at_step=1, exit_code=65, reason="InvalidData", message=message)
    world.start_operator()
    await world.apply_job(failurePolicy={"maxRetries": 3, "backoffSeconds": 0})
    job = await world.wait_for_condition("Failed")
    failed = find_condition(job, "Failed")
    assert failed["reason"] == "InvalidData"
    assert message in failed["message"]
    assert job["status"]["attempt"] == 1
    assert job["status"]["failures"][-1]["reason"] == "InvalidData"

    async def is_told() -> bool:
        events = await world.list_objects("api/v1/events")
        return any(event["type"] == "Warning" and message in event["message"] for event in events)

    await world.wait_until(is_told, "a Warning event with the trainer's words")


async def test_transient_error_is_retried_on_the_same_cluster_from_the_checkpoint(world: World):
    world.ray.scripts = lambda attempt: (
        Script(fail_at_step=3, exit_code=75, reason="TransientError", message="a rank lost its connection")
        if attempt == 1
        else Script()
    )
    world.start_operator()
    applied = await world.apply_job()
    job = await world.wait_for_condition("Succeeded", timeout_seconds=90)
    status, uid = job["status"], applied["metadata"]["uid"]
    assert (status["attempt"], status["clusterGeneration"]) == (2, 1)
    assert status["retries"]["counted"] == 1
    assert status["attempts"][-1]["resumedFromStep"] == 2
    assert dict(world.ray.accepted) == {f"{uid}-1": 1, f"{uid}-2": 1}


async def test_lost_worker_leads_to_a_new_cluster_and_a_free_retry(world: World):
    world.ray.scripts = lambda attempt: Script(total_steps=4, hangs_at_step=3) if attempt == 1 else Script()
    world.start_operator()
    await world.apply_job()
    await world.wait_for_job(
        lambda job: (job.get("status", {}).get("checkpoint") or {}).get("step") == 2, "the checkpoint"
    )
    pods = await world.kuberay.list_pods()
    worker = next(pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "worker")
    await world.kuberay.delete_pod(worker["metadata"]["name"])
    job = await world.wait_for_condition("Succeeded", timeout_seconds=120)
    status = job["status"]
    assert (status["attempt"], status["clusterGeneration"]) == (2, 2)
    assert (status["retries"]["counted"], status["retries"]["free"]) == (0, 1)
    assert status["failures"][-1]["reason"] == "WorkerLost"
    assert status["attempts"][-1]["resumedFromStep"] == 2
    created = world.envtest.list_created(resource="rayclusters", namespace=world.namespace)
    assert created == ["tiny-1", "tiny-2"]


async def test_suspend_checkpoints_releases_the_cluster_and_resumes(world: World):
    world.ray.scripts = lambda attempt: (
        Script(total_steps=6, hangs_at_step=3) if attempt == 1 else Script(total_steps=6)
    )
    world.start_operator()
    await world.apply_job(training={"promptsPerStep": 8, "totalSteps": 6})
    await world.wait_for_condition("Running")
    await world.patch_job("tiny", {"suspend": True})
    job = await world.wait_for_condition("Suspended")
    assert world.ray.stop_requests, "the trainer was asked for a checkpoint"
    step = job["status"]["checkpoint"]["step"]

    async def is_released() -> bool:
        return not await list_children(world)

    await world.wait_until(is_released, "the cluster to be released")
    await world.patch_job("tiny", {"suspend": False})
    job = await world.wait_for_condition("Succeeded", timeout_seconds=90)
    status = job["status"]
    assert (status["attempt"], status["clusterGeneration"]) == (2, 2)
    assert (status["retries"]["counted"], status["retries"]["free"]) == (0, 0)
    assert status["attempts"][-1]["resumedFromStep"] == step
