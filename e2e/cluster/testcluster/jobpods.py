"""What job pods on the test cluster need beside their image: the repository's locked environment, mounted read-only.

PyTorch and its libraries take several gigabytes; packing them into an image would cost minutes per run and prove
nothing about the product. Pods use the host's files instead, which is why the job namespace enforces no pod security.
"""

from __future__ import annotations

from typing import Any

from testcluster.config import REPO_DIR
from testcluster.images import site_packages_dir

_MOUNT_ROOT = "/opt/rljob-test"


def _folders() -> dict[str, str]:
    """Volume name → host folder."""
    return {
        "site-packages": str(site_packages_dir()),
        "crds": str(REPO_DIR / "crds"),
        "trainer": str(REPO_DIR / "trainer"),
    }


def environment_volumes() -> list[dict[str, Any]]:
    """Pod volumes (core/v1 ``Volume``) with the host's folders."""
    return [
        {"name": f"test-{name}", "hostPath": {"path": path, "type": "Directory"}} for name, path in _folders().items()
    ]


def environment_mounts() -> list[dict[str, Any]]:
    """Container mounts (core/v1 ``VolumeMount``) for ``environment_volumes``."""
    return [{"name": f"test-{name}", "mountPath": f"{_MOUNT_ROOT}/{name}", "readOnly": True} for name in _folders()]


def environment_variables() -> dict[str, str]:
    """Environment that makes Python find the mounted packages before the image's own."""
    return {
        "PYTHONPATH": ":".join(f"{_MOUNT_ROOT}/{name}" for name in _folders()),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
