"""Running other programs: every call has a deadline, and a failure shows the program's own words."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from testcluster.errors import ClusterError

_TAIL_CHARS = 4000


def run(
    argv: Sequence[str | Path],
    *,
    timeout_seconds: float = 120,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` to its end, output captured; ``env`` is added to the current environment.

    Raises:
        ClusterError: the program is missing, ran past ``timeout_seconds``, or (with ``check``) failed.
    """
    words = [str(word) for word in argv]
    data = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        raw = subprocess.run(
            words,
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            timeout=timeout_seconds,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]}: not installed ({error}); run `toolchain.py cluster` first") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{shlex.join(words)}` ran past {timeout_seconds:.0f} s") from error
    done = subprocess.CompletedProcess(
        words, raw.returncode, raw.stdout.decode(errors="replace"), raw.stderr.decode(errors="replace")
    )
    if check and done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-_TAIL_CHARS:]
        raise ClusterError(f"`{shlex.join(words)}` ended with {done.returncode}:\n{said}")
    return done
