"""Host and port as text, both families."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.addresses import format_host_port, is_ipv6_literal, is_loopback, parse_host_port, strip_brackets


@pytest.mark.parametrize(
    ("host", "port", "want"),
    [
        ("10.0.0.1", 8090, "10.0.0.1:8090"),
        ("fd00::1", 8090, "[fd00::1]:8090"),
        ("::1", 6379, "[::1]:6379"),
        ("fe80::1%eth0", 1, "[fe80::1%eth0]:1"),
        ("head-svc.ns.svc.cluster.local", 8265, "head-svc.ns.svc.cluster.local:8265"),
        ("fd00:10:244::1a", 5000, "[fd00:10:244::1a]:5000"),
    ],
)
def test_round_trip(host: str, port: int, want: str) -> None:
    assert format_host_port(host, port) == want
    assert parse_host_port(want) == (host, port)


def test_brackets_are_not_doubled() -> None:
    assert format_host_port("[fd00::1]", 80) == "[fd00::1]:80"


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [("", 80, "host is empty"), ("a", 65536, "outside"), ("a", -1, "outside"), ("a:80", 80, "a:80")],
)
def test_bad_parts_are_refused(host: str, port: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        format_host_port(host, port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fd00::1:5000", "ambiguous"),
        ("10.0.0.1", "not host:port"),
        (":80", "not host:port"),
        ("[fd00::1]", "no port"),
        ("[not-an-address]:80", "not-an-address"),
        ("a:", "no port"),
        ("a:80x", "no port"),
        ("a:70000", "no port"),
        ("a:-1", "no port"),
        ("a:²", "no port"),
    ],
)
def test_ambiguous_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_host_port(text)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.ip_addresses(), st.integers(0, 65535))
def test_round_trip_of_every_address(address: IPv4Address | IPv6Address, port: int) -> None:
    assert parse_host_port(format_host_port(str(address), port)) == (str(address), port)


@pytest.mark.parametrize(
    ("host", "want_ipv6", "want_loopback"),
    [
        ("::1", True, True),
        ("[::1]", True, True),
        ("127.0.0.1", False, True),
        ("localhost", False, True),
        ("fd00::1", True, False),
        ("10.0.0.1", False, False),
        ("head", False, False),
    ],
)
def test_classification(host: str, want_ipv6: bool, want_loopback: bool) -> None:
    assert is_ipv6_literal(host) is want_ipv6
    assert is_loopback(host) is want_loopback


def test_strip_brackets() -> None:
    assert strip_brackets("[fd00::1]") == "fd00::1"
    assert strip_brackets("head") == "head"
