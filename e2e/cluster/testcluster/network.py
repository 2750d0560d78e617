"""The cluster's network namespace and the veth pair that joins it to the host.

The node lives in a namespace of its own: nothing of the host's rules, ports or routes is touched, and an IPv6-only
cluster is a matter of addresses. The host gets one link with an address and routes to pods and services, so that
kubectl, helm and pytest work from the host as they are. All of it disappears with the namespace.
"""

from __future__ import annotations

import json
from pathlib import Path

from testcluster.config import ClusterConfig, IPFamily
from testcluster.shell import run

NODE_LINK = "eth0"


def enter(config: ClusterConfig) -> list[str]:
    """Command prefix that enters the network namespace only.

    Not ``ip netns exec``: that remounts /sys and hides the cgroup mounts from kubelet.
    """
    return ["nsenter", f"--net={config.netns_path}"]


def _family_flag(config: ClusterConfig) -> str:
    return "-6" if config.family is IPFamily.IPV6 else "-4"


def _has_address(link: str, address: str, prefix: list[str]) -> bool:
    shown = run([*prefix, "ip", "-j", "address", "show", "dev", link], check=False)
    if shown.returncode != 0:
        return False
    return any(info["local"] == address for entry in json.loads(shown.stdout) for info in entry.get("addr_info", []))


def ensure_network(config: ClusterConfig) -> None:
    """Make what is missing of namespace, links, addresses, routes and forwarding."""
    addresses = config.addresses
    inside = enter(config)
    if not config.netns_path.exists():
        run(["ip", "netns", "add", config.name])
    run([*inside, "ip", "link", "set", "lo", "up"])
    whole = _has_address(NODE_LINK, addresses.node, inside) and _has_address(config.host_link, addresses.host, [])
    if not whole:
        run(["ip", "link", "delete", config.host_link], check=False)
        run(["ip", "link", "add", config.host_link, "type", "veth", "peer", "name", NODE_LINK, "netns", config.name])
        # nodad: duplicate address detection would keep the address unusable for the first seconds.
        extra = ["nodad"] if config.family is IPFamily.IPV6 else []
        for prefix, link, address in ((inside, NODE_LINK, addresses.node), ([], config.host_link, addresses.host)):
            run([*prefix, "ip", "address", "add", f"{address}/{addresses.prefix_length}", "dev", link, *extra])
            run([*prefix, "ip", "link", "set", link, "up"])
    family = _family_flag(config)
    run([*inside, "ip", family, "route", "replace", "default", "via", addresses.host])
    for cidr in (addresses.pod_cidr, addresses.service_cidr):
        run(["ip", family, "route", "replace", cidr, "via", addresses.node, "dev", config.host_link])
    forwarding = (
        ["net.ipv6.conf.all.forwarding", "net.ipv6.conf.default.forwarding"]
        if config.family is IPFamily.IPV6
        else ["net.ipv4.ip_forward"]
    )
    for key in forwarding:
        path = "/proc/sys/" + key.replace(".", "/")
        run([*inside, "sh", "-c", f"echo 1 > {path}"])


def namespace_pids(config: ClusterConfig) -> list[int]:
    """Processes whose network namespace is the cluster's (pods have their own and are not among them)."""
    if not config.netns_path.exists():
        return []
    return [int(line) for line in run(["ip", "netns", "pids", config.name]).stdout.split()]


def pod_namespaces(config: ClusterConfig) -> list[str]:
    """Names of the ``cni-*`` namespaces whose interface pairs with a link of the cluster's namespace."""
    found = []
    for path in sorted(Path("/run/netns").glob("cni-*")):
        # Only the text form names the peer's namespace; the JSON form has its bare id.
        words = run(["ip", "-n", path.name, "link", "show", "dev", "eth0"], check=False).stdout.split()
        if config.name in words and words[words.index(config.name) - 1] == "link-netns":
            found.append(path.name)
    return found


def remove_namespace(name: str) -> None:
    """Delete a named network namespace, if it is there."""
    if (Path("/run/netns") / name).exists():
        run(["ip", "netns", "delete", name])


def remove_network(config: ClusterConfig) -> None:
    run(["ip", "link", "delete", config.host_link], check=False)
    remove_namespace(config.name)
