"""preStop hook of head and workers: have the trainer publish a checkpoint before the pod goes.

Asks the driver on the head (`POST /v1/stop`) and waits until it is done, within a deadline shorter than the pod's
grace period. A driver that is not running has nothing to save. Standard library only: it runs in whatever image the
job uses.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request

POLL_SECONDS = 2.0
REQUEST_TIMEOUT_SECONDS = 10.0
MAX_CONSECUTIVE_FAILURES = 3
ENDED_STATES = ("Stopped", "Succeeded", "Failed")


def request(url: str, token: str, body: dict[str, int] | None = None) -> dict[str, object]:
    """One JSON request; never through a proxy, the driver is in the same cluster."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=REQUEST_TIMEOUT_SECONDS) as response:
        document = json.loads(response.read() or b"{}")
    return document if isinstance(document, dict) else {}


def wait_for_checkpoint(base_url: str, token: str, deadline_seconds: int) -> str:
    """Stop the driver and wait for it. Returns what ended the wait.

    Raises:
        urllib.error.HTTPError: the driver refused, for example a wrong token (401).
    """
    end = time.monotonic() + deadline_seconds
    asked = False
    num_failures = 0
    while time.monotonic() < end:
        try:
            if not asked:
                request(f"{base_url}/v1/stop", token, {"deadlineSeconds": deadline_seconds})
                asked = True
            progress = request(f"{base_url}/v1/progress", token)
            num_failures = 0
            if progress.get("state") in ENDED_STATES or progress.get("verdict"):
                return f"the trainer ended: {progress.get('state')}"
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ConnectionRefusedError):
                return "the trainer is not running"
            num_failures += 1
            if num_failures >= MAX_CONSECUTIVE_FAILURES:
                return f"the trainer does not answer: {reason}"
        time.sleep(POLL_SECONDS)
    return f"no checkpoint within {deadline_seconds} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--deadline-seconds", type=int, required=True)
    arguments = parser.parse_args()
    # KubeRay gives workers the head Service's name; on the head the driver is local, on either family.
    host = os.environ.get("FQ_RAY_IP", "localhost")
    try:
        outcome = wait_for_checkpoint(
            f"http://{host}:{arguments.port}", os.environ.get("RAY_AUTH_TOKEN", ""), arguments.deadline_seconds
        )
    except urllib.error.HTTPError as error:
        print(f"preStop: {host}:{arguments.port} answered {error.code} {error.reason}", file=sys.stderr)
        return 1
    print(f"preStop: {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
