"""RLJobs of the cases: the quickstart, small enough for one node with two cores."""

from __future__ import annotations

import copy
import uuid
from pathlib import Path
from typing import Any

import yaml
from settings import Settings

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
ASSETS = "/data"
# A job refuses the checkpoints of another job of its name, so every run of the cases has a folder of its own.
RUN = f"run-{uuid.uuid4().hex[:8]}"


def environment_mounts(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(cluster.volumes, cluster.env) that bring the host's Python environment into the pods."""
    volumes: list[dict[str, Any]] = []
    env: list[dict[str, str]] = []
    if settings.site_packages and settings.source:
        volumes = [
            {
                "name": "environment",
                "mountPath": "/opt/environment",
                "hostPath": settings.site_packages,
                "readOnly": True,
            },
            {"name": "source", "mountPath": "/opt/source", "hostPath": settings.source, "readOnly": True},
        ]
        env = [{"name": "PYTHONPATH", "value": "/opt/environment:/opt/source/crds:/opt/source/trainer"}]
    return volumes, env


def make_job(settings: Settings, name: str, *, total_steps: int, nodes: int = 2, **sections: Any) -> dict[str, Any]:
    """The quickstart on `nodes` worker pods with one rank each; `sections` are merged over the spec."""
    job = yaml.safe_load(QUICKSTART.read_text())
    volumes, env = environment_mounts(settings)
    spec = job["spec"]
    assets = {"name": "assets", "mountPath": ASSETS, "claimName": settings.claim, "subPath": "assets", "readOnly": True}
    # Small requests, no CPU limit: head, two workers and the operator share two cores, and throttled pods start slowly.
    resources = {"requests": {"cpu": "100m"}, "limits": {"cpu": None}}
    spec["cluster"] = {
        "nodes": nodes,
        "gpusPerNode": 0,
        "ranksPerNode": 1,
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "volumes": [*volumes, assets],
        "env": env,
        "headResources": {"cpu": "1", "memory": "4Gi"},
        "workerResources": {"cpu": "1", "memory": "4Gi"},
        "sharedMemory": "512Mi",
        "terminationGracePeriodSeconds": 60,
        "podTemplate": {"spec": {"containers": [{"name": "ray", "resources": resources}]}},
    }
    spec["checkpoint"] = {
        **spec.get("checkpoint", {}),
        "everySteps": 2,
        "storage": {"claimName": settings.claim, "path": RUN},
    }
    spec["training"] = {**spec["training"], "totalSteps": total_steps, "promptsPerStep": 32}
    spec["failurePolicy"] = {"maxRetries": 2, "backoffSeconds": 1, "startupTimeoutSeconds": 600}
    merge(spec, relocate_assets(spec))
    # What is tested here is the way of a job, not what it learns: the demo and its test show that.
    merge(spec, {"warmStart": {"supervised": {"steps": 20}}})
    merge(spec, sections)
    return {**job, "metadata": {"name": name, "namespace": settings.namespace}}


def relocate_assets(spec: dict[str, Any]) -> dict[str, Any]:
    """The quickstart's relative asset paths as the pods see them."""

    def move(value: Any) -> Any:
        if isinstance(value, str) and "quickstart-assets/" in value:
            return f"{ASSETS}/{value.split('quickstart-assets/', 1)[1]}"
        if isinstance(value, list):
            return [move(item) for item in value]
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        return value

    return {key: move(copy.deepcopy(spec[key])) for key in ("model", "data", "reward", "warmStart") if key in spec}


def merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """JSON merge patch in place."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        elif value is None:
            target.pop(key, None)
        else:
            target[key] = value


def make_assets_pod(settings: Settings) -> dict[str, Any]:
    """A pod that makes the quickstart's model, tokenizer and data on the claim."""
    volumes, env = environment_mounts(settings)
    mounts = [{"name": entry["name"], "mountPath": entry["mountPath"], "readOnly": True} for entry in volumes]
    sources = [{"name": entry["name"], "hostPath": {"path": entry["hostPath"]}} for entry in volumes]
    target = "/claim/assets"
    script = f"test -e {target}/done || (python3 -m rljob_trainer.quickstart {target} && touch {target}/done)"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "quickstart-assets", "namespace": settings.namespace},
        "spec": {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": "make",
                    "image": settings.image,
                    "imagePullPolicy": settings.image_pull_policy,
                    "command": ["bash", "-c", script],
                    "env": [*env, {"name": "HOME", "value": "/tmp"}],
                    "volumeMounts": [*mounts, {"name": "claim", "mountPath": "/claim"}],
                }
            ],
            "volumes": [*sources, {"name": "claim", "persistentVolumeClaim": {"claimName": settings.claim}}],
        },
    }
