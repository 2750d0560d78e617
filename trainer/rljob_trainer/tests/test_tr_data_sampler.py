"""The sampler: epochs, resume at every position, and its errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.data import PromptSampler
from rljob_trainer.errors import CheckpointError, ConfigurationError


def take(sampler: PromptSampler, steps: int) -> list[list[int]]:
    return [sampler.next_batch() for _ in range(steps)]


def test_an_epoch_has_each_row_at_most_once_and_the_next_is_shuffled_anew():
    sampler = PromptSampler(10, 3, seed=1)
    assert (sampler.steps_per_epoch, sampler.num_unused_rows_per_epoch) == (3, 1)
    first, second = take(sampler, 3), take(sampler, 3)
    assert len({row for batch in first for row in batch}) == 9
    assert len({row for batch in second for row in batch}) == 9
    assert first != second


def test_left_out_rows_get_their_turn_in_other_epochs():
    sampler = PromptSampler(10, 3, seed=1)
    assert {row for batch in take(sampler, 30) for row in batch} == set(range(10))


@pytest.mark.parametrize("done", [1, 59, 60, 61, 119, 120])
def test_resume_at_and_around_an_epoch_boundary_continues(done):
    uninterrupted = take(PromptSampler(600, 10, seed=3), 130)
    before = PromptSampler(600, 10, seed=3)
    take(before, done)
    after = PromptSampler(600, 10, seed=3)
    after.load_state_dict(before.state_dict())
    assert after.epoch == before.epoch == done / 60
    assert take(after, 130 - done) == uninterrupted[done:]


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 40), size=st.integers(1, 40), done=st.integers(0, 50), seed=st.integers(0, 2**31 - 1))
def test_resume_repeats_the_uninterrupted_order(rows, size, done, seed):
    size = min(size, rows)
    expected = take(PromptSampler(rows, size, seed), done + 5)
    sampler = PromptSampler(rows, size, seed)
    take(sampler, done)
    resumed = PromptSampler(rows, size, seed)
    resumed.load_state_dict(sampler.state_dict())
    assert take(resumed, 5) == expected[done:]
    assert all(len(set(batch)) == size for batch in expected)


def test_epoch_counts_passes_exactly_although_rows_are_left_out():
    sampler = PromptSampler(10, 4, seed=0)
    epochs = []
    for _ in range(4):
        sampler.next_batch()
        epochs.append(sampler.epoch)
    assert epochs == [0.5, 1.0, 1.5, 2.0]


def test_too_few_rows_names_both_numbers():
    with pytest.raises(ConfigurationError, match=r"a step takes 64 prompts .* but only 63 usable"):
        PromptSampler(63, 64, seed=0)
    assert PromptSampler(64, 64, seed=0).steps_per_epoch == 1


def test_other_data_or_seed_is_refused():
    state = PromptSampler(100, 10, seed=1).state_dict()
    with pytest.raises(CheckpointError, match=r"spec.data.train.*100.*now it is 99"):
        PromptSampler(99, 10, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"shuffleSeed"):
        PromptSampler(100, 10, seed=2).load_state_dict(state)


def test_description_states_what_an_epoch_leaves_out():
    assert PromptSampler(7473, 1024, seed=0).describe() == (
        "7473 prompts, 1024 per step: 7 steps per epoch, 305 prompts (4.1 %) not used in each epoch"
    )
