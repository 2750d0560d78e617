"""Image archives in the node's containerd (namespace ``k8s.io``, the one that kubelet sees)."""

from __future__ import annotations

import json
from pathlib import Path

from testcluster.archive import file_digest
from testcluster.config import ClusterConfig
from testcluster.shell import run

_IMPORT_DEADLINE_SECONDS = 600


def _ctr(config: ClusterConfig, *words: str | Path, timeout_seconds: float = 60) -> str:
    command = ["ctr", "--address", config.containerd_socket, "--namespace", "k8s.io", *words]
    return run(command, timeout_seconds=timeout_seconds).stdout


def ensure_image(config: ClusterConfig, archive: Path, name: str) -> bool:
    """Import ``archive`` as ``name`` unless the node has that very archive already; True if imported."""
    record = config.run_dir / "images.json"
    known: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    digest = file_digest(archive)
    if known.get(name) == digest and name in _ctr(config, "images", "list", "-q").split():
        return False
    _ctr(config, "images", "import", archive, timeout_seconds=_IMPORT_DEADLINE_SECONDS)
    record.write_text(json.dumps({**known, name: digest}))
    return True
