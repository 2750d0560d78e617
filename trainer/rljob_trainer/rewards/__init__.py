"""Rewards: functions of `spec.reward`, scored in workers with hard time limits.

Names are imported on first use: scoring processes import `rewards.functions` alone and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljob_trainer.rewards.outcome import FailureKind, ScoreFailure, ScoreRequest, ScoreResult
    from rljob_trainer.rewards.plans import make_answer_check
    from rljob_trainer.rewards.service import Backend, RewardService
    from rljob_trainer.rewards.summary import RewardSummary, summarise_rewards

__all__ = [
    "Backend",
    "FailureKind",
    "RewardService",
    "RewardSummary",
    "ScoreFailure",
    "ScoreRequest",
    "ScoreResult",
    "make_answer_check",
    "summarise_rewards",
]

_MODULES = {
    "Backend": "service",
    "FailureKind": "outcome",
    "RewardService": "service",
    "RewardSummary": "summary",
    "ScoreFailure": "outcome",
    "ScoreRequest": "outcome",
    "ScoreResult": "outcome",
    "make_answer_check": "plans",
    "summarise_rewards": "summary",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
