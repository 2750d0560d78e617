"""The cluster's processes in the order of their start: command lines and the probes that say they serve."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from testcluster.config import API_PORT, NODE_NAME, ClusterConfig, url_host
from testcluster.network import enter
from testcluster.pki import client_kubeconfig
from testcluster.processes import Component
from testcluster.shell import run
from testcluster.toolchain import binary, node_path

_ETCD_PORT = 2379
_ETCD_HEALTH_PORT = 2381
_KUBERAY_PROBE_PORT = 8082


def _environment(config: ClusterConfig) -> dict[str, str]:
    return {"PATH": node_path(), "HOME": str(config.run_dir)}


def _url_probe(url: str) -> Callable[[], str | None]:
    """Ask ``url``; any 2xx answer means that the component serves."""
    # Health endpoints of a private network on this machine; some have certificates that they sign themselves.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))

    def probe() -> str | None:
        try:
            opener.open(url, timeout=2).close()
        except OSError as error:
            return f"{url}: {error}"
        return None

    return probe


def admin_token(config: ClusterConfig) -> str:
    document = json.loads(config.kubeconfig.read_text())
    return str(document["users"][0]["user"]["token"])


def api_get(config: ClusterConfig, path: str, timeout_seconds: float = 5) -> bytes:
    """GET a path of the API server as administrator, from the host.

    Raises:
        OSError: not reachable or refused (``urllib.error.HTTPError`` is one).
    """
    request = urllib.request.Request(
        config.server_url + path, headers={"Authorization": f"Bearer {admin_token(config)}"}
    )
    context = ssl.create_default_context(cafile=str(config.pki_dir / "ca.crt"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(request, timeout=timeout_seconds) as answer:
        return bytes(answer.read())


def _api_probe(config: ClusterConfig) -> Callable[[], str | None]:
    def probe() -> str | None:
        try:
            api_get(config, "/readyz")
        except urllib.error.HTTPError as error:
            return f"/readyz: {error.read().decode(errors='replace')[-300:]}"
        except OSError as error:
            return f"{config.server_url}: {error}"
        return None

    return probe


def _node_probe(config: ClusterConfig) -> Callable[[], str | None]:
    def probe() -> str | None:
        try:
            node = json.loads(api_get(config, f"/api/v1/nodes/{NODE_NAME}"))
        except OSError as error:
            return f"node {NODE_NAME}: {error}"
        conditions = {entry["type"]: entry for entry in node.get("status", {}).get("conditions", [])}
        ready = conditions.get("Ready")
        if ready is None or ready["status"] != "True":
            return f"node {NODE_NAME} is not Ready: {ready['message'] if ready else 'no condition yet'}"
        return None

    return probe


def _etcd(config: ClusterConfig) -> list[str]:
    host = url_host(config.addresses.loopback)
    client, peer = f"http://{host}:{_ETCD_PORT}", f"http://{host}:{_ETCD_PORT + 1}"
    return [
        str(binary("etcd")),
        f"--data-dir={config.run_dir / 'etcd'}",
        # A test cluster's data need not survive a power cut; fsync on a shared disk makes the API server time out.
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        f"--listen-metrics-urls=http://{url_host(config.addresses.node)}:{_ETCD_HEALTH_PORT}",
        "--log-level=warn",
    ]


def _apiserver(config: ClusterConfig) -> list[str]:
    addresses, pki = config.addresses, config.pki_dir
    return [
        str(binary("kube-apiserver")),
        f"--etcd-servers=http://{url_host(addresses.loopback)}:{_ETCD_PORT}",
        f"--advertise-address={addresses.node}",
        f"--bind-address={addresses.any}",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={addresses.service_cidr}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'service-account.key'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        # Otherwise logs and exec try to resolve the node's name, which no resolver knows.
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
        f"--audit-policy-file={config.config_dir / 'audit-policy.yaml'}",
        f"--audit-log-path={config.audit_log}",
        "--audit-log-maxsize=1024",
        "--audit-log-mode=blocking-strict",
    ]


def _controller_manager(config: ClusterConfig) -> list[str]:
    addresses, pki = config.addresses, config.pki_dir
    kubeconfig = client_kubeconfig(config, "kube-controller-manager")
    mask_flag = "--node-cidr-mask-size"
    return [
        str(binary("kube-controller-manager")),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={addresses.node}",
        "--leader-elect=false",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={addresses.pod_cidr}",
        f"--service-cluster-ip-range={addresses.service_cidr}",
        f"{mask_flag}={addresses.pod_mask_bits}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--service-account-private-key-file={pki / 'service-account.key'}",
        "--use-service-account-credentials=true",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
    ]


def _scheduler(config: ClusterConfig) -> list[str]:
    kubeconfig = client_kubeconfig(config, "kube-scheduler")
    return [
        str(binary("kube-scheduler")),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={config.addresses.node}",
        "--leader-elect=false",
    ]


def _kubelet(config: ClusterConfig) -> list[str]:
    return [
        str(binary("kubelet")),
        f"--config={config.config_dir / 'kubelet.yaml'}",
        f"--kubeconfig={client_kubeconfig(config, 'kubelet')}",
        f"--root-dir={config.run_dir / 'kubelet'}",
        f"--cert-dir={config.run_dir / 'kubelet-pki'}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={config.addresses.node}",
    ]


def _kuberay(config: ClusterConfig) -> list[str]:
    host = url_host(config.addresses.node)
    return [
        str(binary("kuberay-operator")),
        f"--kubeconfig={client_kubeconfig(config, 'kuberay-operator')}",
        "--enable-leader-election=false",
        f"--metrics-addr={host}:8080",
        f"--health-probe-bind-address={host}:{_KUBERAY_PROBE_PORT}",
        f"--log-file-path={config.log_dir / 'kuberay-operator.json.log'}",
    ]


def _containerd_probe(config: ClusterConfig) -> Callable[[], str | None]:
    def probe() -> str | None:
        asked = run(["ctr", "--address", config.containerd_socket, "version"], check=False, timeout_seconds=20)
        return None if asked.returncode == 0 else (asked.stderr.strip() or "no answer")[-300:]

    return probe


def _component(config: ClusterConfig, name: str, argv: list[str], probe: Callable[[], str | None]) -> Component:
    """A process of the cluster in its network namespace.

    A little ahead of the pods' work: on two cores that train a model, a starved kubelet or API server looks like a
    failing product. ``nice`` goes on without when it may not.
    """
    return Component(name, [*enter(config), "nice", "-n", "-5", *argv], probe, _environment(config))


def containerd(config: ClusterConfig) -> Component:
    """The container runtime; not ahead of others, since containers would inherit that."""
    path = next((d for d in ("/usr/bin", "/usr/local/bin") if Path(d, "containerd").exists()), "/usr/bin")
    argv = [*enter(config), f"{path}/containerd", f"--config={config.config_dir / 'containerd.toml'}"]
    return Component("containerd", argv, _containerd_probe(config), _environment(config))


def control_plane(config: ClusterConfig) -> list[Component]:
    """etcd, API server, controllers, scheduler."""
    node_host = url_host(config.addresses.node)
    parts: list[tuple[str, list[str], Callable[[], str | None]]] = [
        ("etcd", _etcd(config), _url_probe(f"http://{node_host}:{_ETCD_HEALTH_PORT}/readyz")),
        ("kube-apiserver", _apiserver(config), _api_probe(config)),
        (
            "kube-controller-manager",
            _controller_manager(config),
            _url_probe(f"https://{node_host}:10257/healthz"),
        ),
        ("kube-scheduler", _scheduler(config), _url_probe(f"https://{node_host}:10259/healthz")),
    ]
    return [_component(config, name, argv, probe) for name, argv, probe in parts]


def node(config: ClusterConfig) -> list[Component]:
    """kubelet, kube-proxy and CoreDNS; containerd must run already."""
    node_host = url_host(config.addresses.node)
    proxy = [str(binary("kube-proxy")), f"--config={config.config_dir / 'kube-proxy.yaml'}"]
    dns = [str(binary("coredns")), f"-conf={config.config_dir / 'Corefile'}"]
    parts: list[tuple[str, list[str], Callable[[], str | None]]] = [
        ("kubelet", _kubelet(config), _node_probe(config)),
        ("kube-proxy", proxy, _url_probe(f"http://{node_host}:10256/livez")),
        ("coredns", dns, _url_probe(f"http://{node_host}:8181/ready")),
    ]
    return [_component(config, name, argv, probe) for name, argv, probe in parts]


def kuberay_operator(config: ClusterConfig) -> Component:
    """KubeRay's operator as a process; its CRDs must be there already."""
    url = f"http://{url_host(config.addresses.node)}:{_KUBERAY_PROBE_PORT}/healthz"
    return _component(config, "kuberay-operator", _kuberay(config), _url_probe(url))
