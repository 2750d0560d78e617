"""What a cluster touches on the host outside its run folder (cgroups, kernel settings, files), and its removal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from testcluster.config import ClusterConfig
from testcluster.errors import ClusterError
from testcluster.processes import kill_and_wait
from testcluster.shell import run

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_CGROUP_CONTROLLERS = "+cpu +cpuset +io +memory +pids"
# The host's processes compete one by one with this whole group: at a weight of one, all pods together would get the
# time of a single process, and Ray's start-up deadlines would pass on a busy machine.
_CPU_WEIGHT_FACTOR = 16
# Kubelet sets these for the whole machine.
_SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
_CNI_RESULTS = Path("/var/lib/cni/results")
_SHIM_SOCKETS = Path("/run/containerd/s")
_CONTAINER_LOG_LINKS = Path("/var/log/containers")
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
_CGROUP_DEADLINE_SECONDS = 10


def _is_cgroup_v2() -> bool:
    return (_CGROUP_MOUNT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    """Mounted cgroup trees: one for v2, one per controller for v1."""
    if _is_cgroup_v2():
        return [_CGROUP_MOUNT]
    return [folder for folder in sorted(_CGROUP_MOUNT.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def cgroup_folders(config: ClusterConfig) -> list[Path]:
    """The cluster's root cgroup in every hierarchy that has it."""
    roots = [hierarchy / config.cgroup_root.lstrip("/") for hierarchy in _hierarchies()]
    return [root for root in roots if root.is_dir()]


def make_cgroups(config: ClusterConfig) -> None:
    """Make the cluster's root cgroup; kubelet demands that it exists with every controller."""
    for hierarchy in _hierarchies():
        folder = hierarchy / config.cgroup_root.lstrip("/")
        if _is_cgroup_v2():
            _write(hierarchy / "cgroup.subtree_control", _CGROUP_CONTROLLERS)
            folder.mkdir(exist_ok=True)
            _write(folder / "cgroup.subtree_control", _CGROUP_CONTROLLERS)
            _write(folder / "cpu.weight", str(_CPU_WEIGHT_FACTOR * 100))
            continue
        folder.mkdir(exist_ok=True)
        if (folder / "cpu.shares").exists():
            _write(folder / "cpu.shares", str(_CPU_WEIGHT_FACTOR * 1024))
        # A new v1 cpuset is empty, and no process can enter an empty one.
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / setting).exists():
                _write(folder / setting, (hierarchy / setting).read_text().strip())


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value)
    except OSError as error:
        raise ClusterError(f"cannot write {value!r} to {path}: {error}; the kubelet needs these controllers") from error


def _cgroup_pids(config: ClusterConfig) -> list[int]:
    pids: set[int] = set()
    for root in cgroup_folders(config):
        for listing in root.rglob("cgroup.procs"):
            try:
                pids.update(int(line) for line in listing.read_text().split())
            except FileNotFoundError:  # the cgroup went away while we looked
                continue
    return sorted(pids)


def kill_pods(config: ClusterConfig) -> None:
    """Kill every process of the cluster's pods: those in its cgroups."""
    deadline = time.monotonic() + _CGROUP_DEADLINE_SECONDS
    while pids := _cgroup_pids(config):
        if time.monotonic() >= deadline:
            raise ClusterError(f"pods' processes come back after being killed: pids {pids}")
        kill_and_wait(pids)


def remove_cgroups(config: ClusterConfig) -> None:
    """Remove the cluster's cgroups, leaves first."""
    for root in cgroup_folders(config):
        folders = sorted((path for path in root.rglob("*") if path.is_dir()), key=lambda p: len(p.parts), reverse=True)
        for folder in [*folders, root]:
            _remove_cgroup(folder)


def _remove_cgroup(folder: Path) -> None:
    deadline = time.monotonic() + _CGROUP_DEADLINE_SECONDS
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # A killed process leaves its cgroup a moment after it is gone from /proc.
            if time.monotonic() >= deadline:
                raise ClusterError(f"cannot remove cgroup {folder}: {error}") from error
            time.sleep(0.1)


def _saved_sysctls(config: ClusterConfig) -> Path:
    """One file for all clusters below one folder: a second cluster would save what the first one's kubelet wrote."""
    return config.run_dir.with_name(".sysctls.json")


def save_sysctls(config: ClusterConfig) -> None:
    """Remember the kernel settings that kubelet changes, unless a cluster did already."""
    saved = _saved_sysctls(config)
    if not saved.exists():
        saved.write_text(json.dumps({key: Path("/proc/sys", key).read_text().strip() for key in _SYSCTLS}))


def restore_sysctls(config: ClusterConfig) -> None:
    """Put the kernel settings back when the last cluster's kubelet is gone."""
    saved = _saved_sysctls(config)
    if _other_kubelet_lives() or not saved.exists():
        return
    for key, value in json.loads(saved.read_text()).items():
        if Path("/proc/sys", key).read_text().strip() != value:
            Path("/proc/sys", key).write_text(value)
    saved.unlink()


def shim_sockets(config: ClusterConfig) -> list[Path]:
    """Sockets of the containers' shims, below a folder that containerd has fixed for the whole machine."""
    bundles = config.run_dir / "containerd-state" / "io.containerd.runtime.v2.task" / "k8s.io"
    addresses = [path.read_text().strip() for path in bundles.glob("*/address")]
    return [Path(address.removeprefix("unix://")) for address in addresses]


def unmount_below(folder: Path) -> None:
    """Unmount everything below ``folder``, deepest first."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = [mount.replace("\\040", " ") for mount in mounts if Path(mount).is_relative_to(folder)]
    for mount in sorted(below, key=len, reverse=True):
        run(["umount", mount])


def remove_host_traces(config: ClusterConfig, sockets: list[Path]) -> None:
    """Remove the files that this cluster's programs left at fixed places, and folders that are then empty."""
    for path in sockets:
        path.unlink(missing_ok=True)
    for path in _CNI_RESULTS.glob(f"{config.name}-*-eth0"):
        sandbox = path.name.removeprefix(f"{config.name}-").removesuffix("-eth0")
        (_CNI_RESULTS / f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for path in _CONTAINER_LOG_LINKS.glob("*"):
        if path.is_symlink() and Path(os.readlink(path)).is_relative_to(config.run_dir):
            path.unlink()
    if not _other_kubelet_lives():
        for name in ("kubelet.sock", "DEPRECATION", "kubelet_internal_checkpoint"):
            (_DEVICE_PLUGINS / name).unlink(missing_ok=True)
    for folder in (
        _CNI_RESULTS,
        _CNI_RESULTS.parent,
        _SHIM_SOCKETS,
        _SHIM_SOCKETS.parent,
        _CONTAINER_LOG_LINKS,
        _DEVICE_PLUGINS,
        _DEVICE_PLUGINS.parent,
    ):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _other_kubelet_lives() -> bool:
    return run(["pidof", "kubelet"], check=False).returncode == 0
