"""Configuration documents of the node's programs, as pure functions of the cluster's addresses and folders."""

from __future__ import annotations

import json
from typing import Any

from testcluster.config import CLUSTER_DOMAIN, NODE_NAME, ClusterConfig, url_host
from testcluster.pki import client_kubeconfig

PAUSE_IMAGE = "localhost/rljob/pause:test"


def containerd_config(config: ClusterConfig) -> str:
    """containerd's TOML: CRI only, every path below the run folder."""
    return f"""version = 2
root = "{config.run_dir}/containerd"
state = "{config.run_dir}/containerd-state"
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
  address = "{config.containerd_socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE a container cannot lower its OOM score, and runc dies of trying.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        Root = "{config.run_dir}/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{config.config_dir}/cni"
"""


def cni_config(config: ClusterConfig) -> dict[str, Any]:
    """A routed pod network: ``ptp`` sends all pod traffic through the node's forwarding.

    On a bridge, a reply between two pods of one node would bypass the service translation unless the kernel's
    br_netfilter is loaded.
    """
    return {
        "cniVersion": "0.4.0",
        "name": config.name,
        "plugins": [
            {
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(config.run_dir / "cni-ipam"),
                    "ranges": [[{"subnet": config.addresses.pod_cidr}]],
                    "routes": [{"dst": config.addresses.default_route}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet_config(config: ClusterConfig) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": config.addresses.node,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(config.pki_dir / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": config.cgroup_root,
        # Kubernetes 1.35 and later refuse cgroup v1 otherwise.
        "failCgroupV1": False,
        "clusterDNS": [config.addresses.dns_service],
        "clusterDomain": CLUSTER_DOMAIN,
        # Pods know the cluster's own names only; the host's resolver is not reachable from here.
        "resolvConf": "",
        "containerRuntimeEndpoint": f"unix://{config.containerd_socket}",
        "failSwapOn": False,
        # The disk belongs to the host: its fill level must not evict pods or remove images that no registry has.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "healthzBindAddress": config.addresses.loopback,
        "podLogsDir": str(config.run_dir / "pod-logs"),
        "volumePluginDir": str(config.run_dir / "volume-plugins"),
        "volumeStatsAggPeriod": "0s",
    }


def kube_proxy_config(config: ClusterConfig) -> dict[str, Any]:
    addresses = config.addresses
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "bindAddress": addresses.node,
        "healthzBindAddress": f"{url_host(addresses.node)}:10256",
        "metricsBindAddress": f"{url_host(addresses.loopback)}:10249",
        "hostnameOverride": NODE_NAME,
        "clientConnection": {"kubeconfig": str(client_kubeconfig(config, "kube-proxy"))},
        "mode": "iptables",
        "clusterCIDR": addresses.pod_cidr,
        # The connection table's size is the host's business.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }


def audit_policy() -> dict[str, Any]:
    """Who did what to which object, once per request (when it ends)."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }


def corefile(config: ClusterConfig) -> str:
    """CoreDNS on the node's address; negative answers expire fast, since Ray workers ask before the head is there."""
    return f""".:53 {{
    bind {config.addresses.node}
    errors
    ready {url_host(config.addresses.node)}:8181
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {client_kubeconfig(config, "coredns")}
        pods insecure
    }}
    cache {{
        success 1024 5
        denial 1024 1
    }}
}}
"""


def files(config: ClusterConfig) -> dict[str, str]:
    """Every configuration file: path below ``config_dir`` → content."""

    def document(value: dict[str, Any]) -> str:
        return json.dumps(value, indent=1) + "\n"

    return {
        "containerd.toml": containerd_config(config),
        "cni/10-rljob.conflist": document(cni_config(config)),
        "kubelet.yaml": document(kubelet_config(config)),
        "kube-proxy.yaml": document(kube_proxy_config(config)),
        "audit-policy.yaml": document(audit_policy()),
        "Corefile": corefile(config),
    }
