"""The preStop hook: a checkpoint within the pod's grace period when the pod is evicted."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.names import CONFIG_PATH
from rljob_operator.render.names import PRE_STOP_KEY

_MARGIN_SECONDS: Final = 10
"""Left of the grace period for SIGTERM after the hook."""


def compute_pre_stop_deadline_seconds(termination_grace_period_seconds: int) -> int:
    """How long the hook may wait: the grace period less a margin, never less than half of it."""
    return max(1, termination_grace_period_seconds // 2, termination_grace_period_seconds - _MARGIN_SECONDS)


def build_lifecycle(resolved: ResolvedJob) -> dict[str, Any] | None:
    """`lifecycle` of the Ray container; None for another trainer (`spec.trainer`), which has no stop endpoint."""
    if resolved.spec.trainer is not None:
        return None
    deadline_seconds = compute_pre_stop_deadline_seconds(resolved.spec.cluster.termination_grace_period_seconds)
    directory = CONFIG_PATH.rpartition("/")[0]
    return {
        "preStop": {
            "exec": {
                "command": [
                    "python",
                    f"{directory}/{PRE_STOP_KEY}",
                    f"--port={resolved.server.port}",
                    f"--deadline-seconds={deadline_seconds}",
                ]
            }
        }
    }


def read_pre_stop_script() -> str:
    """Text of the hook, mounted next to job.json."""
    return files("rljob_operator.render").joinpath("scripts", PRE_STOP_KEY).read_text(encoding="utf-8")
