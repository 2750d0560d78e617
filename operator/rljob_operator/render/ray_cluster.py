"""The RayCluster: one head without GPU for the driver, one group of equal workers, never scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.names import ANNOTATION_SPEC_HASH, LABEL_QUEUE, compute_ray_cluster_name
from rljob_operator.render.config_map import compute_spec_hash
from rljob_operator.render.names import ROLE_HEAD, ROLE_WORKER, WORKER_GROUP, build_labels
from rljob_operator.render.network import build_head_service, compute_dashboard_host, compute_node_ip_expression
from rljob_operator.render.pod_template import build_pod_template
from rljob_operator.render.quantity import parse_whole_cpus
from rljob_operator.render.resources import compute_object_store_bytes, compute_shared_memory_bytes
from rljob_operator.render.types import OwnerRef, RenderOptions


@dataclass(frozen=True)
class RenderedRayCluster:
    """The object and what the pod templates gave rise to."""

    document: dict[str, Any]
    findings: list[Finding]


def build_ray_cluster(
    resolved: ResolvedJob, owner: OwnerRef, cluster_generation: int, options: RenderOptions
) -> RenderedRayCluster:
    """`spec.suspend` is never rendered: Kueue or the operator set it later, and applying it again would fight them."""
    cluster = resolved.spec.cluster
    labels = build_labels(resolved.name, resolved.uid, cluster_generation)
    if cluster.queue_name is not None:
        labels[LABEL_QUEUE] = cluster.queue_name
    head = build_pod_template(resolved, ROLE_HEAD, cluster_generation, options)
    worker = build_pod_template(resolved, ROLE_WORKER, cluster_generation, options)
    head_group: dict[str, Any] = {
        "rayStartParams": _build_head_start_params(resolved, options),
        "template": head.template,
    }
    head_service = build_head_service(resolved.ip_family, options)
    if head_service is not None:
        head_group["headService"] = head_service
    document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": compute_ray_cluster_name(resolved.name, cluster_generation),
            "namespace": resolved.namespace,
            "labels": labels,
            "annotations": {
                # KubeRay replaces a lost head silently, with the driver and its exit code gone.
                "ray.io/disable-provisioned-head-restart": "true",
                ANNOTATION_SPEC_HASH: compute_spec_hash(resolved),
            },
            "ownerReferences": [owner.to_dict()],
        },
        "spec": {
            "rayVersion": cluster.ray_version,
            "enableInTreeAutoscaling": False,
            "headGroupSpec": head_group,
            "workerGroupSpecs": [
                {
                    "groupName": WORKER_GROUP,
                    "replicas": resolved.layout.num_nodes,
                    "minReplicas": resolved.layout.num_nodes,
                    "maxReplicas": resolved.layout.num_nodes,
                    "numOfHosts": 1,
                    "rayStartParams": _build_worker_start_params(resolved, options),
                    "template": worker.template,
                }
            ],
        },
    }
    return RenderedRayCluster(document, _deduplicate(head.findings + worker.findings))


def _build_head_start_params(resolved: ResolvedJob, options: RenderOptions) -> dict[str, str]:
    return {
        "dashboard-host": compute_dashboard_host(resolved.ip_family),
        "node-ip-address": compute_node_ip_expression(resolved.ip_family, options),
        # No actor may land on the head: its memory is the driver's and the GCS's.
        "num-cpus": "0",
        "num-gpus": "0",
        "object-store-memory": str(compute_object_store_bytes(compute_shared_memory_bytes(resolved, ROLE_HEAD))),
    }


def _build_worker_start_params(resolved: ResolvedJob, options: RenderOptions) -> dict[str, str]:
    cpus = resolved.spec.cluster.worker_resources.cpu
    return {
        "node-ip-address": compute_node_ip_expression(resolved.ip_family, options),
        "num-cpus": str(parse_whole_cpus(cpus or "1")),
        "num-gpus": str(resolved.layout.gpus_per_node),
        "object-store-memory": str(compute_object_store_bytes(compute_shared_memory_bytes(resolved, ROLE_WORKER))),
    }


def _deduplicate(findings: list[Finding]) -> list[Finding]:
    """Head and worker repeat what comes from the common fields."""
    return list(dict.fromkeys(findings))
