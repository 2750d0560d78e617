"""Container image archives written by hand: layer tars, a configuration and a manifest, no registry and no builder.

Format: the ``docker save`` layout (``manifest.json``, one JSON configuration, one tar per layer), which containerd,
buildah and docker all import.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from testcluster.shell import run

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What the image runs by default; ``user`` is ``uid:gid``."""

    entrypoint: tuple[str, ...] = ()
    env: tuple[str, ...] = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
    user: str = ""
    working_dir: str = "/"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def pack_layer(root: Path, target: Path) -> None:
    """Tar the folder ``root`` as a layer: root-owned, sorted, fixed times, so that equal content gives equal bytes."""
    order = ["--sort=name", "--mtime=@0", "--numeric-owner"]
    run(["tar", "--create", "--file", target, *order, "--directory", root, "."], timeout_seconds=600)


def image_documents(layer_digests: list[str], config: ImageConfig, machine: str) -> dict[str, Any]:
    """The image's JSON configuration, as a pure function of its layers (uncompressed digests)."""
    return {
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": list(config.entrypoint) or None,
            "Env": list(config.env),
            "User": config.user,
            "WorkingDir": config.working_dir,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in layer_digests]},
        "history": [{"created": "1970-01-01T00:00:00Z"} for _ in layer_digests],
    }


def write_archive(target: Path, name: str, layers: list[Path], config: ImageConfig) -> None:
    """Write the image ``name`` (repository:tag) to ``target``; published by a rename."""
    digests = [file_digest(layer) for layer in layers]
    document = json.dumps(image_documents(digests, config, os.uname().machine), sort_keys=True).encode()
    config_name = f"{hashlib.sha256(document).hexdigest()}.json"
    layer_names = [f"{digest}/layer.tar" for digest in digests]
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": layer_names}]
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w") as archive:
            for entry, content in ((config_name, document), ("manifest.json", json.dumps(manifest).encode())):
                info = tarfile.TarInfo(entry)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            for layer, layer_name in zip(layers, layer_names, strict=True):
                archive.add(layer, arcname=layer_name)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
