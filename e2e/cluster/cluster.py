#!/usr/bin/env python3
"""A real single-node Kubernetes with KubeRay in its own network namespace (root, Linux)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from testcluster import lifecycle
from testcluster.config import IPFamily, cluster_config
from testcluster.errors import ClusterError


def _print_status(family: str) -> int:
    config = cluster_config(family)
    lines = lifecycle.status(config)
    if not lines:
        print(f"{config.name}: no cluster (make one with `up --ip-family {family}`)")
        return 1
    for line in lines:
        print(f"{line.name:<26}{line.pid or '-':<10}{line.problem or 'ok'}")
    print(f"KUBECONFIG={config.kubeconfig}")
    return 1 if any(line.problem for line in lines) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "up": "make the cluster or repair it; prints its kubeconfig's path",
        "down": "remove the cluster and every trace of it",
        "status": "one line per component; exit code 1 if something is wrong",
        "logs": "copy all logs and objects into a folder",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--ip-family", choices=[family.value for family in IPFamily], default="IPv4")
        if name == "logs":
            command.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    config = cluster_config(arguments.ip_family)
    try:
        match arguments.command:
            case "up":
                lifecycle.up(config)
                print(config.kubeconfig)
            case "down":
                lifecycle.down(config)
            case "status":
                return _print_status(arguments.ip_family)
            case "logs":
                lifecycle.collect_logs(config, arguments.folder)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
