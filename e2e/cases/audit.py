"""API writes of the operator, counted in the API server's audit log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

WRITES = {"create", "update", "patch", "delete", "deletecollection"}
APART = {"events", "leases"}
PROGRESS = "content=progress"
"""The operator marks status writes that carry nothing but training progress in their URI."""


def count_writes(audit_log: Path, account: str, job: dict[str, Any]) -> Counter[str]:
    """Writes per `verb resource[/subresource]` for one job's objects; progress, Events and Leases apart."""
    job_name, born = job["metadata"]["name"], job["metadata"]["creationTimestamp"]
    counted: Counter[str] = Counter()
    for line in audit_log.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the server is writing the last line
        reference = event.get("objectRef", {})
        name = reference.get("name", "")
        if event.get("user", {}).get("username") != account or event["verb"] not in WRITES:
            continue
        if reference.get("resource") in APART or not (name == job_name or name.startswith(f"{job_name}-")):
            continue
        if event["requestReceivedTimestamp"][:19] < born.rstrip("Z"):
            continue  # an earlier job of that name
        if PROGRESS in event.get("requestURI", ""):
            continue
        resource = "/".join(filter(None, (reference.get("resource"), reference.get("subresource"))))
        counted[f"{event['verb']} {resource}"] += 1
    return counted
