"""Bring the cluster up, look at it, collect its logs, take it down to nothing."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

from testcluster import addons, images, network, nodeimages
from testcluster.components import (
    api_get,
    containerd,
    control_plane,
    kuberay_operator,
    node,
)
from testcluster.config import JOB_NAMESPACE, NODE_NAME, ClusterConfig
from testcluster.errors import ClusterError, wait_until
from testcluster.kubectl import apply, ensure_crds, kubectl
from testcluster.locks import exclusive
from testcluster.pki import ensure_pki
from testcluster.processes import (
    Component,
    ensure_running,
    kill,
    kill_and_wait,
    living_pid,
    recorded_components,
)
from testcluster.settings import PAUSE_IMAGE, files
from testcluster.toolchain import ensure_cluster, ensure_tools, kuberay_crds, say
from testcluster.traces import (
    kill_pods,
    make_cgroups,
    remove_cgroups,
    remove_host_traces,
    restore_sysctls,
    save_sysctls,
    shim_sockets,
    unmount_below,
)

_LOCK_DEADLINE_SECONDS = 1800
# Whoever would restart or report the rest goes first.
_KILL_FIRST = ("kuberay-operator", "kubelet", "coredns", "kube-proxy", "kube-scheduler", "kube-controller-manager")
# Who reads a configuration file at its start only, and must be started again when the file changes.
_READERS = {
    "audit-policy.yaml": "kube-apiserver",
    "containerd.toml": "containerd",
    "kubelet.yaml": "kubelet",
    "kube-proxy.yaml": "kube-proxy",
    "Corefile": "coredns",
}


def _lock_path(config: ClusterConfig) -> Path:
    return config.run_dir.with_name(f".{config.run_dir.name}.lock")


def _write_files(config: ClusterConfig) -> list[str]:
    """Write the configuration files; returns the names of those whose content changed."""
    changed = []
    for name, content in files(config).items():
        path = config.config_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            changed.append(name)
    return changed


def _start(config: ClusterConfig, components: list[Component]) -> None:
    for component in components:
        if ensure_running(config, component):
            say(f"{component.name} serves")


def up(config: ClusterConfig) -> None:
    """Make the cluster, or repair what is missing of it; does nothing to what already works.

    Raises:
        ClusterError: something does not come up by its deadline; names it and shows the end of its log.
    """
    if os.geteuid() != 0:
        raise ClusterError("the test cluster needs root (network namespaces, mounts, cgroups); run as root")
    ensure_cluster()
    ensure_tools()
    pause, ray = images.pause_archive(), images.ray_archive()
    images.compile_environment()
    start = time.monotonic()
    with exclusive(_lock_path(config), _LOCK_DEADLINE_SECONDS):
        config.run_dir.mkdir(parents=True, exist_ok=True)
        save_sysctls(config)
        network.ensure_network(config)
        ensure_pki(config)
        for name in _write_files(config):
            if name in _READERS:
                kill(config, _READERS[name])
        make_cgroups(config)
        _start(config, control_plane(config))
        _start(config, [containerd(config)])
        nodeimages.ensure_image(config, pause, PAUSE_IMAGE)
        _start(config, node(config))
        apply(config, [*addons.dns_objects(config), *addons.namespace_objects()])
        ensure_crds(config, kuberay_crds())
        _start(config, [kuberay_operator(config)])
        nodeimages.ensure_image(config, ray, images.RAY_IMAGE)
        addons.ensure_volume(config)
        wait_until("service account of the job namespace", lambda: _default_account(config), 30)
    say(f"cluster {config.name} is up ({time.monotonic() - start:.0f} s): KUBECONFIG={config.kubeconfig}")


def _default_account(config: ClusterConfig) -> str | None:
    path = f"/api/v1/namespaces/{JOB_NAMESPACE}/serviceaccounts/default"
    try:
        api_get(config, path)
    except OSError as error:
        return f"{path}: {error}"
    return None


@dataclasses.dataclass(frozen=True)
class ComponentStatus:
    """One line of ``status``: the process and what its probe says (empty: it serves)."""

    name: str
    pid: int | None
    problem: str


def status(config: ClusterConfig) -> list[ComponentStatus]:
    """State of every component that a complete cluster has; empty if there is no cluster."""
    if not config.pki_dir.joinpath("complete").exists() or not config.netns_path.exists():
        return []
    lines = []
    for component in [*control_plane(config), containerd(config), *node(config), kuberay_operator(config)]:
        pid = living_pid(config, component.name)
        problem = "not running" if pid is None else component.probe() or ""
        lines.append(ComponentStatus(component.name, pid, problem))
    return lines


def collect_logs(config: ClusterConfig, target: Path) -> None:
    """Copy component logs, pod logs and the audit log, and what the API server can tell, into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    for source in (config.log_dir, config.run_dir / "pod-logs"):
        if source.is_dir():
            shutil.copytree(source, target / source.name, dirs_exist_ok=True, symlinks=False)
    if config.audit_log.exists():
        shutil.copy2(config.audit_log, target / config.audit_log.name)
    questions = {
        "objects.yaml": ("get", "all,rayclusters,events,pv,pvc,configmaps,networkpolicies", "-A", "-o", "yaml"),
        "rljobs.yaml": ("get", "rljobs", "-A", "-o", "yaml"),
        "pods.txt": ("describe", "pods", "-A"),
        "node.txt": ("describe", "node", NODE_NAME),
        "events.txt": ("get", "events", "-A", "--sort-by=.lastTimestamp"),
    }
    for name, words in questions.items():
        try:
            answer = kubectl(config, *words)
        except ClusterError as error:
            answer = f"not answered: {error}\n"
        (target / name).write_text(answer)


def down(config: ClusterConfig) -> None:
    """Remove the cluster and every trace of it: processes, mounts, namespaces, links, cgroups, folders.

    Raises:
        ClusterError: something cannot be removed; names it.
    """
    with exclusive(_lock_path(config), _LOCK_DEADLINE_SECONDS):
        for name in _KILL_FIRST:
            kill(config, name)
        # The links tell which pod namespaces are ours, so ask before anything else is gone.
        pod_namespaces = network.pod_namespaces(config)
        sockets = shim_sockets(config)
        kill_pods(config)
        for name in recorded_components(config):
            kill(config, name)
        # What is left in the namespace are containerd's shims, which outlive it by design.
        kill_and_wait([pid for pid in network.namespace_pids(config) if pid != os.getpid()])
        unmount_below(config.run_dir)
        for name in pod_namespaces:
            network.remove_namespace(name)
        network.remove_network(config)
        remove_cgroups(config)
        restore_sysctls(config)
        remove_host_traces(config, sockets)
        if config.run_dir.exists():
            shutil.rmtree(config.run_dir)
    _lock_path(config).unlink(missing_ok=True)
    if config.run_dir.parent.is_dir() and not any(config.run_dir.parent.iterdir()):
        config.run_dir.parent.rmdir()
