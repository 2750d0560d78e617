"""Reward statistics of one step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from rljob_trainer.rewards.outcome import FailureKind, ScoreResult


@dataclass(frozen=True)
class RewardSummary:
    """Statistics over the scored samples only; the others are counted, never averaged in as zeros."""

    num_samples: int
    """Samples submitted."""
    num_dropped: int
    """Samples without a reward, for whatever reason."""
    num_nan: int
    """Of these: a function returned NaN or an infinity."""
    num_timeouts: int
    """Of these: a time limit."""
    num_errors: int
    """Of these: any other failure."""
    reward_mean: float | None
    """Mean reward; None when nothing was scored."""
    reward_std: float | None
    """Population standard deviation of the rewards."""
    function_means: dict[str, float] = field(default_factory=dict)
    """Function name (and `<function>/<key>`) -> mean."""


def summarise_rewards(results: Iterable[ScoreResult]) -> RewardSummary:
    """Summary of one step; rewards [0.5, NaN, NaN, 0.8, 0.6, 0.7] have mean 0.65 and `num_nan` 2."""
    results = list(results)
    rewards = [result.reward for result in results if result.reward is not None]
    failures = [result.failure for result in results if result.failure is not None]
    values: dict[str, list[float]] = {}
    for result in results:
        for name, score in (*result.scores.items(), *result.metrics.items()):
            if score is not None:
                values.setdefault(name, []).append(score)
    num_timeouts = sum(failure.kind is FailureKind.TIMEOUT for failure in failures)
    return RewardSummary(
        num_samples=len(results),
        num_dropped=len(results) - len(rewards),
        num_nan=sum(result.is_nan for result in results),
        num_timeouts=num_timeouts,
        num_errors=len(failures) - num_timeouts,
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.pstdev(rewards) if rewards else None,
        function_means={name: statistics.fmean(scores) for name, scores in values.items()},
    )
