"""Names and labels of the objects of one cluster generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rljob_api.names import FIELD_MANAGER, LABEL_CLUSTER_GENERATION, LABEL_JOB, LABEL_JOB_UID, compute_ray_cluster_name

AUTH_TOKEN_KEY: Final = "auth_token"
"""Key of the token in the Secret (KubeRay's own name for it)."""
JOB_CONFIG_KEY: Final = "job.json"
PRE_STOP_KEY: Final = "prestop.py"
RAY_CONTAINER: Final = "ray"
"""Name of the Ray container in head and worker pods alike, so that one pod template patches both."""
WORKER_GROUP: Final = "worker"
ROLE_HEAD: Final = "head"
ROLE_WORKER: Final = "worker"


@dataclass(frozen=True)
class ObjectReference:
    """Where an object is found: enough to get or delete it."""

    api_version: str
    kind: str
    namespace: str
    name: str


def compute_auth_secret_name(job_name: str, cluster_generation: int) -> str:
    """`<cluster>-auth`."""
    return f"{compute_ray_cluster_name(job_name, cluster_generation)}-auth"


def compute_config_map_name(job_name: str, cluster_generation: int) -> str:
    """`<cluster>-config`."""
    return f"{compute_ray_cluster_name(job_name, cluster_generation)}-config"


def compute_network_policy_name(job_name: str, cluster_generation: int) -> str:
    """`<cluster>`."""
    return compute_ray_cluster_name(job_name, cluster_generation)


def list_cluster_object_references(job_name: str, namespace: str, cluster_generation: int) -> list[ObjectReference]:
    """What `render_cluster_objects` may have made for this generation, in the order to delete it: cluster first."""
    cluster_name = compute_ray_cluster_name(job_name, cluster_generation)
    return [
        ObjectReference("ray.io/v1", "RayCluster", namespace, cluster_name),
        ObjectReference(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            namespace,
            compute_network_policy_name(job_name, cluster_generation),
        ),
        ObjectReference("v1", "ConfigMap", namespace, compute_config_map_name(job_name, cluster_generation)),
        ObjectReference("v1", "Secret", namespace, compute_auth_secret_name(job_name, cluster_generation)),
    ]


def build_labels(job_name: str, job_uid: str, cluster_generation: int) -> dict[str, str]:
    """Labels of every object of one cluster generation.

    `app.kubernetes.io/name` and `created-by` stay off: KubeRay sets them on pods and selects its head Service by them.
    """
    return {
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        "app.kubernetes.io/part-of": "rljob",
        LABEL_JOB: job_name,
        LABEL_JOB_UID: job_uid,
        LABEL_CLUSTER_GENERATION: str(cluster_generation),
    }
