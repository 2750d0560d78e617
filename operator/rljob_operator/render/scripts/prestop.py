"""preStop hook of head and workers: have the trainer publish a checkpoint before the pod goes.

Asks the driver on the head (`POST /v1/stop`) and waits until it is done, within a deadline shorter than the pod's
grace period. A driver that is not running has nothing to save. Standard library only: it runs in whatever image the
job uses.
"""

import argparse
import http.client
import json
import os
import sys
import time

POLL_SECONDS = 2.0
CONNECT_TIMEOUT_SECONDS = 2.0
"""Short: a head that went first leaves an address that answers nothing, and GPUs are held while workers wait for it."""
ANSWER_TIMEOUT_SECONDS = 10.0
MAX_CONSECUTIVE_FAILURES = 3
ENDED_STATES = ("Stopped", "Succeeded", "Failed")


class RefusedError(Exception):
    """The driver answered with an error, for example a wrong token (401)."""


class Driver:
    """The progress server of the driver. Never through a proxy: it is in the same cluster."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port = host, port
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def request(self, method: str, path: str, body: dict[str, int] | None = None) -> dict[str, object]:
        """One JSON request on a connection of its own.

        Raises:
            RefusedError: an HTTP error. OSError, ValueError, http.client.HTTPException: no usable answer.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_TIMEOUT_SECONDS)
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            raise RefusedError(f"{self._host}:{self._port} answered {response.status} {response.reason}")
        document = json.loads(text or b"{}")
        return document if isinstance(document, dict) else {}


def wait_for_checkpoint(driver: Driver, deadline_seconds: int) -> str:
    """Stop the driver and wait for it. Returns what ended the wait.

    Raises:
        RefusedError: the driver refused.
    """
    end = time.monotonic() + deadline_seconds
    asked = False
    num_failures = 0
    while time.monotonic() < end:
        try:
            if not asked:
                driver.request("POST", "/v1/stop", {"deadlineSeconds": deadline_seconds})
                asked = True
            progress = driver.request("GET", "/v1/progress")
            num_failures = 0
            if progress.get("state") in ENDED_STATES or progress.get("verdict"):
                return f"the trainer ended: {progress.get('state')}"
        except ConnectionRefusedError:
            return "the trainer is not running"
        except (OSError, ValueError, http.client.HTTPException) as error:
            num_failures += 1
            if num_failures >= MAX_CONSECUTIVE_FAILURES:
                return f"the trainer does not answer: {error}"
        time.sleep(POLL_SECONDS)
    return f"no checkpoint within {deadline_seconds} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--deadline-seconds", type=int, required=True)
    arguments = parser.parse_args()
    # KubeRay gives workers the head Service's name; on the head the driver is local, on either family.
    host = os.environ.get("FQ_RAY_IP", "localhost")
    driver = Driver(host, arguments.port, os.environ.get("RAY_AUTH_TOKEN", ""))
    try:
        outcome = wait_for_checkpoint(driver, arguments.deadline_seconds)
    except RefusedError as error:
        print(f"preStop: {error}", file=sys.stderr)
        return 1
    print(f"preStop: {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
