"""The supervised phase before RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from rljob_api.v1alpha1.data import SupervisedWarmStart
from rljob_trainer.data import PromptSampler, SupervisedRow
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.rows import TrainRow, UpdateMetrics
from rljob_trainer.skipped_updates import count_skipped

DECAY_FRACTION: Final = 0.3
"""Last part of the steps, over which the learning rate falls linearly towards 0."""


def compute_warm_start_rate(step: int, peak: float, total_steps: int) -> float:
    """Learning rate of a 1-based step: constant, then falling linearly over the last 30 %."""
    return peak * min(1.0, (total_steps - step + 1) / (DECAY_FRACTION * total_steps))


def run_warm_start(
    dispatcher: Dispatcher,
    demonstrations: Sequence[SupervisedRow],
    supervised: SupervisedWarmStart,
    seed: int,
    *,
    max_nan_steps: int,
    note: Callable[[str], None],
    on_step: Callable[[int, UpdateMetrics], None],
) -> None:
    """Negative log-likelihood of the responses, mean over tokens; the RL phase starts with a fresh optimizer.

    `on_step` may raise to stop. `note` is told of each update that was skipped.

    Raises:
        NumericalError: `max_nan_steps` consecutive updates, or all of them, were not finite.
    """
    num_skipped_in_a_row = 0
    rows_per_step = min(supervised.rows_per_step, len(demonstrations))
    sampler = PromptSampler(len(demonstrations), rows_per_step, seed)
    for step in range(1, supervised.steps + 1):
        rows = [_build_row(demonstrations[index]) for index in sampler.next_batch()]
        rate = compute_warm_start_rate(step, supervised.learning_rate, supervised.steps)
        metrics = dispatcher.update(rows, learning_rate=rate, is_supervised=True)
        num_skipped_in_a_row = count_skipped(
            num_skipped_in_a_row,
            metrics.is_finite,
            # A warm start that is shorter than the limit must not pass without a single update.
            limit=min(max_nan_steps, supervised.steps),
            facts=f"warm start step {step}: loss {metrics.loss}, gradient norm {metrics.gradient_norm}",
            cure=f"spec.warmStart.supervised.learningRate (now {supervised.learning_rate:g})",
            note=note,
        )
        on_step(step, metrics)
    dispatcher.reset_optimizer()


def _build_row(row: SupervisedRow) -> TrainRow:
    zeros = np.zeros(len(row.response_ids), dtype=np.float32)
    return TrainRow(row.prompt_ids, row.response_ids, advantages=zeros, rollout_log_probs=zeros)
