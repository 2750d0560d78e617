"""The product's own images, built by buildah from the repository's Dockerfile on the locally made base image."""

from __future__ import annotations

import configparser
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from testcluster.config import REPO_DIR, ClusterConfig, cache_dir
from testcluster.errors import ClusterError
from testcluster.images import BASE_IMAGE, base_archive, images_dir
from testcluster.locks import exclusive
from testcluster.nodeimages import ensure_image
from testcluster.shell import run
from testcluster.toolchain import say

OPERATOR_IMAGE = "localhost/rljob/operator:test"

_BUILD_DEADLINE_SECONDS = 1800
_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_CA_BUNDLE_IN_IMAGE = "/etc/ssl/certs/ca-certificates.crt"
# What decides where pip gets packages from. Folders (PIP_FIND_LINKS) stay out: they do not exist in the build.
_PIP_KEYS = {
    "PIP_INDEX_URL": "index-url",
    "PIP_EXTRA_INDEX_URL": "extra-index-url",
    "PIP_TRUSTED_HOST": "trusted-host",
    "PIP_PROXY": "proxy",
    "PIP_DEFAULT_TIMEOUT": "timeout",
    "PIP_RETRIES": "retries",
}


def pip_configuration(environment: Mapping[str, str], host_files: list[str]) -> str:
    """A pip.conf with the host's package sources and the mounted CA bundle.

    Args:
        environment: The host's environment; ``PIP_*`` wins over files, as pip has it.
        host_files: Contents of the host's pip configuration files, weakest first.
    """
    merged: dict[str, str] = {}
    for content in host_files:
        parser = configparser.RawConfigParser()
        parser.read_string(content)
        if parser.has_section("global"):
            merged.update({key: value for key, value in parser.items("global") if key in _PIP_KEYS.values()})
    merged.update({key: environment[name] for name, key in _PIP_KEYS.items() if environment.get(name)})
    merged["cert"] = _CA_BUNDLE_IN_IMAGE
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in merged.items())


def _host_pip_files() -> list[str]:
    candidates = [Path("/etc/pip.conf"), Path.home() / ".pip" / "pip.conf", Path.home() / ".config/pip/pip.conf"]
    return [path.read_text() for path in candidates if path.is_file()]


def _ca_bundle() -> Path:
    for candidate in (os.environ.get("SSL_CERT_FILE"), *_CA_BUNDLES):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    raise ClusterError(f"no CA bundle at {', '.join(_CA_BUNDLES)}; set SSL_CERT_FILE to the host's bundle")


def _buildah(scratch: Path, *words: str | Path, timeout_seconds: float = 600) -> str:
    """buildah with its own storage in the cache; nothing of the user's is read or written.

    It leaves layers mounted. In a mount namespace of its own they end with it, and with the run root in ``scratch`` no
    count of them stays behind.
    """
    apart = ["unshare", "--mount", "--propagation", "private"]
    where = ["--root", f"{_storage_dir()}", "--runroot", f"{scratch}/run", "--storage-driver", "overlay"]
    return run([*apart, "buildah", *where, *words], timeout_seconds=timeout_seconds, cwd=REPO_DIR).stdout


def _storage_dir() -> Path:
    return cache_dir() / "buildah" / "root"


def build_operator_archive() -> Path:
    """Build target ``operator`` of the Dockerfile; layers that did not change come from buildah's cache.

    Returns:
        The image archive, named ``localhost/rljob/operator:test`` inside.

    Raises:
        ClusterError: no Dockerfile, no buildah, or the build failed.
    """
    dockerfile = REPO_DIR / "Dockerfile"
    if not dockerfile.is_file():
        raise ClusterError(f"{dockerfile} is missing")
    base = base_archive()
    target = images_dir() / "operator.tar"
    start = time.monotonic()
    say("building the operator image ...")
    with exclusive(images_dir() / ".buildah.lock", _BUILD_DEADLINE_SECONDS), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _ensure_base(folder, base)
        pip_conf = folder / "pip.conf"
        pip_conf.write_text(pip_configuration(os.environ, _host_pip_files()))
        # Mounted, never copied or passed as arguments: the host's package sources must not end up in the image.
        mounts = [
            f"--volume={pip_conf}:/etc/pip.conf:ro",
            f"--volume={_ca_bundle().resolve()}:{_CA_BUNDLE_IN_IMAGE}:ro",
        ]
        _buildah(
            folder,
            *("build", "--force-rm", "--isolation", "chroot", "--network", "host", "--layers", "--pull-never", *mounts),
            *("--build-arg", f"BASE={BASE_IMAGE}", "--target", "operator", "--file", dockerfile),
            *("--tag", OPERATOR_IMAGE, REPO_DIR),
            timeout_seconds=_BUILD_DEADLINE_SECONDS,
        )
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _buildah(folder, "push", "--quiet", OPERATOR_IMAGE, f"docker-archive:{temporary}:{OPERATOR_IMAGE}")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    say(f"built the operator image in {time.monotonic() - start:.0f} s ({target.stat().st_size / 1e6:.0f} MB)")
    return target


def _ensure_base(scratch: Path, archive: Path) -> None:
    """Load the base image into buildah's storage unless it holds that very archive."""
    stamp = _storage_dir().with_name("base")
    names = _buildah(scratch, "images", "--format", "{{.Name}}:{{.Tag}}").split()
    if stamp.exists() and stamp.read_text() == archive.name and BASE_IMAGE in names:
        return
    _buildah(scratch, "pull", "--quiet", f"docker-archive:{archive}")
    stamp.write_text(archive.name)


def ensure_operator_image(config: ClusterConfig) -> str:
    """Build the operator image and bring it onto the node; returns its name (``imagePullPolicy: Never``)."""
    ensure_image(config, build_operator_archive(), OPERATOR_IMAGE)
    return OPERATOR_IMAGE
