"""Pod templates of head and workers: ours, the user's patches over it, and what must hold afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding, Severity
from rljob_api.names import LABEL_ROLE, RAY_DASHBOARD_PORT, RAY_GCS_PORT
from rljob_operator.render.environment import build_environment, enforce_environment
from rljob_operator.render.lifecycle import build_lifecycle
from rljob_operator.render.merge import merge_mapping
from rljob_operator.render.names import (
    RAY_CONTAINER,
    ROLE_HEAD,
    build_labels,
    compute_auth_secret_name,
    compute_config_map_name,
)
from rljob_operator.render.network import build_agent_check
from rljob_operator.render.network_policy import RAY_METRICS_PORT
from rljob_operator.render.resources import build_resources, check_gpu_resources, compute_shared_memory_bytes
from rljob_operator.render.template_rules import (
    check_merged_template,
    check_patch,
    drop_unusable_metadata,
    restore_metadata,
    restore_volumes,
)
from rljob_operator.render.types import RenderOptions
from rljob_operator.render.volumes import build_volumes

AGENT_PORT: Final = 52365
"""Ray's dashboard agent; `/api/healthz` there is open without a token and covers raylet and (on the head) GCS."""
RAY_CLIENT_PORT: Final = 10001
NON_ROOT_GROUP: Final = 65532


@dataclass(frozen=True)
class PodTemplate:
    """A merged template and what is to be said about it."""

    template: dict[str, Any]
    findings: list[Finding]


def build_pod_template(
    resolved: ResolvedJob, role: str, cluster_generation: int, options: RenderOptions
) -> PodTemplate:
    """Our template, then `podTemplate`, then the role's own patch; owned values are restored at the end."""
    cluster = resolved.spec.cluster
    role_field = "headPodTemplate" if role == ROLE_HEAD else "workerPodTemplate"
    role_patch = cluster.head_pod_template if role == ROLE_HEAD else cluster.worker_pod_template
    base = build_base_template(resolved, role, cluster_generation, options)
    template, findings = base, list[Finding]()
    for field, patch in (("podTemplate", cluster.pod_template), (role_field, role_patch)):
        path = f"spec.cluster.{field}"
        findings += check_patch(patch, template, path)
        if _has_errors(findings):
            return PodTemplate(base, findings)
        patch, dropped = drop_unusable_metadata(patch, base["metadata"]["labels"], path)
        template, merged = merge_mapping(template, patch, path)
        findings += dropped + merged + restore_metadata(template, base, path)

    template_path = f"spec.cluster.{role_field if role_patch else 'podTemplate'}"
    findings += check_merged_template(template, base, template_path)
    if _has_errors(findings):
        return PodTemplate(template, findings)
    findings += restore_volumes(template, base, template_path)
    container = template["spec"]["containers"][0]
    container_path = f"{template_path}.spec.containers[{RAY_CONTAINER}]"
    container["env"], environment_findings = enforce_environment(
        container.get("env") or [],
        resolved,
        compute_auth_secret_name(resolved.name, cluster_generation),
        f"{container_path}.env",
    )
    findings += environment_findings
    num_gpus = 0 if role == ROLE_HEAD else resolved.layout.gpus_per_node
    findings += check_gpu_resources(container, cluster.gpu_resource_name, num_gpus, container_path)
    if template["spec"].get("hostNetwork"):
        # Without it a pod in the node's network resolves names by the node's resolver and never finds the head.
        template["spec"].setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return PodTemplate(template, findings)


def build_base_template(
    resolved: ResolvedJob, role: str, cluster_generation: int, options: RenderOptions
) -> dict[str, Any]:
    """The template before any patch. Ray's container is the first: KubeRay demands it."""
    cluster = resolved.spec.cluster
    volumes, _ = _build_volumes(resolved, role, cluster_generation)
    pod_security: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if resolved.spec.checkpoint.storage.claim_name is not None:
        # New volumes belong to root; the group makes them writable for a non-root user. Only the root directory is
        # compared, since walking a volume full of checkpoints delays every start.
        pod_security |= {"fsGroup": NON_ROOT_GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.termination_grace_period_seconds,
        # A Service named vllm or sglang would inject VLLM_PORT=tcp://..., which the engines cannot parse.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": pod_security,
        "containers": [_build_ray_container(resolved, role, cluster_generation, options)],
        "volumes": volumes,
    }
    if cluster.service_account_name is not None:
        spec["serviceAccountName"] = cluster.service_account_name
    if cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.image_pull_secrets]
    return {
        "metadata": {
            "labels": build_labels(resolved.name, resolved.uid, cluster_generation) | {LABEL_ROLE: role},
            "annotations": _build_annotations(resolved),
        },
        "spec": spec,
    }


def _build_ray_container(
    resolved: ResolvedJob, role: str, cluster_generation: int, options: RenderOptions
) -> dict[str, Any]:
    cluster = resolved.spec.cluster
    _, mounts = _build_volumes(resolved, role, cluster_generation)
    container: dict[str, Any] = {
        "name": RAY_CONTAINER,
        "image": cluster.image,
        "imagePullPolicy": str(cluster.image_pull_policy),
        "env": build_environment(resolved, role, compute_auth_secret_name(resolved.name, cluster_generation), options),
        "ports": _build_ports(resolved, role),
        "resources": build_resources(resolved, role),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": _build_probe(resolved, options, failure_threshold=12),
        # A busy node answers late: only ten minutes of silence restart the attempt.
        "livenessProbe": _build_probe(resolved, options, failure_threshold=120),
        "volumeMounts": mounts,
    }
    if cluster.env_from:
        container["envFrom"] = cluster.env_from
    lifecycle = build_lifecycle(resolved)
    if lifecycle is not None:
        container["lifecycle"] = lifecycle
    return container


def _build_volumes(
    resolved: ResolvedJob, role: str, cluster_generation: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return build_volumes(
        resolved,
        compute_config_map_name(resolved.name, cluster_generation),
        compute_shared_memory_bytes(resolved, role),
    )


def _build_ports(resolved: ResolvedJob, role: str) -> list[dict[str, Any]]:
    ports = {"metrics": RAY_METRICS_PORT}
    if role == ROLE_HEAD:
        ports = {
            "gcs-server": RAY_GCS_PORT,
            "dashboard": RAY_DASHBOARD_PORT,
            "client": RAY_CLIENT_PORT,
            **ports,
            "rljob": resolved.server.port,
        }
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _build_probe(resolved: ResolvedJob, options: RenderOptions, failure_threshold: int) -> dict[str, Any]:
    # Explicit: KubeRay chooses by the version string and falls back to wget, which slim images do not have.
    return {
        **build_agent_check(AGENT_PORT, resolved.ip_family, options),
        "initialDelaySeconds": 5,
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }


def _build_annotations(resolved: ResolvedJob) -> dict[str, str]:
    # Argo CD shows pods with restartPolicy Never as progressing for ever.
    annotations = {"argocd.argoproj.io/ignore-restart-policy": "true"}
    if resolved.layout.gpus_per_node > 0:
        # Losing any pod, the head included, costs the whole attempt.
        annotations |= {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }
    return annotations


def _has_errors(findings: list[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)
