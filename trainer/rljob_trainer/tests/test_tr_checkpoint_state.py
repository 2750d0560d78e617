"""What a load takes from a checkpoint, and what stays the job's."""

import pytest
import torch
from torch import nn

from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.checkpoint.state import StatePart, StateWriter, load_state
from rljob_trainer.optimization import build_optimizer

NAMES = ("policy", "critic")
SAVED = Training(weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, learning_rate=1e-3)
CHANGED = Training(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, learning_rate=2e-3)
SETTINGS = ("weight_decay", "betas", "lr", "fused", "eps")

pytestmark = pytest.mark.usefixtures("one_rank")


def build(training, seed=0):
    torch.manual_seed(seed)
    parts = {}
    for name in NAMES:
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        parts[name] = StatePart(module, build_optimizer(module, training))
    return parts


def take_step(parts):
    for part in parts.values():
        part.module(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        part.optimizer.step()
        part.optimizer.zero_grad()


def save(parts, directory):
    writer = StateWriter(use_gpu=False)
    writer.start(directory, parts)
    writer.finish()
    writer.close()


def list_moments(part):
    return [value for state in part.optimizer.state.values() for _, value in sorted(state.items())]


def list_weights(parts):
    return [parameter.detach() for part in parts.values() for parameter in part.module.parameters()]


def test_hyperparameters_are_those_of_the_job_that_resumes(tmp_path):
    saved = build(SAVED)
    take_step(saved)
    take_step(saved)
    save(saved, tmp_path)
    resumed = build(CHANGED, seed=1)
    expected = {
        name: [{key: g[key] for key in SETTINGS} for g in resumed[name].optimizer.param_groups] for name in NAMES
    }
    load_state(tmp_path, resumed)
    for name in NAMES:
        groups = resumed[name].optimizer.param_groups
        assert [{key: group[key] for key in SETTINGS} for group in groups] == expected[name], name
        torch.testing.assert_close(list_moments(resumed[name]), list_moments(saved[name]), rtol=0, atol=0)
        assert {float(state["step"]) for state in resumed[name].optimizer.state.values()} == {2.0}
    torch.testing.assert_close(list_weights(resumed), list_weights(saved), rtol=0, atol=0)
    # The next step is that of an optimizer that had the new settings and the saved moments.
    for part in saved.values():
        for group in part.optimizer.param_groups:
            group.update(weight_decay=0.1, betas=(0.8, 0.95), lr=2e-3)
    take_step(saved)
    take_step(resumed)
    torch.testing.assert_close(list_weights(resumed), list_weights(saved), rtol=0, atol=0)


def test_a_save_before_the_first_update_does_not_change_the_updates(tmp_path):
    """Of a policy in its critic's warm-up, or of a run that is stopped in its first rollout."""
    plain, saved, resumed = build(SAVED), build(SAVED), build(SAVED, seed=1)
    save(saved, tmp_path)
    load_state(tmp_path, resumed)
    for parts in (plain, saved, resumed):
        take_step(parts)
        take_step(parts)
    torch.testing.assert_close(list_weights(saved), list_weights(plain), rtol=0, atol=0)
    torch.testing.assert_close(list_weights(resumed), list_weights(plain), rtol=0, atol=0)
