"""Which prompts a step trains on: one rollout round, or DAPO's rounds until enough groups have a signal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rljob_api.v1alpha1.algorithm import DynamicSampling
from rljob_trainer.data import PromptRow
from rljob_trainer.rollout import ScoredSample

Group = list[ScoredSample]


@dataclass(frozen=True)
class CollectedBatch:
    """Samples of one step."""

    samples: list[ScoredSample]
    """Of the groups to train on, group by group."""
    all_samples: list[ScoredSample]
    """Everything that was generated and scored."""
    num_refills: int = 0
    """Rollout rounds after the first."""
    num_dropped_groups: int = 0
    """Groups without a signal that are not trained on."""
    num_surplus_groups: int = 0
    """Groups with a signal beyond the batch size; they are not trained on either."""
    num_aborted_groups: int = 0
    """Groups that `rollout.overSample` started and did not wait for; their prompts come again in the next epoch."""

    @property
    def rows(self) -> list[PromptRow]:
        """Prompts to train on, in the order of `samples`."""
        return list({sample.row.uid: sample.row for sample in self.samples}.values())


def collect_batch(
    num_prompts: int,
    sampling: DynamicSampling | None,
    *,
    draw: Callable[[int], list[PromptRow]],
    roll_out: Callable[[list[PromptRow]], list[ScoredSample]],
    num_drawn: int | None = None,
) -> CollectedBatch:
    """Roll out until `num_prompts` groups have different rewards, at most `maxRefills` extra rounds.

    A batch that is still short is completed with the constant groups drawn first. What is drawn depends on the rewards
    alone, so a resumed run repeats it.

    Args:
        num_prompts: groups of a step.
        sampling: DAPO's dynamic sampling; None or disabled: one round, whatever its groups look like.
        draw: the next prompts of the data order; it may return a prompt again where an epoch ends within the step.
        roll_out: generates and scores the groups of prompts; of more than `num_prompts`, the first to be complete.
        num_drawn: prompts to start where sampling is not dynamic; default `num_prompts`.
    """
    if sampling is None or not sampling.enabled:
        rows = draw(num_drawn or num_prompts)
        samples = roll_out(rows)
        return CollectedBatch(samples, samples, num_aborted_groups=len(rows) - len(split_groups(samples)))
    informative: list[Group] = []
    constant: list[Group] = []
    seen: set[str] = set()
    num_rounds = 0
    while len(informative) < num_prompts and num_rounds <= sampling.max_refills:
        num_rounds += 1
        missing = num_prompts - len(informative)
        drawn = draw(estimate_prompts(missing, len(informative), len(seen), num_prompts))
        # Twice the same prompt in a step would be one group, and the same samples again.
        rows = list({row.uid: row for row in drawn if row.uid not in seen}.values())
        seen.update(row.uid for row in rows)
        for group in split_groups(roll_out(rows)) if rows else []:
            (informative if has_signal(group) else constant).append(group)
    kept = informative[:num_prompts]
    completed = kept + constant[: num_prompts - len(kept)]
    return CollectedBatch(
        samples=[sample for group in completed for sample in group],
        all_samples=[sample for group in (*informative, *constant) for sample in group],
        num_refills=num_rounds - 1,
        num_dropped_groups=len(constant) - (len(completed) - len(kept)),
        num_surplus_groups=len(informative) - len(kept),
    )


def estimate_prompts(missing: int, num_informative: int, num_seen: int, limit: int) -> int:
    """Prompts to draw for `missing` groups with a signal, by the share found so far; at most `limit`."""
    if num_informative == 0:
        return limit
    return min(limit, math.ceil(missing * num_seen / num_informative))


def has_signal(group: Sequence[ScoredSample]) -> bool:
    """Whether two samples have different rewards; samples without a reward take no part."""
    rewards = np.array([sample.reward for sample in group], dtype=np.float32)
    valid = rewards[np.isfinite(rewards)]
    return bool(valid.size > 1 and valid.min() < valid.max())


def split_groups(samples: Sequence[ScoredSample]) -> list[Group]:
    """Samples by prompt uid, in the order of first appearance."""
    groups: dict[str, Group] = {}
    for sample in samples:
        groups.setdefault(sample.row.uid, []).append(sample)
    return list(groups.values())
