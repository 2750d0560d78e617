"""Command line and environment of the operator."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rljob_api.catalogue import DEFAULT_CATALOGUE, Catalogue, load_catalogue
from rljob_api.v1alpha1.base import StrEnum
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_operator.adapters.lease import LeaseTimes
from rljob_operator.render import RenderOptions

_ENV_PREFIX: Final = "RLJOB_"


class ClusterAccess(StrEnum):
    """How job heads are reached."""

    DIRECT = "Direct"
    PROXY = "Proxy"


class LogFormat(StrEnum):
    """Log lines."""

    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True)
class Settings:
    """Everything that can be set."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    kubeconfig: Path | None = None
    """None: the pod's service account."""
    metrics_port: int = 8080
    health_port: int = 8081
    lease_namespace: str | None = None
    """None: no Lease; then nothing else may run a second operator."""
    lease_name: str = "rljob-operator"
    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    identity: str = "rljob-operator"
    cluster_access: ClusterAccess = ClusterAccess.DIRECT
    cluster_domain: str = "cluster.local"
    ip_family: IPFamily = IPFamily.IPV4
    """Family for jobs that leave it open: IPv4 or IPv6 (the flag's Auto is the family of the operator's own pod)."""
    catalogue: Catalogue = field(default_factory=lambda: DEFAULT_CATALOGUE)
    render_options: RenderOptions = field(default_factory=RenderOptions)
    reconcile_concurrency: int = 16
    api_requests_per_second: float = 300.0
    api_burst: int = 500
    log_format: LogFormat = LogFormat.TEXT


def parse_settings(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Flags win over `RLJOB_<FLAG>` variables. Prints usage and exits with 2 on a wrong flag."""
    parser = build_parser(environment)
    arguments = parser.parse_args(argv)
    if arguments.namespace and arguments.all_namespaces:
        parser.error("--namespace and --all-namespaces exclude each other: give one of them")
    if not arguments.namespace and not arguments.all_namespaces:
        parser.error("say what to watch: --all-namespaces, or --namespace NAME (repeatable)")
    if arguments.kubeconfig is None and "KUBERNETES_SERVICE_HOST" not in environment:
        parser.error("not in a pod: give --kubeconfig FILE or set KUBECONFIG")
    cluster_access = ClusterAccess(arguments.cluster_access)
    pod_ip_families = _parse_pod_ip_families(environment)
    catalogue = DEFAULT_CATALOGUE
    if arguments.catalogue is not None:
        try:
            catalogue = load_catalogue(arguments.catalogue.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--catalogue {arguments.catalogue}: {error}")
    return Settings(
        namespaces=tuple(arguments.namespace),
        kubeconfig=arguments.kubeconfig,
        metrics_port=arguments.metrics_port,
        health_port=arguments.health_port,
        lease_namespace=arguments.lease_namespace or None,
        lease_name=arguments.lease_name,
        lease_times=_parse_lease_times(parser, arguments),
        # Two containers of one pod, or two processes of one host, must not take each other for themselves.
        identity=f"{environment.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        cluster_access=cluster_access,
        cluster_domain=arguments.cluster_domain,
        ip_family=_detect_ip_family(IPFamily(arguments.ip_family), pod_ip_families, environment),
        catalogue=catalogue,
        render_options=RenderOptions(
            network_policy=not arguments.no_network_policy,
            operator_namespace=environment.get("POD_NAMESPACE") or None,
            operator_pod_labels=_parse_labels(parser, "--operator-pod-labels", arguments.operator_pod_labels),
            operator_cidrs=tuple(arguments.operator_cidr),
            monitoring_namespace_labels=_parse_labels(
                parser, "--monitoring-namespace-labels", arguments.monitoring_namespace_labels
            ),
            pod_ip_families=pod_ip_families,
            uses_pod_proxy=cluster_access is ClusterAccess.PROXY,
        ),
        reconcile_concurrency=arguments.reconcile_concurrency,
        api_requests_per_second=arguments.api_requests_per_second,
        api_burst=arguments.api_burst,
        log_format=LogFormat(arguments.log_format),
    )


def build_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """The flags; each reads its default from `RLJOB_<FLAG>` (lists: comma-separated)."""
    parser = argparse.ArgumentParser(prog="python -m rljob_operator", description="The RLJob operator.")

    def add(flag: str, default: Any, help_text: str, **options: Any) -> None:
        from_environment = environment.get(_ENV_PREFIX + flag[2:].upper().replace("-", "_"))
        parser.add_argument(flag, default=from_environment or default, help=help_text, **options)

    def add_list(flag: str, help_text: str, metavar: str) -> None:
        text = environment.get(_ENV_PREFIX + flag[2:].upper().replace("-", "_"), "")
        default = [part for part in text.split(",") if part]
        parser.add_argument(flag, action="append", default=default, help=help_text, metavar=metavar)

    def add_switch(flag: str, help_text: str) -> None:
        text = environment.get(_ENV_PREFIX + flag[2:].upper().replace("-", "_"), "")
        parser.add_argument(flag, action="store_true", default=text.lower() in ("1", "true", "yes"), help=help_text)

    add_list("--namespace", "watch this namespace (repeatable)", "NAME")
    add_switch("--all-namespaces", "watch all namespaces")
    add("--kubeconfig", environment.get("KUBECONFIG") or None, "kubeconfig file; default: in-cluster", type=Path)
    add("--metrics-port", 8080, "port of /metrics", type=int)
    add("--health-port", 8081, "port of /healthz and /readyz", type=int)
    add("--lease-namespace", "", "namespace of the Lease; empty: no leader election")
    add("--lease-name", "rljob-operator", "name of the Lease")
    add("--lease-seconds", 15.0, "a Lease that was not renewed for so long may be taken over", type=float)
    add("--lease-renew-deadline-seconds", 10.0, "the leader exits when it could not renew for so long", type=float)
    add("--lease-retry-seconds", 2.0, "pause between renewals, and between attempts to take over", type=float)
    add(
        "--cluster-access",
        ClusterAccess.DIRECT.value,
        "reach job heads Direct or through the API server's pod Proxy",
        choices=[access.value for access in ClusterAccess],
    )
    add("--cluster-domain", "cluster.local", "DNS domain of the cluster")
    add("--ip-family", IPFamily.AUTO.value, "family of the pod network", choices=[f.value for f in IPFamily])
    add("--catalogue", None, "image catalogue (YAML)", type=Path)
    add_switch("--no-network-policy", "do not render NetworkPolicies")
    add_list("--operator-cidr", "address block admitted to job heads like the operator (repeatable)", "CIDR")
    add("--operator-pod-labels", "", "labels of the operator's pods, key=value,...")
    add("--monitoring-namespace-labels", "", "labels of namespaces that may scrape job pods, key=value,...")
    add("--reconcile-concurrency", 16, "RLJobs worked on at once", type=int)
    add("--api-requests-per-second", 300.0, "sustained requests to the API server", type=float)
    add("--api-burst", 500, "burst of requests to the API server", type=int)
    add("--log-format", LogFormat.TEXT.value, "log lines", choices=[f.value for f in LogFormat])
    return parser


def _parse_lease_times(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> LeaseTimes:
    try:
        return LeaseTimes(
            lease_seconds=arguments.lease_seconds,
            renew_deadline_seconds=arguments.lease_renew_deadline_seconds,
            retry_seconds=arguments.lease_retry_seconds,
        )
    except ValueError as error:
        parser.error(str(error))


def _parse_labels(parser: argparse.ArgumentParser, flag: str, text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if not separator or not key:
            parser.error(f"{flag} {text!r}: {part!r} is not key=value, for example app.kubernetes.io/name=rljob")
        labels[key] = value
    return labels


def _parse_pod_ip_families(environment: Mapping[str, str]) -> tuple[IPFamily, ...]:
    """Job pods live in the same network as the operator's pod, whose addresses POD_IPS lists, the primary one first."""
    addresses = filter(None, environment.get("POD_IPS", "").split(","))
    return tuple(dict.fromkeys(_get_family(address) for address in addresses))


def _detect_ip_family(family: IPFamily, known: tuple[IPFamily, ...], environment: Mapping[str, str]) -> IPFamily:
    """The primary family of the operator's pod, where none is given. Outside a pod IPv4 is assumed."""
    if family is not IPFamily.AUTO:
        return family
    return known[0] if known else _get_family(environment.get("POD_IP", ""))


def _get_family(address: str) -> IPFamily:
    return IPFamily.IPV6 if ":" in address else IPFamily.IPV4
