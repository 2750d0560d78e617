"""Credentials of reward servers and trackers: by reference, in the pods that need them, and nowhere else."""

import json

import pytest
from render_cases import render_case

NAME = "rewards-trackers"
SECRETS = {
    "SCORER_AUTHORIZATION": {"name": "scorer", "key": "authorization"},
    "WANDB_API_KEY": {"name": "wandb", "key": "api-key"},
    "MLFLOW_TRACKING_TOKEN": {"name": "mlflow", "key": "token"},
}


def list_containers(cluster):
    spec = cluster["spec"]
    templates = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [template["template"]["spec"]["containers"][0] for template in templates]


@pytest.mark.parametrize("variable", SECRETS)
def test_the_driver_and_every_worker_get_the_reference(variable):
    [cluster] = [document for document in render_case(NAME) if document["kind"] == "RayCluster"]
    for container in list_containers(cluster):
        [entry] = [entry for entry in container["env"] if entry["name"] == variable]
        assert entry == {"name": variable, "valueFrom": {"secretKeyRef": SECRETS[variable]}}


def test_job_json_names_the_variable_and_no_more():
    [config] = [document for document in render_case(NAME) if document["kind"] == "ConfigMap"]
    job = json.loads(config["data"]["job.json"])
    functions = job["spec"]["reward"]["functions"]
    assert functions[1]["authorizationEnv"] == "SCORER_AUTHORIZATION"
    assert functions[0]["memory"] == "2Gi"
    assert "Bearer" not in json.dumps(job)
