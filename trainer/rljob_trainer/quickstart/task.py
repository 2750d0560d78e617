"""The quickstart's task: sums of reasoning-gym's chain_sum, and demonstrations by a teacher who is often off by one.

The warm start on those demonstrations teaches the model to add, and to say the wrong number most of the time: imitation
cannot do better than the teacher. Reinforcement learning with a checked answer can.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

NUM_PROBLEMS: Final = 800
"""Distinct problems; chain_sum has 900 with two summands from 10 to 39."""
NUM_VALIDATION_PROBLEMS: Final = 128
MIN_SUMMAND: Final = 10
MAX_SUMMAND: Final = 39
CORRECT_SHARE: Final = 0.2
"""Share of demonstrations with the right sum; the others say one more."""
DEMONSTRATIONS_PER_PROBLEM: Final = 25
_DRAWS_PER_REQUEST: Final = 10_000
_MAX_DRAWS: Final = 500_000


@dataclass(frozen=True)
class Problem:
    """One addition."""

    question: str
    """`12 + 30 =`."""
    answer: str
    """`42`."""


@dataclass(frozen=True)
class Demonstration:
    """A question with the teacher's response."""

    question: str
    response: str


def draw_problems(seed: int, num_problems: int = NUM_PROBLEMS) -> list[Problem]:
    """Distinct problems from reasoning-gym, in an order that depends on the seed only.

    Raises:
        ValueError: more problems than the range of summands has.
    """
    import reasoning_gym

    problems: dict[str, Problem] = {}
    for start in range(0, _MAX_DRAWS, _DRAWS_PER_REQUEST):
        dataset = reasoning_gym.create_dataset(
            "chain_sum",
            min_terms=2,
            max_terms=2,
            min_digits=2,
            max_digits=2,
            # Entry i is drawn from the seed plus i, so the next batch starts where this one ended.
            seed=seed * _MAX_DRAWS + start,
            size=_DRAWS_PER_REQUEST,
        )
        for entry in dataset:
            expression = entry["metadata"]["expression"]
            left, operator, right = expression.split()
            if operator == "+" and all(MIN_SUMMAND <= int(term) <= MAX_SUMMAND for term in (left, right)):
                problems.setdefault(expression, Problem(f"{expression} =", entry["answer"]))
                if len(problems) == num_problems:
                    return list(problems.values())
    raise ValueError(f"{num_problems} distinct problems wanted, {len(problems)} found in {_MAX_DRAWS} draws")


def split_problems(
    problems: list[Problem], num_validation: int = NUM_VALIDATION_PROBLEMS
) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems; disjoint, since all are distinct."""
    return problems[num_validation:], problems[:num_validation]


def demonstrate(problems: list[Problem], seed: int) -> list[Demonstration]:
    """Demonstrations of the given problems by the careless teacher, shuffled."""
    rng = random.Random(seed)
    demonstrations = [
        Demonstration(
            problem.question,
            problem.answer if rng.random() < CORRECT_SHARE else str(int(problem.answer) + 1),
        )
        for problem in problems
        for _ in range(DEMONSTRATIONS_PER_PROBLEM)
    ]
    rng.shuffle(demonstrations)
    return demonstrations
