"""Held-out evaluation: validation sets by name, pass@k and maj@k (shape legend: R subsets, K samples of a subset)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.data import PromptRow
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.rollout import ScoredSample

MAX_SUBSETS: Final = 1000
"""maj@k averages over all subsets of k samples, or over so many drawn with a fixed seed when there are more."""


@dataclass(frozen=True)
class ValidationSet:
    """Held-out prompts that are reported together."""

    name: str
    rows: list[PromptRow]


@dataclass(frozen=True)
class EvaluationMetrics:
    """One validation set after one step. None: no sample has a reward."""

    num_prompts: int
    num_samples: int
    num_excluded: int
    """Samples without a reward; they take part in nothing below but the lengths."""
    reward_mean: float | None
    """Over all samples that have a reward."""
    response_tokens_mean: float
    truncated_fraction: float
    """Responses that hit the length limit."""
    pass_at: Mapping[int, float]
    """k -> probability that at least one of k samples passes, mean over prompts (pass@k)."""
    best_at: Mapping[int, float]
    """k -> expected reward of the best of k samples, mean over prompts; pass@k for rewards of 0 and 1."""
    majority_at: Mapping[int, float]
    """k -> expected reward of the answer most of k samples give, mean over prompts (maj@k); empty where no reward
    function finds an answer in the response."""

    def as_row(self) -> dict[str, float | int | None]:
        """Flat, with the names used in metrics.jsonl, trackers and Prometheus."""
        row: dict[str, float | int | None] = {
            "reward_mean": self.reward_mean,
            "response_tokens_mean": self.response_tokens_mean,
            "truncated_fraction": self.truncated_fraction,
            "num_prompts": self.num_prompts,
            "num_samples": self.num_samples,
            "num_excluded": self.num_excluded,
        }
        for name, values in (("pass", self.pass_at), ("best", self.best_at), ("majority", self.majority_at)):
            row.update({f"{name}_at_{k}": value for k, value in values.items()})
        return row


def name_validation_sets(paths: Sequence[str]) -> list[str]:
    """A name for each file or directory: its stem, with as many parent directories before it as tell them apart.

    `/data/aime24.parquet` is aime24; `/a/gsm8k/test.parquet` and `/a/math/test.parquet` are gsm8k-test and math-test.
    """
    parts = [[*PurePath(path).parent.parts, PurePath(path).stem] for path in paths]
    names = [""] * len(paths)
    for index, own in enumerate(parts):
        for length in range(1, len(own) + 1):
            name = "-".join(part.strip("/") or "root" for part in own[-length:])
            if all(other[-length:] != own[-length:] for number, other in enumerate(parts) if number != index):
                break
        names[index] = name
    # Only the suffix tells `a.jsonl` from `a.parquet`.
    return [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]


def split_validation_sets(paths: Sequence[str], rows: Sequence[PromptRow], max_prompts: int) -> list[ValidationSet]:
    """Rows by the file they came from (the second part of their uid), at most `max_prompts` of each."""
    by_file: dict[int, list[PromptRow]] = {}
    for row in rows:
        by_file.setdefault(int(row.uid.split("/")[1]), []).append(row)
    return [
        ValidationSet(name, by_file[number][:max_prompts])
        for number, name in enumerate(name_validation_sets(paths))
        if number in by_file
    ]


def evaluate_sets(
    sets: Sequence[ValidationSet], samples: Sequence[ScoredSample], *, pass_reward: float
) -> dict[str, EvaluationMetrics]:
    """Metrics by the name of the set; `samples` may come in any order."""
    by_prompt: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.row.uid, []).append(sample)
    return {
        validation.name: _evaluate_set(
            [by_prompt[row.uid] for row in validation.rows if row.uid in by_prompt], pass_reward
        )
        for validation in sets
    }


def _evaluate_set(groups: list[list[ScoredSample]], pass_reward: float) -> EvaluationMetrics:
    samples = [sample for group in groups for sample in group]
    scored = [[sample for sample in group if sample.result.reward is not None] for group in groups]
    rewards = [sample.reward for group in scored for sample in group]
    has_votes = any(sample.result.prediction is not None for sample in samples)
    pass_at: dict[int, float] = {}
    best_at: dict[int, float] = {}
    majority_at: dict[int, float] = {}
    for k in list_k(max((len(group) for group in groups), default=0)):
        # A prompt with fewer samples has no say about k of them.
        large = [group for group in scored if len(group) >= k]
        if not large:
            continue
        pass_at[k] = _mean([pass_at_k(len(group), sum(s.reward >= pass_reward for s in group), k) for group in large])
        best_at[k] = _mean([best_at_k([s.reward for s in group], k) for group in large])
        if has_votes:
            majority_at[k] = _mean(
                [majority_at_k([s.result.prediction for s in group], [s.reward for s in group], k) for group in large]
            )
    return EvaluationMetrics(
        num_prompts=len(groups),
        num_samples=len(samples),
        num_excluded=len(samples) - len(rewards),
        reward_mean=_mean(rewards) if rewards else None,
        response_tokens_mean=_mean([len(sample.token_ids) for sample in samples]) if samples else 0.0,
        truncated_fraction=_mean([float(s.finish_reason is FinishReason.LENGTH) for s in samples]) if samples else 0.0,
        pass_at=pass_at,
        best_at=best_at,
        majority_at=majority_at,
    )


def list_k(num_samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    powers = [2**exponent for exponent in range(num_samples.bit_length()) if 2**exponent < num_samples]
    return [*powers, num_samples] if num_samples else []


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that a random subset of k of the samples holds one that passed: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1); resampling with replacement, or
    1-(1-c/n)^k, is biased low.

    Raises:
        ValueError: not 1 <= k <= num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples is undefined; k must be 1 to {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int, *, worst: bool = False) -> float:
    """Expected best (or worst) reward of a random subset of k samples, drawn without replacement.

    The i-th smallest of n rewards (i from 1) is the best of C(i-1, k-1) of the C(n, k) subsets.
    """
    ordered = sorted(rewards, reverse=worst)
    num_subsets = math.comb(len(ordered), k)
    return math.fsum(
        reward * (math.comb(index, k - 1) / num_subsets) for index, reward in enumerate(ordered) if index >= k - 1
    )


def majority_at_k(votes: Sequence[str | None], rewards: Sequence[float], k: int) -> float:
    """Mean over subsets of k samples, kept in order, of `compute_majority_rewards`."""
    return float(np.mean(compute_majority_rewards(votes, rewards, _list_subsets(len(votes), k))))


def compute_majority_rewards(
    votes: Sequence[str | None], rewards: Sequence[float], subsets_RK: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(R,): reward of the answer that most samples of each subset give, as of its first sample there; among equally
    frequent answers the one seen first wins.

    A response without an answer (None) votes only where nothing else does. Answers are compared as text.
    """
    numbers: dict[str | None, int] = {}
    ids_N = np.array([numbers.setdefault(vote, len(numbers)) for vote in votes])
    ids_RK = ids_N[subsets_RK]
    positions_K = np.arange(ids_RK.shape[1])
    best_count_R = np.full(len(ids_RK), -1.0)
    first_R = np.zeros(len(ids_RK), dtype=np.int64)
    for vote, number in numbers.items():
        is_vote_RK = ids_RK == number
        count_R = is_vote_RK.sum(axis=1).astype(np.float64)
        if vote is None:
            count_R = np.minimum(count_R, 0.5)  # fewer than any answer
        position_R = np.where(is_vote_RK, positions_K, len(positions_K)).min(axis=1)
        wins_R = (count_R > 0) & ((count_R > best_count_R) | ((count_R == best_count_R) & (position_R < first_R)))
        best_count_R = np.where(wins_R, count_R, best_count_R)
        first_R = np.where(wins_R, position_R, first_R)
    winners_R = subsets_RK[np.arange(len(ids_RK)), first_R]
    chosen_R: NDArray[np.float64] = np.asarray(rewards, dtype=np.float64)[winners_R]
    return chosen_R


def _list_subsets(num_samples: int, k: int) -> NDArray[np.int64]:
    """(R, K) indices, ascending in each row; the same ones in every run."""
    if math.comb(num_samples, k) <= MAX_SUBSETS:
        return np.array(list(itertools.combinations(range(num_samples), k)), dtype=np.int64)
    order_RN = np.random.default_rng([num_samples, k]).random((MAX_SUBSETS, num_samples)).argsort(axis=1)
    return np.sort(order_RN[:, :k], axis=1)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
