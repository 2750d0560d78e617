"""Rows of a mini-batch to ranks and micro-batches. Pure functions on lengths.

The gradient does not depend on anything decided here: losses are normalised by global counts (see
`algorithms.aggregation`), so these functions only balance time and memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

QUADRATIC_TOKENS: Final = 8192
"""Length at which attention costs about as much as the linear layers of a typical model; balances long sequences."""


@dataclass(frozen=True)
class BatchPlan:
    """Row indices by rank and micro-batch. Every rank has the same number of micro-batches, some possibly empty."""

    rows: list[list[list[int]]]

    @property
    def num_micro_batches(self) -> int:
        """Per rank."""
        return len(self.rows[0])


def plan_batches(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    micro_batch_tokens: int | None = None,
    micro_batch_sequences: int | None = None,
) -> BatchPlan:
    """Spread rows over ranks, and each rank's rows over micro-batches.

    Rows go longest first to the least loaded rank (LPT: within 4/3 of the optimum). Ranks run the same number of
    micro-batches, because each one is a round of collectives; a rank with nothing left runs an empty one.

    Args:
        lengths: tokens of each row, prompt and response.
        num_ranks: data-parallel ranks.
        micro_batch_tokens: largest sum of lengths in a micro-batch; a longer row gets one of its own.
        micro_batch_sequences: largest number of rows in a micro-batch, instead.

    Raises:
        ValueError: both limits or none.
    """
    if (micro_batch_tokens is None) == (micro_batch_sequences is None):
        raise ValueError("exactly one of micro_batch_tokens and micro_batch_sequences")
    by_rank = balance_rows(lengths, num_ranks)
    packed = [_fill(lengths, rows, micro_batch_tokens, micro_batch_sequences) for rows in by_rank]
    num_micro_batches = max(1, *(len(micro_batches) for micro_batches in packed))
    for micro_batches in packed:
        micro_batches.extend([] for _ in range(num_micro_batches - len(micro_batches)))
    return BatchPlan(packed)


def order_mini_batches(num_prompts: int, size: int, num_epochs: int, *, seed: Sequence[int]) -> list[list[int]]:
    """Prompt indices of each optimizer update; a group is never split.

    The first pass keeps the rollout's order (already shuffled), every further pass draws its own from (seed, epoch).
    """
    orders = [
        np.random.default_rng([*seed, epoch]).permutation(num_prompts) if epoch else np.arange(num_prompts)
        for epoch in range(num_epochs)
    ]
    return [order[start : start + size].tolist() for order in orders for start in range(0, num_prompts, size)]


def balance_rows(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Rows to bins of about equal cost (tokens plus the quadratic part); bins may stay empty."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, 0, index) for index in range(num_bins)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        cost, count, index = heapq.heappop(heap)
        bins[index].append(row)
        heapq.heappush(heap, (cost + lengths[row] * (1 + lengths[row] / QUADRATIC_TOKENS), count + 1, index))
    return bins


def _fill(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int | None, max_sequences: int | None
) -> list[list[int]]:
    """First-fit decreasing by tokens, or plain slices by count (rows arrive longest first)."""
    if max_sequences is not None:
        return [list(rows[start : start + max_sequences]) for start in range(0, len(rows), max_sequences)]
    assert max_tokens is not None
    micro_batches: list[list[int]] = []
    free: list[int] = []
    for row in rows:
        for index, room in enumerate(free):
            if lengths[row] <= room:
                micro_batches[index].append(row)
                free[index] -= lengths[row]
                break
        else:
            micro_batches.append([row])
            free.append(max_tokens - lengths[row])
    return micro_batches
