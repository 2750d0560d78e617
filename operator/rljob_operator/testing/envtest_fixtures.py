"""Fixtures of test API servers, and the process that keeps one for all workers of a test run.

A server costs 20 CPU seconds to start and some of them all the time: the workers of pytest-xdist use the same one, each
test in a namespace of its own.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

import pytest

from rljob_operator.testing.envtest import (
    START_TIMEOUT_SECONDS,
    Envtest,
    EnvtestUnavailableError,
    apply_crd,
    find_binaries,
    find_kuberay_crd,
    find_rljob_crd,
    start_envtest,
)

_POLL_SECONDS: Final = 0.1


@pytest.fixture(scope="session")
def bare_envtest() -> Envtest:
    """An API server without our CRDs, for this process. Skips with the reason when a binary is missing; fails when
    CI=true."""
    try:
        return _start_bare()
    except EnvtestUnavailableError as error:
        _skip_or_fail(str(error))


@pytest.fixture(scope="session")
def envtest() -> Envtest:
    """An API server with the CRDs of this project and of KubeRay, for all workers of the test run; else as
    `bare_envtest`."""
    try:
        return _join_shared()
    except EnvtestUnavailableError as error:
        _skip_or_fail(str(error))


# pytest takes a fixture that several files import for several fixtures.
@cache
def _start_bare() -> Envtest:
    directory = tempfile.TemporaryDirectory(prefix="rljob-envtest-")
    atexit.register(directory.cleanup)
    environment = start_envtest(Path(directory.name))
    atexit.register(environment.stop)
    return environment


@cache
def _join_shared() -> Envtest:
    """The server of this test run, started by whoever asks first. Raises EnvtestUnavailableError, RuntimeError."""
    find_binaries()
    find_rljob_crd()
    find_kuberay_crd()
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getppid() if run else os.getpid()
    directory = Path(tempfile.gettempdir()) / f"rljob-envtest-of-{run or uuid.uuid4().hex}"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "ready.json").exists():
            _start_keeper(owner, directory)
    values = json.loads((directory / "ready.json").read_text())
    return Envtest(
        kubeconfig=Path(values["kubeconfig"]),
        server=values["server"],
        token=values["token"],
        ca_path=Path(values["ca_path"]),
        audit_log=Path(values["audit_log"]),
    )


def _start_keeper(owner: int, directory: Path) -> None:
    log = directory / "keeper.log"
    with log.open("w") as output:
        # Of its own session: an interrupt from the keyboard would end it before the tests have cleaned up.
        keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, str(owner), str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 2 * START_TIMEOUT_SECONDS
    while not (directory / "ready.json").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.kill()
            raise RuntimeError(f"the test API server did not start: {log.read_text()[-4000:]}")
        time.sleep(_POLL_SECONDS)


def keep(owner: int, directory: Path) -> None:
    """Serve until process `owner` is gone, however it ends; then leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="rljob-envtest-") as work:
        environment = start_envtest(Path(work))
        try:
            for path in (find_rljob_crd(), find_kuberay_crd()):
                apply_crd(environment, path)
            values = {f.name: getattr(environment, f.name) for f in fields(environment) if f.name != "processes"}
            (directory / "ready.tmp").write_text(json.dumps(values, default=str))
            (directory / "ready.tmp").rename(directory / "ready.json")
            while not _is_gone(owner):
                time.sleep(_POLL_SECONDS)
        finally:
            environment.stop()
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # one that nobody has waited for yet
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def _skip_or_fail(reason: str) -> NoReturn:
    # A skip nobody reads would pass for a green run on the machine that gates merges.
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


if __name__ == "__main__":
    keep(int(sys.argv[1]), Path(sys.argv[2]))
