"""Objects that every test cluster has: the DNS Service, namespaces, and storage for checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from testcluster.config import JOB_NAMESPACE, NODE_NAME, OPERATOR_NAMESPACE, ClusterConfig
from testcluster.images import JOB_USER_ID
from testcluster.kubectl import apply

CHECKPOINT_CLAIM = "rljob-checkpoints"


def dns_objects(config: ClusterConfig) -> list[dict[str, Any]]:
    """A Service without selector and its hand-made EndpointSlice: CoreDNS runs on the node, not in a pod."""
    metadata = {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": config.addresses.dns_service,
            "clusterIPs": [config.addresses.dns_service],
            "ipFamilies": [config.family.value],
            "ports": [{**port, "targetPort": 53} for port in ports],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": config.family.value,
        "endpoints": [{"addresses": [config.addresses.node], "conditions": {"ready": True}}],
        "ports": ports,
    }
    return [service, endpoints]


def namespace_objects() -> list[dict[str, Any]]:
    """The operator's namespace enforces the restricted profile; the jobs' does not (their pods mount host folders)."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE, "labels": restricted}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": JOB_NAMESPACE}},
    ]


def volume_objects(folder: Path, claim: str, namespace: str, volume: str) -> list[dict[str, Any]]:
    """A ``local`` PersistentVolume on the node's ``folder`` and a claim bound to it."""
    capacity = {"storage": "20Gi"}
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": capacity,
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "local": {"path": str(folder)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                "claimRef": {"namespace": namespace, "name": claim},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": capacity},
            },
        },
    ]


def ensure_volume(config: ClusterConfig, claim: str = CHECKPOINT_CLAIM, namespace: str = JOB_NAMESPACE) -> Path:
    """Make the claim and its host folder, writable by the job pods' user; returns the folder."""
    folder = config.run_dir / "volumes" / namespace / claim
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, JOB_USER_ID, JOB_USER_ID)
    apply(config, volume_objects(folder, claim, namespace, f"{namespace}-{claim}"))
    return folder
