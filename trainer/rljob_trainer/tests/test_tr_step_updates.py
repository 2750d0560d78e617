"""The updates of a step: order, warm-up, and what happens when they are not finite."""

from types import SimpleNamespace

import numpy as np
import pytest
from tr_job import build_job

from rljob_trainer.errors import NumericalError
from rljob_trainer.rows import TrainRow
from rljob_trainer.run_state import RunState
from rljob_trainer.step_updates import Updater

NUM_PROMPTS, NUM_SAMPLES = 4, 2


class Ranks:
    """A dispatcher whose updates are finite or not, as told."""

    def __init__(self, *, policy: bool = True, critic: bool = True) -> None:
        self.is_finite = {"policy": policy, "critic": critic}
        self.calls: list[tuple[str, tuple[int, ...], float]] = []

    def update(self, rows, *, learning_rate, kl_coefficient):
        return self.note("policy", rows, learning_rate)

    def update_critic(self, rows, *, learning_rate):
        return self.note("critic", rows, learning_rate)

    def note(self, model, rows, learning_rate):
        self.calls.append((model, tuple(row.prompt_ids[0] for row in rows), learning_rate))
        loss = 0.5 if self.is_finite[model] else float("nan")
        return SimpleNamespace(is_finite=self.is_finite[model], loss=loss, gradient_norm=loss, entropy=loss, kl=loss)


def make_rows() -> list[TrainRow]:
    zeros = np.zeros(2, dtype=np.float32)
    return [
        TrainRow([prompt], [1, 2], advantages=zeros, rollout_log_probs=zeros, values=zeros)
        for prompt in range(NUM_PROMPTS)
        for _ in range(NUM_SAMPLES)
    ]


def make_updater(ranks: Ranks, notes: list[str], *, algorithm: str = "PPO", **sections) -> Updater:
    critic = {"critic": {"learning_rate": 1e-4, "warmup_steps": 1}} if algorithm == "PPO" else {}
    training = {"prompts_per_step": NUM_PROMPTS, "max_nan_steps": 2, "learning_rate": 1e-3, "total_steps": 10}
    job = build_job(
        run_directory="runs/none",
        algorithm={"type": algorithm},
        rollout={"samples_per_prompt": NUM_SAMPLES},
        training=training | sections.pop("training", {}),
        spec=critic,
    )
    maker = SimpleNamespace(select_tokens=lambda rows, seed: None)
    return Updater(job, ranks, maker, total_steps=10, note=notes.append)


def test_only_the_critic_learns_in_its_warm_up():
    ranks = Ranks()
    updater = make_updater(ranks, [])
    assert updater.run(make_rows(), 1, RunState()).policy == []
    assert [model for model, *_ in ranks.calls] == ["critic"]
    updates = updater.run(make_rows(), 2, RunState())
    assert [model for model, *_ in ranks.calls] == ["critic", "critic", "policy"]
    assert len(updates.policy) == 1
    assert updates.critic is not None
    assert (updates.learning_rate, updates.critic.learning_rate) == (1e-3, 1e-4)


def test_groups_stay_whole_in_mini_batches():
    ranks = Ranks()
    updater = make_updater(ranks, [], algorithm="GRPO", training={"mini_batch_prompts": 2, "epochs_per_step": 2})
    assert len(updater.run(make_rows(), 1, RunState()).policy) == 4
    batches = [prompts for _, prompts, _ in ranks.calls]
    assert batches[:2] == [(0, 0, 1, 1), (2, 2, 3, 3)]
    assert sorted(batches[2] + batches[3]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(batch[0] == batch[1] and batch[2] == batch[3] for batch in batches)


def test_a_healthy_critic_does_not_hide_a_policy_without_updates():
    notes: list[str] = []
    updater, state = make_updater(Ranks(policy=False), notes), RunState()
    updater.run(make_rows(), 2, state)
    with pytest.raises(NumericalError, match=r"2 consecutive updates.*spec.training.learningRate \(now 0.001\)"):
        updater.run(make_rows(), 3, state)
    assert state.num_nan_steps == 2
    assert "1 in a row, limit 2" in notes[0]


def test_a_broken_critic_is_named():
    updater, state = make_updater(Ranks(critic=False), []), RunState()
    updater.run(make_rows(), 2, state)
    with pytest.raises(NumericalError, match=r"critic: loss nan.*spec.critic.learningRate \(now 0.0001\)"):
        updater.run(make_rows(), 3, state)


def test_one_finite_update_starts_the_count_again():
    ranks = Ranks(policy=False)
    updater, state = make_updater(ranks, [], algorithm="GRPO"), RunState()
    for step, is_finite in enumerate([False, True, False, True], start=1):
        ranks.is_finite["policy"] = is_finite
        updater.run(make_rows(), step, state)
    assert (state.num_nan_steps, state.num_nan_steps_in_a_row) == (2, 0)
