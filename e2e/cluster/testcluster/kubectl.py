"""kubectl against one cluster, as its administrator."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from testcluster.config import ClusterConfig
from testcluster.shell import run
from testcluster.toolchain import tools_dir


def kubectl(
    config: ClusterConfig,
    *words: str | Path,
    stdin: str | None = None,
    timeout_seconds: float = 120,
    check: bool = True,
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


def ensure_crds(config: ClusterConfig, folder: Path) -> bool:
    """Apply a folder of CRDs unless this cluster has them; True if applied.

    Server-side, because they are too large for the annotation of client-side apply.

    Raises:
        ClusterError: the API server refuses them or does not serve them in time.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.yaml")))).hexdigest()
    record = config.run_dir / f"crds-{folder.name}"
    if record.exists() and record.read_text() == digest:
        return False
    kubectl(config, "apply", "--server-side", "--force-conflicts", "-f", folder, timeout_seconds=300)
    kubectl(config, "wait", "--for=condition=Established", "--timeout=60s", "-f", folder, timeout_seconds=90)
    record.write_text(digest)
    return True
