"""kubectl against one cluster, as its administrator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testcluster.config import ClusterConfig
from testcluster.shell import run
from testcluster.toolchain import tools_dir


def kubectl(
    config: ClusterConfig, *words: str | Path, stdin: str | None = None, timeout_seconds: float = 60, check: bool = True
) -> str:
    """Run kubectl; returns its standard output.

    Raises:
        ClusterError: it failed (with ``check``) or ran past the deadline; carries its words.
    """
    # Its discovery cache would otherwise go to the user's home and stay there after `down`.
    cache = f"--cache-dir={config.run_dir / 'kubectl-cache'}"
    done = run(
        [tools_dir() / "kubectl", f"--kubeconfig={config.kubeconfig}", cache, *words],
        stdin=stdin,
        timeout_seconds=timeout_seconds,
        check=check,
    )
    return done.stdout


def apply(config: ClusterConfig, objects: list[dict[str, Any]]) -> None:
    """Server-side apply of whole objects."""
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    kubectl(config, "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=document)


def apply_folder(config: ClusterConfig, folder: Path) -> None:
    """Server-side apply of every manifest in a folder (large CRDs do not fit client-side apply's annotation)."""
    kubectl(config, "apply", "--server-side", "--force-conflicts", "-f", folder)
