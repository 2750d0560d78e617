#!/usr/bin/env python3
"""Build or fetch the programs of the test cluster; prints the folder that holds them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from testcluster import toolchain
from testcluster.errors import ClusterError

_ENSURE = {
    "envtest": (toolchain.ensure_envtest, "etcd + kube-apiserver (KUBEBUILDER_ASSETS is honoured)"),
    "cluster": (toolchain.ensure_cluster, "all Kubernetes binaries, etcd, KubeRay, CoreDNS, Debian packages"),
    "tools": (toolchain.ensure_tools, "kubectl and helm"),
    "crds": (toolchain.ensure_crds, "KubeRay's CustomResourceDefinitions"),
    "prometheus": (toolchain.ensure_prometheus, "Debian's prometheus and promtool"),
}


def _path(name: str) -> str:
    folders: dict[str, Callable[[], Path]] = {
        "envtest": toolchain.envtest_dir,
        "cluster": lambda: toolchain.bin_dir() / "cluster",
        "tools": toolchain.tools_dir,
        "crds": lambda: toolchain.bin_dir() / f"kuberay-crds-{toolchain.KUBERAY_VERSION}",
        "prometheus": lambda: toolchain.bin_dir() / "prometheus-debian",
    }
    return str(folders[name]())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in _ENSURE.items():
        commands.add_parser(name, help=text)
    path = commands.add_parser("path", help="print a folder without making it")
    path.add_argument("what", choices=sorted(_ENSURE))
    arguments = parser.parse_args()
    try:
        print(_path(arguments.what) if arguments.command == "path" else _ENSURE[arguments.command][0]())
    except ClusterError as error:
        print(f"toolchain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
