"""Rows to ranks and micro-batches, learning rates, mini-batch order."""

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.rollout import Schedule
from rljob_trainer.batching import balance_rows, order_mini_batches, plan_batches
from rljob_trainer.optimization import compute_learning_rate
from rljob_trainer.warm_start import compute_warm_start_rate

lengths_strategy = st.lists(st.integers(1, 500), max_size=80)


@settings(deadline=None)
@given(lengths_strategy, st.integers(1, 9), st.integers(1, 600))
def test_every_row_is_planned_once_within_the_budget(lengths, num_ranks, budget):
    plan = plan_batches(lengths, num_ranks, micro_batch_tokens=budget)
    flat = [row for rank in plan.rows for micro in rank for row in micro]
    assert sorted(flat) == list(range(len(lengths)))
    assert len(plan.rows) == num_ranks
    assert {len(rank) for rank in plan.rows} == {plan.num_micro_batches}
    for rank in plan.rows:
        for micro in rank:
            assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


@settings(deadline=None)
@given(lengths_strategy, st.integers(1, 9), st.integers(1, 20))
def test_every_row_is_planned_once_within_the_count(lengths, num_ranks, count):
    plan = plan_batches(lengths, num_ranks, micro_batch_sequences=count)
    flat = [row for rank in plan.rows for micro in rank for row in micro]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(len(micro) <= count for rank in plan.rows for micro in rank)


def test_124_rows_over_15_ranks_leave_no_rank_empty():
    """torch.chunk would make 14 chunks of 9 and starve the last rank (verl 3933)."""
    sizes = sorted((len(rows) for rows in balance_rows([10] * 124, 15)), reverse=True)
    assert sizes == [9] * 4 + [8] * 11


def test_fewer_rows_than_ranks_gives_empty_micro_batches():
    plan = plan_batches([5, 7], 4, micro_batch_tokens=100)
    assert plan.num_micro_batches == 1
    assert sorted(len(rank[0]) for rank in plan.rows) == [0, 0, 1, 1]


def test_no_rows_still_gives_one_micro_batch_per_rank():
    assert plan_batches([], 3, micro_batch_tokens=10).rows == [[[]], [[]], [[]]]


def test_rows_are_balanced_by_tokens_not_by_count():
    bins = balance_rows([1000, 10, 10, 10, 10, 960], 2)
    loads = sorted(sum([1000, 10, 10, 10, 10, 960][row] for row in rows) for rows in bins)
    assert loads == [1000, 1000]


@pytest.mark.parametrize("limits", [{}, {"micro_batch_tokens": 8, "micro_batch_sequences": 2}])
def test_exactly_one_limit(limits):
    with pytest.raises(ValueError, match="exactly one"):
        plan_batches([1], 1, **limits)


def test_mini_batches_keep_groups_whole_and_shuffle_later_passes():
    order = order_mini_batches(6, 2, 2, seed=[42, 3])
    assert order[:3] == [[0, 1], [2, 3], [4, 5]]
    assert sorted(index for prompts in order[3:] for index in prompts) == list(range(6))
    assert order[3:] != order[:3]
    assert order == order_mini_batches(6, 2, 2, seed=[42, 3])
    assert order != order_mini_batches(6, 2, 2, seed=[42, 4])


def test_learning_rate_continues_after_a_resume():
    """Linear over 100 steps from 1e-6 is 4.9e-7 at step 51; a restarted schedule would give 9.9e-7."""
    arguments = {"peak": 1e-6, "schedule": Schedule.LINEAR, "warmup_steps": 0, "total_steps": 100}
    assert compute_learning_rate(51, **arguments) == pytest.approx(4.9e-7, rel=1e-12)
    assert compute_learning_rate(1, **arguments) == pytest.approx(9.9e-7, rel=1e-12)
    assert compute_learning_rate(100, **arguments) == 0.0


def test_learning_rate_warms_up_to_the_peak():
    rates = [
        compute_learning_rate(step, peak=1e-3, schedule=Schedule.COSINE, warmup_steps=4, total_steps=20)
        for step in range(1, 21)
    ]
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(0.0, abs=1e-18)


def test_constant_schedule_matches_golden_vectors():
    directory = Path(os.environ.get("RLJOB_SHARED_DIR", Path(__file__).parents[4] / "shared"))
    path = directory / "numerics" / "schedules.json"
    if not path.exists():
        pytest.skip(f"golden vectors not found at {path}; set RLJOB_SHARED_DIR")
    cases = [case for case in json.loads(path.read_text())["cases"] if case["kind"] == "constant"]
    assert cases
    for case in cases:
        rates = [
            compute_learning_rate(
                step,
                peak=case["options"]["base_lr"],
                schedule=Schedule.CONSTANT,
                warmup_steps=case["options"]["warmup_steps"],
                total_steps=1000,
            )
            for step in case["inputs"]["steps"]
        ]
        assert rates == pytest.approx(case["expected"]["lr"], rel=1e-9, abs=1e-15), case["name"]


def test_warm_start_rate_falls_over_the_last_part_only():
    rates = [compute_warm_start_rate(step, 1e-3, 10) for step in range(1, 11)]
    assert rates[:8] == [1e-3] * 8
    assert rates[8] == pytest.approx(2 / 3 * 1e-3)
    assert rates[9] == pytest.approx(1 / 3 * 1e-3)
