"""The images of the test cluster, made on this machine and cached as archives in ``<cache>/images``.

* ``pause``: a static C program, nothing else.
* ``base``: Debian 12 with Python 3.11 and pip, laid out like the official ``python:3.11-slim``; also the base that the
  product's Dockerfile is built on here.
* ``ray``: ``base`` plus Ray at the version of ``requirements/trainer.txt`` and a user 1000:1000.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path

from testcluster.archive import ImageConfig, pack_layer, write_archive
from testcluster.config import REPO_DIR, cache_dir
from testcluster.errors import ClusterError
from testcluster.lockfile import lock_subset
from testcluster.locks import exclusive
from testcluster.settings import PAUSE_IMAGE
from testcluster.shell import run
from testcluster.toolchain import install_python_packages, say

BASE_IMAGE = "localhost/rljob/base:test"
RAY_IMAGE = "localhost/rljob/ray:test"
JOB_USER_ID = 1000

_PAUSE_SOURCE = REPO_DIR / "images" / "pause" / "pause.c"
_TRAINER_LOCK = REPO_DIR / "requirements" / "trainer.txt"
_DEBIAN_SUITE = "bookworm"
_BASE_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates,wget"
_BASE_RECIPE = "3"
_RAY_RECIPE = "2"
_PYTHON = "python3.11"
_BUILD_DEADLINE_SECONDS = 1800
_UNNEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")
_RAY_SCRIPT = f"""#!/usr/bin/{_PYTHON}
import sys

from ray.scripts.scripts import main

sys.exit(main())
"""


def images_dir() -> Path:
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _recipe_key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A scratch folder beside the cache, on a disk: /tmp may be memory."""
    return tempfile.TemporaryDirectory(prefix=".scratch-", dir=images_dir(), ignore_cleanup_errors=True)


def pause_archive() -> Path:
    """The sandbox image's archive, compiled from ``images/pause/pause.c``."""
    target = images_dir() / f"pause-{_recipe_key(_PAUSE_SOURCE.read_text())}.tar"
    if not target.exists():
        with _scratch() as scratch:
            root, layer = Path(scratch, "root"), Path(scratch, "layer.tar")
            root.mkdir(mode=0o755)
            run(["gcc", "-static", "-Os", "-Wall", "-Werror", "-o", root / "pause", _PAUSE_SOURCE])
            pack_layer(root, layer)
            config = ImageConfig(entrypoint=("/pause",), user="65535:65535")
            write_archive(target, PAUSE_IMAGE, [layer], config)
    return target


def _base_layer() -> Path:
    """Root file system of the base image as one layer tar, made by debootstrap once."""
    target = images_dir() / f"base-{_recipe_key(_DEBIAN_SUITE, _BASE_PACKAGES, _BASE_RECIPE)}.layer.tar"
    if target.exists():
        return target
    if os.geteuid() != 0:
        raise ClusterError("debootstrap needs root: run as root to make the base image")
    start = time.monotonic()
    say("making the base image's root file system with debootstrap ...")
    with _scratch() as scratch:
        root, layer = Path(scratch, "root"), Path(scratch, "layer.tar")
        run(
            ["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", _DEBIAN_SUITE, root],
            timeout_seconds=_BUILD_DEADLINE_SECONDS,
        )
        for unneeded in _UNNEEDED:
            shutil.rmtree(root / unneeded, ignore_errors=True)
            (root / unneeded).mkdir(parents=True)
        # The official Python images let pip install into the system; their Dockerfiles rely on it.
        (root / "usr" / "lib" / _PYTHON / "EXTERNALLY-MANAGED").unlink(missing_ok=True)
        (root / "usr" / "local" / "bin" / "python").symlink_to(f"/usr/bin/{_PYTHON}")
        pack_layer(root, layer)
        layer.replace(target)
    say(f"made the base image's root file system in {time.monotonic() - start:.0f} s")
    return target


def base_archive() -> Path:
    """The base image's archive."""
    with exclusive(images_dir() / ".lock", _BUILD_DEADLINE_SECONDS):
        layer = _base_layer()
        target = layer.with_name(layer.name.replace(".layer.tar", ".tar"))
        if not target.exists():
            write_archive(target, BASE_IMAGE, [layer], ImageConfig())
        return target


def _account_file(base_layer: Path, member: str, line: str) -> str:
    """The base image's ``etc/passwd`` or ``etc/group`` with one more line."""
    with tarfile.open(base_layer) as archive:
        handle = archive.extractfile(f"./{member}")
        if handle is None:
            raise ClusterError(f"{base_layer}: {member} is not a file")
        return handle.read().decode() + line + "\n"


def _fill_ray_root(root: Path, base_layer: Path, lock: Path) -> None:
    local = root / "usr" / "local"
    packages = local / "lib" / _PYTHON / "dist-packages"
    packages.mkdir(parents=True)
    install_python_packages(lock, packages)
    # Scripts of --target carry the building interpreter's path; the pod's Ray needs only its own.
    shutil.rmtree(packages / "bin", ignore_errors=True)
    # The pod's user cannot write byte code beside the packages, and would compile Ray at every start.
    run([_interpreter(), "-m", "compileall", "-q", "-j", "2", packages], timeout_seconds=600, check=False)
    (local / "bin").mkdir()
    script = local / "bin" / "ray"
    script.write_text(_RAY_SCRIPT)
    script.chmod(0o755)
    home = root / "home" / "ray"
    home.mkdir(parents=True)
    (root / "etc").mkdir()
    uid = JOB_USER_ID
    (root / "etc" / "passwd").write_text(
        _account_file(base_layer, "etc/passwd", f"ray:x:{uid}:{uid}::/home/ray:/bin/bash")
    )
    (root / "etc" / "group").write_text(_account_file(base_layer, "etc/group", f"ray:x:{uid}:"))
    os.chown(home, uid, uid)


def _interpreter() -> Path:
    """The repository's locked interpreter, whose packages the job pods mount.

    Raises:
        ClusterError: it is missing or of another minor version than the images' Python.
    """
    python = REPO_DIR / ".venv" / "bin" / "python"
    if not python.exists():
        raise ClusterError(f"{python} is missing; run `make venv`")
    version = run([python, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"]).stdout.strip()
    if version != _PYTHON:
        raise ClusterError(
            f"{python} is {version}, but the test pods' image has {_PYTHON} and mounts its packages; "
            "run `make venv PYTHON=python3.11` in a clean checkout"
        )
    return python


def ray_lock() -> str:
    """The part of ``requirements/trainer.txt`` that Ray needs, from the metadata of the locked environment."""
    if not _TRAINER_LOCK.exists():
        raise ClusterError(f"{_TRAINER_LOCK} is missing; run `make lock`")
    site_packages = str(site_packages_dir())

    def requires(name: str) -> list[str] | None:
        found = next(iter(importlib.metadata.distributions(name=name, path=[site_packages])), None)
        if found is None:
            raise ClusterError(f"{name}, needed by Ray, is not in {site_packages}; run `make venv`")
        return found.requires

    return lock_subset(_TRAINER_LOCK.read_text(), "ray[default]", requires)


def ray_archive() -> Path:
    """The job pods' image archive."""
    with exclusive(images_dir() / ".lock", _BUILD_DEADLINE_SECONDS):
        base = _base_layer()
        lock = ray_lock()
        target = images_dir() / f"ray-{_recipe_key(base.name, lock, _RAY_RECIPE)}.tar"
        if target.exists():
            return target
        start = time.monotonic()
        say("making the Ray image ...")
        with _scratch() as scratch:
            root, layer, lock_file = Path(scratch, "root"), Path(scratch, "layer.tar"), Path(scratch, "lock.txt")
            root.mkdir(mode=0o755)
            lock_file.write_text(lock)
            _fill_ray_root(root, base, lock_file)
            pack_layer(root, layer)
            config = ImageConfig(
                env=(*ImageConfig().env, "HOME=/home/ray", "LANG=C.UTF-8"),
                user=f"{JOB_USER_ID}:{JOB_USER_ID}",
                working_dir="/home/ray",
            )
            write_archive(target, RAY_IMAGE, [base, layer], config)
        say(f"made the Ray image in {time.monotonic() - start:.0f} s ({target.stat().st_size / 1e6:.0f} MB)")
        return target


def site_packages_dir() -> Path:
    """The locked environment's packages, which job pods mount read-only."""
    return REPO_DIR / ".venv" / "lib" / _PYTHON / "site-packages"


def compile_environment() -> None:
    """Byte-compile the mounted environment once per lock: pods see it read-only and would compile it at every start."""
    stamp = REPO_DIR / ".venv" / ".byte-compiled"
    lock = REPO_DIR / "requirements" / "dev.txt"
    if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return
    start = time.monotonic()
    say("byte-compiling the environment that job pods mount ...")
    # Some packages ship files that are templates or for other Python versions; those are not imported.
    run(
        [_interpreter(), "-m", "compileall", "-q", "-j", "2", "-x", r"/tests?/", site_packages_dir()],
        timeout_seconds=_BUILD_DEADLINE_SECONDS,
        check=False,
    )
    stamp.touch()
    say(f"byte-compiled the environment in {time.monotonic() - start:.0f} s")
