"""Address family and interfaces: what Ray, gloo, NCCL and the engines are told.

`network.interface` unset leaves the choice to the trainer, which takes the interface of the route to the head:
interface names belong to the node image, not to the job (`eth0` on one, `ens5` on the next).
"""

from __future__ import annotations

from typing import Any

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.v1alpha1 import Engine, IPFamily
from rljob_operator.render.types import RenderOptions, make_error

AGENT_HEALTH_PATH = "/api/healthz"
_ENGINE_HOST_IP = {Engine.SGLANG: "SGLANG_HOST_IP", Engine.VLLM: "VLLM_HOST_IP"}


def compute_dashboard_host(ip_family: IPFamily) -> str:
    """Bind address of Ray's dashboard and Jobs API.

    KubeRay's default 0.0.0.0 is unreachable in IPv6-only pods, and `::` is bound for IPv6 only.
    """
    return "::" if ip_family is IPFamily.IPV6 else "0.0.0.0"


def is_secondary_family(ip_family: IPFamily, options: RenderOptions) -> bool:
    """Whether the job's family is the second one of dual-stack pods, so that `status.podIP` is of the other one."""
    families = options.pod_ip_families
    return len(families) == 2 and families[1] is ip_family


def compute_node_ip_expression(ip_family: IPFamily, options: RenderOptions) -> str:
    """Value of `--node-ip-address`: KubeRay hands it unquoted to bash, which expands it.

    Bare, never in brackets: Ray adds them. POD_IPS is `primary,secondary`.
    """
    return "${POD_IPS##*,}" if is_secondary_family(ip_family, options) else "$POD_IP"


def build_socket_environment(resolved: ResolvedJob, options: RenderOptions) -> dict[str, str]:
    """Environment of worker pods for NCCL, gloo, TensorPipe and the engine's own address."""
    environment: dict[str, str] = {}
    if resolved.layout.gpus_per_node > 0:
        environment["NCCL_SOCKET_FAMILY"] = "AF_INET6" if resolved.ip_family is IPFamily.IPV6 else "AF_INET"
    interface = resolved.spec.network.interface
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        environment["TP_SOCKET_IFNAME"] = interface
        if resolved.layout.gpus_per_node > 0:
            # Without "=" NCCL reads the name as a prefix: eth1 would also select eth10.
            environment["NCCL_SOCKET_IFNAME"] = f"={interface}"
    engine_host_ip = _ENGINE_HOST_IP.get(resolved.engine)
    if engine_host_ip is not None and not is_secondary_family(resolved.ip_family, options):
        # With the secondary family the trainer sets it from Ray's node address: $(...) cannot cut POD_IPS.
        environment[engine_host_ip] = "$(POD_IP)"
    return environment


def build_head_service(ip_family: IPFamily, options: RenderOptions) -> dict[str, object] | None:
    """A head Service of the job's family, where Kubernetes would choose the other one; None leaves it to KubeRay."""
    if not is_secondary_family(ip_family, options):
        return None
    # Given a Service, KubeRay no longer makes it headless by itself.
    return {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "ipFamilyPolicy": "SingleStack",
            "ipFamilies": [str(ip_family)],
        }
    }


def build_agent_check(port: int, ip_family: IPFamily, options: RenderOptions) -> dict[str, Any]:
    """What the probes ask: Ray's agent, which listens on the node address only (`http_server_agent.py`, Ray 2.60).

    The kubelet sends HTTP probes to the pod's primary address; with the secondary family it runs the request in the
    container instead. bash is there (KubeRay starts Ray with it), wget and curl are not in slim images.
    """
    if not is_secondary_family(ip_family, options):
        return {"httpGet": {"path": AGENT_HEALTH_PATH, "port": port}}
    address = compute_node_ip_expression(ip_family, options)
    script = (
        f"exec 3<>/dev/tcp/{address}/{port} && printf 'GET {AGENT_HEALTH_PATH} HTTP/1.0\\r\\n\\r\\n' >&3"
        ' && read -r _ status _ <&3 && test "$status" = 200'
    )
    return {"exec": {"command": ["bash", "-c", script]}}


def check_ip_family(resolved: ResolvedJob, options: RenderOptions) -> list[Finding]:
    """Refuses a family that the cluster's pods do not have: nothing would ever connect."""
    if resolved.ip_family is IPFamily.AUTO:
        return [
            make_error(
                "InvalidValue",
                "spec.network.ipFamily",
                "Auto was not resolved before rendering; a value that works: IPv4",
            )
        ]
    if options.pod_ip_families and resolved.ip_family not in options.pod_ip_families:
        available = ", ".join(str(family) for family in options.pod_ip_families)
        return [
            make_error(
                "IPFamilyUnavailable",
                "spec.network.ipFamily",
                f"{resolved.ip_family} is asked for, but pods of this cluster only get {available} addresses; "
                f"a value that works: {options.pod_ip_families[0]}",
            )
        ]
    if options.uses_pod_proxy and is_secondary_family(resolved.ip_family, options):
        primary = options.pod_ip_families[0]
        return [
            make_error(
                "IPFamilyUnavailable",
                "spec.network.ipFamily",
                f"{resolved.ip_family} is asked for, but the operator reaches jobs through the API server's pod proxy "
                f"(clusterAccess: Proxy), which only knows the primary addresses of pods, {primary} in this cluster; a "
                f"value that works: {primary}, or install the operator with clusterAccess: Direct",
            )
        ]
    return []
