"""kubectl as users call it; every call and every wait has a deadline."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
READS = ("get", "wait", "logs")
UNREACHABLE = ("Unable to connect", "TLS handshake timeout", "connection refused", "request timed out")


class KubectlError(AssertionError):
    """A kubectl call failed; the message is its stderr."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl against one cluster and namespace."""

    binary: str
    kubeconfig: str
    namespace: str

    def run(self, *words: str, stdin: str | None = None, timeout_seconds: float = 60) -> str:
        """stdout of `kubectl <words>`; raises KubectlError with stderr.

        A read that did not reach the API server is repeated: on two cores, starting pods can starve it for seconds.
        """
        command = [self.binary, "--kubeconfig", self.kubeconfig, "--namespace", self.namespace, *words]
        for pause_seconds in (2, 5, 10, 20, None):
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=timeout_seconds, check=False
            )
            if done.returncode == 0:
                return done.stdout
            problem = done.stderr.strip() or done.stdout.strip()
            if pause_seconds is None or words[0] not in READS or not any(word in problem for word in UNREACHABLE):
                break
            time.sleep(pause_seconds)
        raise KubectlError(f"kubectl {' '.join(words)}: {problem}")

    def apply(self, document: dict[str, Any]) -> None:
        """`kubectl apply -f -` (client-side, as most users do)."""
        self.run("apply", "-f", "-", stdin=json.dumps(document))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """The object, or None."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of a kind."""
        words = ["get", kind, "-o", "json"] + (["--selector", selector] if selector else [])
        return json.loads(self.run(*words))["items"]


def wait_until(
    what: str,
    probe: Callable[[], T | None],
    *,
    timeout_seconds: float,
    every_seconds: float = 1.0,
    state: Callable[[], str] = str,
) -> T:
    """The first truthy answer of `probe`; at the deadline the failure says what was awaited and what was seen."""
    end = time.monotonic() + timeout_seconds
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_seconds:.0f} s: {what}. Seen last: {state()}")
        time.sleep(every_seconds)


def condition(job: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """A condition of a job, or an empty dict."""
    conditions = (job or {}).get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == kind), {})
