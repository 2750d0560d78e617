"""Rows to ranks and back, also where several ranks share rows (sequence parallel)."""

from types import SimpleNamespace

import numpy as np
import pytest
from tr_tiny import make_rows

from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.rows import count_trainable

NUM_RANKS = 4


class Ranks:
    """Answers for each row with its own number; remembers what each rank was given."""

    def __init__(self):
        self.given = []

    def call_ranks(self, method, arguments, **_):
        self.given = [argument for (argument,) in arguments]
        assert len(self.given) == NUM_RANKS
        if method == "update":
            return [SimpleNamespace(rank=rank) for rank in range(NUM_RANKS)]
        return [
            [[np.full(len(row.response_ids), row.number, np.float32) for row in micro] for micro in micro_batches]
            for micro_batches in self.given
        ]


@pytest.fixture
def rows():
    rows = make_rows(11)
    for number, row in enumerate(rows):
        row.number = number
    return rows


def build(make_job, size, budget=40):
    job = make_job(
        run_directory="x", ranks=NUM_RANKS, training={"sequence_parallel_size": size, "micro_batch_tokens": budget}
    )
    ranks = Ranks()
    return Dispatcher(job, ranks, lambda: None), ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_comes_back_in_its_place(make_job, rows, size):
    dispatcher, ranks = build(make_job, size)
    values = dispatcher.compute_log_probs(rows, reference=False)
    assert [set(value.tolist()) for value in values] == [{float(row.number)} for row in rows]
    assert [len(value) for value in values] == [len(row.response_ids) for row in rows]
    # Neighbouring ranks share rows; the shares are distinct and complete.
    numbers = [sorted(row.number for micro in share for row in micro) for share in ranks.given]
    shares = numbers[::size]
    assert numbers == [share for share in shares for _ in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(len(rows)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_token_budget_of_a_pack_grows_with_the_ranks_that_share_it(make_job, rows, size):
    dispatcher, ranks = build(make_job, size)
    dispatcher.compute_log_probs(rows, reference=True)
    packs = [sum(row.num_tokens for row in micro) for share in ranks.given for micro in share]
    assert max(packs) <= 40 * size
    assert size == 1 or max(packs) > 40


def test_an_update_carries_the_counts_of_the_whole_mini_batch_to_every_rank(make_job, rows):
    dispatcher, ranks = build(make_job, 2)
    assert dispatcher.update(rows, learning_rate=1e-3).rank == 0
    counts = {(batch.num_tokens_global, batch.num_sequences_global) for batch in ranks.given}
    assert counts == {count_trainable(rows)}
    assert ranks.given[0].micro_batches == ranks.given[1].micro_batches != ranks.given[2].micro_batches
