"""Statistics of one finished step, as the loop hands them to telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepStatistics:
    """One finished step. None and NaN mean undefined: nothing was scored, no KL term, ..."""

    step: int
    """1 is the first."""
    step_seconds: float
    """Wall time from the rollout's start to the end of the weight hand-over."""
    num_tokens: int
    """Prompt and response tokens of the step."""
    epoch: float | None = None
    """Passes over the training prompts so far."""
    reward_mean: float | None = None
    """Over scored samples only."""
    reward_std: float | None = None
    """Over scored samples only."""
    reward_function_means: Mapping[str, float] = field(default_factory=dict)
    """Function name -> mean of its unweighted scores."""
    kl_mean: float | None = None
    """Nats per token, to the reference or, without one, to the rollout policy."""
    entropy: float | None = None
    """Nats per token."""
    response_tokens_mean: float | None = None
    """Tokens per response."""
    loss: float | None = None
    """Policy loss, mean over the step's updates."""
    gradient_norm: float | None = None
    """Before clipping, mean over the step's updates."""
    value_loss: float | None = None
    """The critic's loss, mean over its updates of the step; None without a critic."""
    value_clip_fraction: float | None = None
    """Share of tokens whose value left the critic's clip range."""
    value_explained_variance: float | None = None
    """Of the returns, by the values before the updates: 1 is a perfect critic, 0 no better than a constant."""
    clip_fraction: float | None = None
    """Share of tokens whose ratio was clipped."""
    learning_rate: float | None = None
    """Of the step's updates."""
    weight_version: int | None = None
    """Version that the engines hold after the step."""
    rollout_ahead_seconds: float | None = None
    """Wall time of the rollout and its rewards, beside the training of the step before; None where they take turns."""
    num_nan_steps_total: int = 0
    """Updates skipped for NaN or Inf since the run began (kept over resumes)."""
    num_dropped_samples: int = 0
    """Samples of this step without a reward."""
    num_nan_rewards: int = 0
    """Of these, NaN or infinite rewards."""
    num_reward_timeouts: int = 0
    """Of these, killed on their time limit."""
    num_tokens_total: int | None = None
    """Tokens since the run began (kept over resumes); None: the telemetry counts itself."""
