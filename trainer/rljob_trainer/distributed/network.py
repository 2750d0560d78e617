"""Addresses and interfaces for rendezvous. IPv6-only pods are normal: nothing assumes AF_INET or 127.0.0.1."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rljob_trainer.errors import ConfigurationError

SIOCGIFADDR: Final = 0x8915
IPV6_TABLE: Final = Path("/proc/net/if_inet6")
GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
OUTGOING_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of both families."""
FIRST_PORT: Final = 20_000
LAST_PORT: Final = 30_000
"""Above the ports of Ray's workers, below Kubernetes' node ports."""
NUM_PORTS_TRIED: Final = 32


def is_loopback(address: str) -> bool:
    """Whether a bare address is reachable only from its own host."""
    return ipaddress.ip_address(address).is_loopback


def find_local_address(peer: str, port: int = 9) -> str:
    """The local address the kernel would use towards `peer` (a connected UDP socket sends nothing).

    Raises:
        ConfigurationError: there is no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise ConfigurationError(
                f"no route from {socket.gethostname()} to rank 0 at {peer}: {error}; set spec.network.interface or "
                "check spec.network.ipFamily against the cluster's pod network"
            ) from error
        local: str = probe.getsockname()[0]
        return local.split("%")[0]


def list_interface_addresses() -> dict[str, list[str]]:
    """Bare addresses of each interface, IPv4 and IPv6, from the kernel."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        found[name] = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address on it
            found[name].append(socket.inet_ntoa(packed[20:24]))
    if IPV6_TABLE.exists():
        for line in IPV6_TABLE.read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def find_interface(peer: str) -> str:
    """Name of the interface on the route to `peer`.

    Raises:
        ConfigurationError: no interface has the local address.
    """
    local = ipaddress.ip_address(find_local_address(peer))
    addresses = list_interface_addresses()
    for name, values in addresses.items():
        if any(ipaddress.ip_address(value) == local for value in values):
            return name
    # The whole of 127.0.0.0/8 is local, whatever address the interface shows.
    if local.is_loopback and "lo" in addresses:
        return "lo"
    raise ConfigurationError(
        f"no interface of {socket.gethostname()} has the address {local} that leads to rank 0 at {peer}; "
        f"interfaces: {addresses}; set spec.network.interface to one of them"
    )


def choose_interface(
    environment: Mapping[str, str], configured: str | None, rank_0_address: str, *, spans_nodes: bool
) -> str:
    """Interface for gloo: the user's, else the job's `network.interface`, else the one on the route to rank 0.

    Raises:
        ConfigurationError: a NCCL-style pattern (gloo takes one exact name), an unknown interface, or loopback for
            ranks on several nodes, which would wait for each other for ever.
    """
    name = environment.get(GLOO_VARIABLE) or configured or find_interface(rank_0_address)
    if name.startswith(("^", "=")):
        raise ConfigurationError(
            f"{GLOO_VARIABLE}={name!r}: gloo takes an exact interface name, for example eth0 (`^` and `=` are NCCL's)"
        )
    known = list_interface_addresses()
    first = name.split(",")[0]
    if first not in known:
        raise ConfigurationError(
            f"{GLOO_VARIABLE}={name!r}: no such interface; this node has {', '.join(sorted(known))}"
        )
    if spans_nodes and first == "lo":
        raise ConfigurationError(
            f"{GLOO_VARIABLE}={name!r}: ranks on several nodes cannot meet on loopback; use one of "
            f"{', '.join(sorted(set(known) - {'lo'}))}"
        )
    return name


def set_interface(name: str) -> None:
    """Tell gloo and NCCL, before the first process group."""
    os.environ[GLOO_VARIABLE] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def find_free_port(host: str) -> int:
    """A port of `host` (bare, either family) that is free at this moment; who is told of it binds it a little later.

    Below the range that the kernel takes for outgoing connections: an engine binds its port half a minute after it was
    found, and on a busy node a connection would have taken it by then ("address already in use").

    Raises:
        OSError: `host` is no address of this node.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = range(FIRST_PORT, min(read_first_outgoing_port(), LAST_PORT))
    for port in random.SystemRandom().sample(candidates, min(NUM_PORTS_TRIED, len(candidates))):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            return port
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def read_first_outgoing_port() -> int:
    """Where the kernel's range for outgoing connections begins (of this network namespace)."""
    try:
        return int(OUTGOING_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_PORT


def is_local_address(address: str) -> bool:
    """Whether this node can listen at a bare address; a node with IPv6 only may lack even 127.0.0.1."""
    try:
        find_free_port(address)
    except OSError:
        return False
    return True
