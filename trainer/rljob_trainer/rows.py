"""Plain data that travels between driver, engines and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.batching import BatchPlan

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass
class TrainRow:
    """One response on its way through an update; arrays have one float32 value per response token."""

    prompt_ids: list[int]
    response_ids: list[int]
    advantages: FloatArray
    rollout_log_probs: FloatArray
    trainable: bool = True
    """False leaves the row out of the loss and of every denominator."""
    old_log_probs: FloatArray | None = None
    """None: one update per rollout, so the policy is still the one that acted and the ratio is exactly 1."""
    reference_log_probs: FloatArray | None = None
    values: FloatArray | None = None
    """The critic's value of the state before each token, as it was when the rollout ended."""
    returns: FloatArray | None = None
    """What the critic's values are moved towards: advantages before whitening + values."""

    token_weights: FloatArray | None = None
    """Rollout correction: multiply the token losses; None: no weights."""
    kept: BoolArray | None = None
    """False on tokens that the rollout correction rejected; they are not trained on. None keeps all."""
    selected: BoolArray | None = None
    """Tokens that Clip-Cov or KL-Cov treat, chosen over the whole mini-batch."""

    @property
    def num_trainable_tokens(self) -> int:
        """Tokens that take part in the loss."""
        return int(self.loss_mask.sum())

    @property
    def loss_mask(self) -> BoolArray:
        """(tokens,) true where a token takes part in the loss."""
        mask = np.full(len(self.response_ids), self.trainable)
        return mask if self.kept is None else mask & self.kept

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer update, with the counts of the whole mini-batch."""

    micro_batches: list[list[TrainRow]]
    num_tokens_global: int
    num_sequences_global: int
    learning_rate: float
    kl_coefficient: float = 0.0
    is_supervised: bool = False
    """Negative log-likelihood of the responses instead of the policy loss."""


@dataclass(frozen=True)
class UpdateMetrics:
    """Global statistics of one optimizer update (the same on every rank)."""

    loss: float
    gradient_norm: float
    """Before clipping."""
    entropy: float
    """Nats per trainable token."""
    kl: float
    """KL(policy || reference), K3 estimate, nats per token; 0 without a reference."""
    rollout_kl: float
    """K3 estimate between trainer and rollout engine, nats per token: numerical mismatch plus staleness."""
    clip_fraction: float
    ratio_max_deviation: float
    """max |ratio - 1| over trainable tokens."""
    num_tokens: int
    """Trainable tokens."""
    is_finite: bool
    """False: NaN or Inf in loss, KL, entropy or gradient; the weights were left alone."""
    correction_weight_mean: float = 1.0
    """Mean importance weight of the rollout correction, over tokens before rejection; 1 without weights."""
    effective_sample_fraction: float = 1.0
    """1 / mean((w / mean w)^2) over the same tokens: how many samples' worth of signal the weights leave."""
    rejected_fraction: float = 0.0
    """Share of tokens that the rollout correction rejected."""


@dataclass(frozen=True)
class ValueMetrics:
    """Global statistics of one optimizer update of the critic (the same on every rank)."""

    loss: float
    """Half the mean squared error to the returns, clipped around the old values."""
    gradient_norm: float
    """Before clipping."""
    clip_fraction: float
    """Share of tokens whose value is further than `critic.valueClip` from the old one."""
    value_mean: float
    num_tokens: int
    """Trainable tokens."""
    is_finite: bool
    """False: NaN or Inf in loss, values or gradient; the weights were left alone."""


def split_rows(rows: Sequence[TrainRow], plan: BatchPlan) -> list[list[list[TrainRow]]]:
    """Rows by rank and micro-batch."""
    return [[[rows[index] for index in micro] for micro in rank] for rank in plan.rows]


def count_trainable(rows: Sequence[TrainRow]) -> tuple[int, int]:
    """(tokens, sequences with at least one token) that take part in the loss."""
    counts = [row.num_trainable_tokens for row in rows]
    return sum(counts), sum(count > 0 for count in counts)
