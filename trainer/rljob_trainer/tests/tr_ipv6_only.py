"""Commands in a network namespace that has IPv6 and nothing else, as the strictest pod sees it.

The namespace has no name: it is gone when the last process in it ends, so there is nothing to clean up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest

ADDRESS = "fd00:77::2"
INTERFACE = "eth0"
# Linux gives `lo` 127.0.0.1 by itself; a veth pair stands for the pod's interface.
SETUP = f"""
set -euo pipefail
ip link set lo up
ip -4 address flush dev lo
ip link add {INTERFACE} type veth peer name peer0
ip address add {ADDRESS}/64 dev {INTERFACE} nodad
ip link set peer0 up
ip link set {INTERFACE} up
exec "$@"
"""


def enter_ipv6_only(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in a new namespace; skips the test where the kernel allows none."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    prefix = ["unshare", *user, "--net", "bash", "-c", SETUP, "bash"]
    missing = [program for program in ("unshare", "ip", "bash") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here")
    attempt = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=30, check=False)
    if attempt.returncode:
        pytest.skip(f"no network namespace with IPv6 here: {attempt.stderr.strip()}")
    return [*prefix, *command]
