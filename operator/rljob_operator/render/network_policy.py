"""NetworkPolicy of one cluster: ingress from the job itself, the operator and monitoring; egress stays open."""

from __future__ import annotations

from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.names import LABEL_CLUSTER_GENERATION, LABEL_JOB, RAY_DASHBOARD_PORT
from rljob_operator.render.names import build_labels, compute_network_policy_name
from rljob_operator.render.types import OwnerRef, RenderOptions

RAY_METRICS_PORT: Final = 8080
_NAMESPACE_NAME_LABEL: Final = "kubernetes.io/metadata.name"


def build_network_policy(
    resolved: ResolvedJob, owner: OwnerRef, cluster_generation: int, options: RenderOptions
) -> dict[str, Any] | None:
    """None when switched off. Kubelet probes are not subject to it."""
    if not options.network_policy:
        return None
    labels = build_labels(resolved.name, resolved.uid, cluster_generation)
    own_pods = {"matchLabels": {label: labels[label] for label in (LABEL_JOB, LABEL_CLUSTER_GENERATION)}}
    # Ray, NCCL and the engines use ports chosen at run time: everything between the job's own pods is open.
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": own_pods}]}]
    operator_peers = _build_operator_peers(options)
    if operator_peers:
        ingress.append(
            {"from": operator_peers, "ports": [_tcp_port(RAY_DASHBOARD_PORT), _tcp_port(resolved.server.port)]}
        )
    if options.monitoring_namespace_labels:
        ingress.append(
            {
                "from": [{"namespaceSelector": {"matchLabels": dict(options.monitoring_namespace_labels)}}],
                "ports": [_tcp_port(RAY_METRICS_PORT), _tcp_port(resolved.server.port)],
            }
        )
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": compute_network_policy_name(resolved.name, cluster_generation),
            "namespace": resolved.namespace,
            "labels": labels,
            "ownerReferences": [owner.to_dict()],
        },
        "spec": {"podSelector": own_pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _build_operator_peers(options: RenderOptions) -> list[dict[str, Any]]:
    peers: list[dict[str, Any]] = []
    if options.operator_namespace is not None:
        peer: dict[str, Any] = {
            "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: options.operator_namespace}}
        }
        if options.operator_pod_labels:
            peer["podSelector"] = {"matchLabels": dict(options.operator_pod_labels)}
        peers.append(peer)
    peers += [{"ipBlock": {"cidr": cidr}} for cidr in options.operator_cidrs]
    return peers


def _tcp_port(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}
