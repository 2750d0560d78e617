"""Names, addresses and folders of one test cluster: plain data, no I/O.

Two families can live on one machine at the same time, so everything that the host sees (network namespace, veth,
cgroup root, run folder) carries the family in its name.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parents[3]
NODE_NAME = "rljob-node"
CLUSTER_DOMAIN = "cluster.local"
API_PORT = 6443
JOB_NAMESPACE = "rljob-e2e"
OPERATOR_NAMESPACE = "rljob-system"


class IPFamily(enum.StrEnum):
    """The only address family that the cluster's node, pods and services have."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Addresses of one cluster; the pod range is one node's range, because there is one node."""

    node: str
    host: str
    prefix_length: int
    service_cidr: str
    kubernetes_service: str
    dns_service: str
    pod_cidr: str
    pod_mask_bits: int
    loopback: str
    any: str
    default_route: str


ADDRESSES = {
    IPFamily.IPV4: Addresses(
        node="10.201.0.1",
        host="10.201.0.2",
        prefix_length=24,
        service_cidr="10.202.0.0/16",
        kubernetes_service="10.202.0.1",
        dns_service="10.202.0.10",
        pod_cidr="10.203.0.0/24",
        pod_mask_bits=24,
        loopback="127.0.0.1",
        any="0.0.0.0",
        default_route="0.0.0.0/0",
    ),
    IPFamily.IPV6: Addresses(
        node="fd10:201::1",
        host="fd10:201::2",
        prefix_length=64,
        service_cidr="fd10:202::/112",
        kubernetes_service="fd10:202::1",
        dns_service="fd10:202::a",
        pod_cidr="fd10:203::/64",
        pod_mask_bits=64,
        loopback="::1",
        any="::",
        default_route="::/0",
    ),
}


def url_host(address: str) -> str:
    """The address as it stands in a URL or host:port pair (IPv6 in brackets)."""
    return f"[{address}]" if ":" in address else address


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """One cluster: its family and the folder that holds all of its state."""

    family: IPFamily
    run_dir: Path

    @property
    def addresses(self) -> Addresses:
        return ADDRESSES[self.family]

    @property
    def name(self) -> str:
        """Also the network namespace and the CNI network."""
        return f"rljob-e2e-{self.family.lower()}"

    @property
    def cgroup_root(self) -> str:
        """Each kubelet removes pods that it does not know below its root, so two clusters must not share one."""
        return f"/{self.name}"

    @property
    def host_link(self) -> str:
        """Host end of the veth pair (at most 15 characters)."""
        return f"rljob-{self.family.lower()}"

    @property
    def netns_path(self) -> Path:
        return Path("/run/netns") / self.name

    @property
    def kubeconfig(self) -> Path:
        """Admin credentials; the server URL works from the host and from inside the namespace."""
        return self.run_dir / "kubeconfig"

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    @property
    def audit_log(self) -> Path:
        """The API server's audit log, level Metadata, one JSON event a line."""
        return self.run_dir / "audit.log"

    @property
    def pki_dir(self) -> Path:
        return self.run_dir / "pki"

    @property
    def config_dir(self) -> Path:
        return self.run_dir / "config"

    @property
    def containerd_socket(self) -> Path:
        return self.run_dir / "containerd.sock"

    @property
    def server_url(self) -> str:
        return f"https://{url_host(self.addresses.node)}:{API_PORT}"


def default_run_dir(family: IPFamily) -> Path:
    """``/var/lib/rljob-e2e/<family>``, or below ``RLJOB_E2E_RUN_DIR`` when that is set."""
    return Path(os.environ.get("RLJOB_E2E_RUN_DIR", "/var/lib/rljob-e2e")) / family.lower()


def cluster_config(family: IPFamily | str) -> ClusterConfig:
    """The cluster of ``family`` at its default place.

    Raises:
        ValueError: the family is neither ``IPv4`` nor ``IPv6``.
    """
    try:
        known = IPFamily(family)
    except ValueError:
        raise ValueError(f"IP family {family!r} is not one of {[f.value for f in IPFamily]}; use IPv4") from None
    return ClusterConfig(family=known, run_dir=default_run_dir(known))


def cache_dir() -> Path:
    """``RLJOB_CACHE`` or ``~/.cache/rljob``: binaries and image archives, kept across clusters."""
    return Path(os.environ.get("RLJOB_CACHE") or Path.home() / ".cache" / "rljob")
