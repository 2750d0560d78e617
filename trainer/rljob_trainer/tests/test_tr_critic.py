"""The critic: loading, values on packs, its update, advantages from it, and ReMax's greedy baseline."""

import copy
import math

import numpy as np
import pytest
import torch
from tr_tiny import assert_same_gradient, make_rows, save_tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from rljob_api.presets import resolve_algorithm
from rljob_api.v1alpha1.algorithm import KL, Algorithm
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.critic import uses_critic
from rljob_trainer.data import PromptRow
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.experience import build_rows, compute_explained_variance, fill_advantages
from rljob_trainer.models.packed_batch import pack_sequences
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.value import load_value_model
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rewards import ScoreResult
from rljob_trainer.rollout import ScoredSample
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.update import Ranks
from rljob_trainer.value_update import apply_value_update, compute_row_values

CPU = torch.device("cpu")
ONE_RANK = Ranks(1, lambda values: values, lambda values: values)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A sequence classifier with one label and a head that is not zero."""
    directory = tmp_path_factory.mktemp("classifier") / "model"
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(save_tiny_model(directory / "causal"), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def critic(reward_model):
    """A critic whose values are not zero."""
    return load_value_model(reward_model)


def values_of(critic, rows):
    return compute_row_values(critic, [rows], device=CPU, on_micro_batch=lambda: None)[0]


def with_returns(rows, seed=5):
    rng = np.random.default_rng(seed)
    for row in rows:
        size = len(row.response_ids)
        row.values = rng.standard_normal(size).astype(np.float32)
        row.returns = rng.standard_normal(size).astype(np.float32)
    return rows


def run(critic, rows, *, learning_rate=0.0, value_clip=0.5, gradient_clip=1e9, optimizer=None, **limits):
    optimizer = optimizer or build_optimizer(critic, Training())
    gradients = {}

    def keep(*_):
        gradients.update({name: parameter.grad.clone() for name, parameter in critic.named_parameters()})

    handle = optimizer.register_step_pre_hook(keep)
    plan = plan_batches([row.num_tokens for row in rows], 1, **(limits or {"micro_batch_tokens": 10_000}))
    batch = MiniBatch(split_rows(rows, plan)[0], *count_trainable(rows), learning_rate)
    metrics = apply_value_update(
        critic,
        optimizer,
        batch,
        value_clip=value_clip,
        gradient_clip=gradient_clip,
        ranks=ONE_RANK,
        device=CPU,
        on_micro_batch=lambda: None,
    )
    handle.remove()
    return metrics, gradients


def test_a_new_head_values_everything_at_zero(tiny_model):
    critic = load_value_model(tiny_model)
    assert all(not array.any() for array in values_of(critic, make_rows(4)))
    names = {name.removeprefix("classifier.") for name, _ in critic.named_parameters()}
    assert {"score.weight", "score.bias"} < names
    assert not any("lm_head" in name for name in names)


def test_a_value_is_read_where_the_policy_predicts_the_token(critic, reward_model):
    """V_t comes from the state before token t, and does not depend on what else is in the pack."""
    rows = make_rows(5)
    plain = AutoModelForTokenClassification.from_pretrained(reward_model, num_labels=1).eval()
    with torch.no_grad():
        plain.score.bias.zero_()  # a sequence classifier has none
        for row, values in zip(rows, values_of(critic, rows), strict=True):
            logits = plain(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0, :, 0]
            expected = logits[len(row.prompt_ids) - 1 : -1]
            np.testing.assert_allclose(values, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_head_of_a_reward_model_is_kept(critic):
    assert critic.classifier.score.weight.abs().sum() > 0
    assert critic.classifier.score.bias == 0.0


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path / "causal"), num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigurationError, match=r"spec\.critic\.source: .* has 2 labels"):
        load_value_model(str(tmp_path / "two"))


def test_the_policy_after_the_warm_start_gives_the_backbone(critic, tmp_path):
    critic = copy.deepcopy(critic)
    policy = PolicyModel(load_causal_lm(str(save_tiny_model(tmp_path / "model", initializer_range=0.05))))
    head = critic.classifier.score.weight.clone()
    critic.copy_backbone(policy)
    origin = dict(policy.causal_lm.base_model.named_parameters())
    for name, parameter in critic.classifier.base_model.named_parameters():
        assert torch.equal(parameter, origin[name]), name
    assert torch.equal(critic.classifier.score.weight, head)
    wider = PolicyModel(load_causal_lm(str(save_tiny_model(tmp_path / "deep", num_hidden_layers=3))))
    with pytest.raises(ConfigurationError, match=r"spec\.critic\.source"):
        critic.copy_backbone(wider)


def test_the_gradient_does_not_depend_on_micro_batches(critic):
    rows = with_returns(make_rows())
    whole, expected = run(critic, rows)
    for limits in ({"micro_batch_sequences": 1}, {"micro_batch_sequences": 5}, {"micro_batch_tokens": 16}):
        metrics, gradients = run(critic, rows, **limits)
        assert metrics.loss == pytest.approx(whole.loss, rel=1e-5)
        assert metrics.clip_fraction == whole.clip_fraction
        assert metrics.value_mean == pytest.approx(whole.value_mean, rel=1e-4)
        assert_same_gradient(gradients, expected)


def test_loss_and_gradient_are_those_of_the_formula(critic):
    """Half the mean of the larger of two squared errors, written out for one unpadded sequence at a time."""
    rows = with_returns(make_rows(6))
    total, count, outside = torch.zeros(()), 0, 0
    for row in rows:
        if not row.trainable:
            continue
        values = critic(pack_sequences([row.prompt_ids], [row.response_ids], CPU))
        old, returns = torch.from_numpy(row.values), torch.from_numpy(row.returns)
        clipped = old + (values - old).clamp(-0.5, 0.5)
        total = total + 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum()
        outside += int(((values - old).abs() > 0.5).sum())
        count += len(row.response_ids)
    critic.zero_grad()
    (total / count).backward()
    expected = {name: parameter.grad.clone() for name, parameter in critic.named_parameters()}
    metrics, gradients = run(critic, rows)
    assert metrics.loss == pytest.approx(float(total) / count, rel=1e-5)
    assert metrics.num_tokens == count
    assert 0 < metrics.clip_fraction < 1
    assert metrics.clip_fraction == pytest.approx(outside / count)
    assert_same_gradient(gradients, expected)


def test_rows_outside_the_loss_change_nothing(critic):
    rows = with_returns(make_rows(8))
    extra = with_returns(make_rows(3, seed=9))
    for row in extra:
        row.trainable = False
        row.returns = np.full_like(row.returns, np.nan)
    whole, expected = run(critic, rows)
    metrics, gradients = run(critic, [*rows, *extra])
    assert metrics.loss == pytest.approx(whole.loss, rel=1e-5)
    assert_same_gradient(gradients, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_updates_are_skipped(critic, poison):
    before = copy.deepcopy(critic.state_dict())
    rows = with_returns(make_rows(6))
    rows[2].returns = np.full_like(rows[2].returns, poison)
    metrics, gradients = run(critic, rows, learning_rate=1.0, micro_batch_sequences=2)
    assert not metrics.is_finite
    assert not gradients
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.state_dict().items())


def test_updates_move_the_values_to_the_returns(tiny_model):
    """From a zero head; the explained variance is about 0 before and nearly 1 after."""
    critic = load_value_model(tiny_model)
    rows = with_returns(make_rows(8))
    for row in rows:
        row.trainable = True
        row.returns = np.asarray(row.response_ids, dtype=np.float32) / 20  # not known to a constant
    optimizer = build_optimizer(critic, Training())
    for row, values in zip(rows, values_of(critic, rows), strict=True):
        row.values = values
    assert compute_explained_variance(rows) == pytest.approx(0.0)
    for _ in range(60):
        run(critic, rows, learning_rate=1e-2, value_clip=100.0, gradient_clip=1.0, optimizer=optimizer)
    for row, values in zip(rows, values_of(critic, rows), strict=True):
        row.values = values
    assert compute_explained_variance(rows) > 0.9


def test_explained_variance_of_known_cases():
    rows = with_returns(make_rows(4))
    for row in rows:
        row.trainable = True
        row.values = row.returns.copy()
    assert compute_explained_variance(rows) == pytest.approx(1.0)
    for row in rows:
        row.values = row.returns + 3  # an offset is no error of the explanation
    assert compute_explained_variance(rows) == pytest.approx(1.0, abs=1e-5)
    for row in rows:
        row.values = -row.returns
    assert compute_explained_variance(rows) == pytest.approx(-3.0)
    for row in rows:
        row.returns = np.ones_like(row.returns)
    assert compute_explained_variance(rows) is None


def make_samples(rewards, lengths, uids=None):
    rng = np.random.default_rng(1)
    samples = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        uid = uids[index] if uids else f"train/0/{index}"
        samples.append(
            ScoredSample(
                row=PromptRow(uid, [3, 4], "", "0"),
                index=0,
                token_ids=rng.integers(3, 40, size=length).tolist(),
                log_probs=np.zeros(length, dtype=np.float32),
                finish_reason=FinishReason.STOP,
                weight_version=1,
                text="",
                result=ScoreResult(f"{uid}#0", reward),
            )
        )
    return samples


PPO = resolve_algorithm(Algorithm(type="PPO", gae_lambda=0.95))
REMAX = resolve_algorithm(Algorithm(type="ReMax"))


def test_only_gae_uses_a_critic():
    assert uses_critic(PPO)
    assert not uses_critic(resolve_algorithm(Algorithm(type="PPO", advantage_estimator="GRPO")))
    assert not uses_critic(REMAX)


def test_advantages_are_whitened_over_the_batch_and_returns_are_not():
    samples = make_samples([1.0, 0.0, None], [2, 3, 2])
    rows = build_rows(samples, PPO)
    for row, values in zip(rows, ([0.3, 0.5], [0.1, 0.2, 0.4], [9.0, 9.0]), strict=True):
        row.values = np.array(values, dtype=np.float32)
    fill_advantages(rows, samples, PPO)
    # By hand: delta = [0.2, 0.5] and [0.1, 0.2, -0.4].
    expected = [[0.2 + 0.95 * 0.5, 0.5], [0.1 + 0.95 * (0.2 - 0.95 * 0.4), 0.2 - 0.95 * 0.4, -0.4]]
    for row, advantages in zip(rows, expected, strict=False):
        np.testing.assert_allclose(row.returns, np.array(advantages) + row.values, rtol=1e-5, atol=1e-7)
    flat = np.concatenate([np.array(advantages) for advantages in expected])
    whitened = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate([rows[0].advantages, rows[1].advantages]), whitened, rtol=1e-5)
    # No reward, no part in anything.
    assert not rows[2].trainable
    assert not rows[2].advantages.any()
    assert not rows[2].returns.any()


def test_a_kl_penalty_in_the_reward_reaches_the_returns():
    algorithm = PPO.model_copy(update={"gae_lambda": 1.0, "kl": KL(placement="Reward", estimator="K1")})
    samples = make_samples([1.0], [3])
    rows = build_rows(samples, algorithm)
    rows[0].values = np.zeros(3, dtype=np.float32)
    rows[0].reference_log_probs = np.array([-1.0, -1.0, -1.0], dtype=np.float32)
    policy = [np.array([-0.5, -1.0, -2.0], dtype=np.float32)]
    fill_advantages(rows, samples, algorithm, kl_coefficient=0.1, policy_log_probs=policy)
    np.testing.assert_allclose(rows[0].returns, [1 - 0.05 - 0 + 0.1, 1 + 0.1, 1 + 0.1], rtol=1e-5)


def test_remax_subtracts_the_greedy_reward_of_the_same_prompt():
    samples = make_samples([1.0, 0.0, 1.0], [2, 3, 1], uids=["a", "b", "a"])
    rows = build_rows(samples, REMAX)
    fill_advantages(rows, samples, REMAX, greedy_rewards={"a": 0.25, "b": 0.5})
    assert [row.advantages.tolist() for row in rows] == [[0.75, 0.75], [-0.5, -0.5, -0.5], [0.75]]


def test_without_a_greedy_reward_a_prompt_has_no_baseline_and_is_left_out():
    samples = make_samples([1.0, 0.0], [2, 2], uids=["a", "b"])
    rows = build_rows(samples, REMAX)
    fill_advantages(rows, samples, REMAX, greedy_rewards={"a": math.nan, "b": 0.5})
    assert [row.trainable for row in rows] == [False, True]
    assert not rows[0].advantages.any()
    assert rows[1].advantages.tolist() == [-0.5, -0.5]
