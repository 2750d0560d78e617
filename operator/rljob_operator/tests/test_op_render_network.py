"""Address family and interfaces, and the NetworkPolicy."""

import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from render_cases import OPTIONS, UID, make_resolved

from rljob_api.v1alpha1 import IPFamily
from rljob_operator.render import OwnerRef, RenderError, RenderOptions, collect_findings, render_cluster_objects
from rljob_operator.render.network import build_agent_check, compute_node_ip_expression
from rljob_operator.render.network_policy import build_network_policy

OWNER = OwnerRef("job", UID)


def render_ray_cluster(options=None, **overrides):
    resolved = make_resolved(**overrides)
    return render_cluster_objects(resolved, owner=OWNER, cluster_generation=1, auth_token="t", options=options)[-1]


def get_env(group):
    env = group["template"]["spec"]["containers"][0]["env"]
    return {entry["name"]: entry.get("value") for entry in env}


@pytest.mark.parametrize(
    ("family", "want_dashboard_host", "want_nccl"), [("IPv4", "0.0.0.0", "AF_INET"), ("IPv6", "::", "AF_INET6")]
)
def test_family(family, want_dashboard_host, want_nccl):
    cluster = render_ray_cluster(network={"ipFamily": family})
    head, [worker] = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["dashboard-host"] == want_dashboard_host
    assert head["rayStartParams"]["node-ip-address"] == "$POD_IP"
    assert worker["rayStartParams"]["node-ip-address"] == "$POD_IP"
    assert get_env(worker)["NCCL_SOCKET_FAMILY"] == want_nccl
    assert "headService" not in head


def test_secondary_family_of_dual_stack_pods():
    options = RenderOptions(pod_ip_families=(IPFamily.IPV4, IPFamily.IPV6))
    cluster = render_ray_cluster(options, network={"ipFamily": "IPv6"})
    head, [worker] = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head["headService"]["spec"]["ipFamilies"] == ["IPv6"]
    assert head["headService"]["spec"]["clusterIP"] == "None"
    # $(POD_IP) would be the IPv4 address.
    assert "SGLANG_HOST_IP" not in get_env(worker)
    for group in (head, worker):
        [container] = group["template"]["spec"]["containers"]
        assert group["rayStartParams"]["node-ip-address"] == "${POD_IPS##*,}"
        # The kubelet asks the primary address, where Ray's agent does not listen.
        assert "httpGet" not in container["readinessProbe"]
        assert "httpGet" not in container["livenessProbe"]


@pytest.mark.parametrize(("code", "want"), [(200, True), (503, False), (None, False)])
def test_agent_check_of_the_secondary_family_asks_the_secondary_address(code, want):
    """Run by bash against a server on ::1; on the primary address nobody listens."""

    class Agent(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code if self.path == "/api/healthz" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    class Server(HTTPServer):
        address_family = socket.AF_INET6

    try:
        server = Server(("::1", 0), Agent)
    except OSError as error:
        pytest.skip(f"no IPv6 on the loopback interface: {error}")
    with server:
        port = server.server_address[1]
        if code is None:
            server.server_close()
        else:
            threading.Thread(target=server.handle_request, daemon=True).start()
        options = RenderOptions(pod_ip_families=(IPFamily.IPV4, IPFamily.IPV6))
        command = build_agent_check(port, IPFamily.IPV6, options)["exec"]["command"]
        environment = {"POD_IP": "127.0.0.1", "POD_IPS": "127.0.0.1,::1", "PATH": "/usr/bin:/bin"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode == 0) is want, result.stderr


def test_secondary_family_is_refused_where_jobs_are_reached_by_the_pod_proxy():
    """The API server connects to the primary address; the dashboard listens on the other family."""
    options = RenderOptions(pod_ip_families=(IPFamily.IPV6, IPFamily.IPV4), uses_pod_proxy=True)
    with pytest.raises(RenderError, match=r"spec\.network\.ipFamily: IPv4 .* a value that works: IPv6, .* Direct"):
        render_ray_cluster(options, network={"ipFamily": "IPv4"})
    assert render_ray_cluster(options, network={"ipFamily": "IPv6"})["kind"] == "RayCluster"


@pytest.mark.parametrize(
    ("family", "families", "pod_ips", "want"),
    [
        (IPFamily.IPV4, (), "10.0.0.7", "10.0.0.7"),
        (IPFamily.IPV6, (IPFamily.IPV6,), "fd00:1::7", "fd00:1::7"),
        (IPFamily.IPV4, (IPFamily.IPV4, IPFamily.IPV6), "10.0.0.7,fd00:1::7", "10.0.0.7"),
        (IPFamily.IPV6, (IPFamily.IPV4, IPFamily.IPV6), "10.0.0.7,fd00:1::7", "fd00:1::7"),
        (IPFamily.IPV4, (IPFamily.IPV6, IPFamily.IPV4), "fd00:1::7,10.0.0.7", "10.0.0.7"),
    ],
)
def test_node_ip_expression_expands_in_bash(family, families, pod_ips, want):
    """KubeRay puts the value unquoted into `bash -c`; the expansion is bash's, so bash is asked."""
    expression = compute_node_ip_expression(family, RenderOptions(pod_ip_families=families))
    environment = {"POD_IP": pod_ips.split(",")[0], "POD_IPS": pod_ips, "PATH": "/usr/bin:/bin"}
    output = subprocess.run(
        ["bash", "-c", f"echo --node-ip-address={expression} "],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == f"--node-ip-address={want}"


def test_family_without_addresses_is_refused_before_anything_exists():
    options = RenderOptions(pod_ip_families=(IPFamily.IPV4,))
    with pytest.raises(RenderError, match=r"spec\.network\.ipFamily: IPv6 .* a value that works: IPv4"):
        render_ray_cluster(options, network={"ipFamily": "IPv6"})


def test_auto_must_be_resolved():
    resolved = make_resolved().model_copy(update={"ip_family": IPFamily.AUTO})
    assert [finding.path for finding in collect_findings(resolved)] == ["spec.network.ipFamily"]


def test_interface_reaches_gloo_exactly_and_nccl_as_exact_match():
    [worker] = render_ray_cluster(network={"interface": "ens5"})["spec"]["workerGroupSpecs"]
    environment = get_env(worker)
    assert environment["GLOO_SOCKET_IFNAME"] == "ens5"
    assert environment["TP_SOCKET_IFNAME"] == "ens5"
    assert environment["NCCL_SOCKET_IFNAME"] == "=ens5"


def test_without_interface_the_trainer_chooses():
    [worker] = render_ray_cluster()["spec"]["workerGroupSpecs"]
    assert not [name for name in get_env(worker) if name.endswith("_SOCKET_IFNAME")]


def test_cpu_job_has_no_nccl_variables():
    [worker] = render_ray_cluster(
        rollout={"engine": "Native", "engineVersion": None},
        cluster={"gpusPerNode": 0, "ranksPerNode": 2},
        network={"interface": "eth0"},
    )["spec"]["workerGroupSpecs"]
    environment = get_env(worker)
    assert not [name for name in environment if name.startswith("NCCL")]
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"


def test_policy_admits_only_the_jobs_own_pods_by_default():
    policy = build_network_policy(make_resolved(), OWNER, 4, RenderOptions())
    own = {"matchLabels": {"rljob.io/job": "job", "rljob.io/cluster-generation": "4"}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }


def test_policy_rules_of_operator_and_monitoring():
    policy = build_network_policy(make_resolved(), OWNER, 4, OPTIONS)
    _, operator, monitoring = policy["spec"]["ingress"]
    assert [port["port"] for port in operator["ports"]] == [8265, 8090]
    assert operator["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "rljob-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "rljob"}},
        }
    ]
    assert [port["port"] for port in monitoring["ports"]] == [8080, 8090]


def test_policy_admits_named_cidrs_like_the_operator():
    policy = build_network_policy(make_resolved(), OWNER, 1, RenderOptions(operator_cidrs=("10.1.0.0/16", "fd00::/64")))
    _, operator = policy["spec"]["ingress"]
    assert operator["from"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}, {"ipBlock": {"cidr": "fd00::/64"}}]


def test_policy_can_be_switched_off():
    resolved = make_resolved()
    objects = render_cluster_objects(
        resolved, owner=OWNER, cluster_generation=1, auth_token="t", options=RenderOptions(network_policy=False)
    )
    assert [document["kind"] for document in objects] == ["Secret", "ConfigMap", "RayCluster"]
