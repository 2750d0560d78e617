"""Host and port as text, for both families: literals of IPv6 carry brackets in URLs and `host:port`, nowhere else.

Bare is right for `MASTER_ADDR`, `TCPStore` and Ray's `--node-ip-address`; brackets are right for `tcp://`, `http://`,
Ray addresses and SGLang's `dist_init_addr` (sglang #2892, slime #2151).
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address


def format_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 literal; a zone (`fe80::1%eth0`) is kept.

    Raises:
        ValueError: port outside 0..65535, an empty host, or a host that already carries a port.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} is outside 0..65535, for example 8090")
    bare = strip_brackets(host)
    if not bare:
        raise ValueError("the host is empty; give a name or an address, for example 10.0.0.1")
    if ":" in bare:
        IPv6Address(bare)
        return f"[{bare}]:{port}"
    return f"{bare}:{port}"


def parse_host_port(text: str) -> tuple[str, int]:
    """Inverse of `format_host_port`: the bare host and the port.

    Raises:
        ValueError: no port, a bad port, or an IPv6 literal without brackets (ambiguous).
    """
    if text.startswith("["):
        host, separator, port_text = text[1:].partition("]:")
        if not separator:
            raise ValueError(f"{text!r} has no port; write [address]:port, for example [fd00::1]:8090")
        IPv6Address(host)
    else:
        host, separator, port_text = text.rpartition(":")
        if not separator or not host:
            raise ValueError(f"{text!r} is not host:port, for example 10.0.0.1:8090")
        if ":" in host:
            raise ValueError(f"{text!r} is ambiguous: put the IPv6 address in brackets, for example [fd00::1]:8090")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"{text!r} has no port in 0..65535 after the last colon, for example 8090")
    return host, int(port_text)


def strip_brackets(host: str) -> str:
    """The bare host of `[fd00::1]`, anything else unchanged."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_ipv6_literal(host: str) -> bool:
    """Whether the host (bare or in brackets) is an IPv6 address; names are not."""
    return isinstance(_parse_ip(strip_brackets(host)), IPv6Address)


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address (or the name localhost)."""
    address = _parse_ip(strip_brackets(host))
    return host == "localhost" if address is None else address.is_loopback


def _parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
