"""One update in one process: independence of micro-batches, ratio 1, skipped updates."""

import copy
import math

import numpy as np
import pytest
import torch
from tr_tiny import assert_same_gradient, make_loss, make_rows

from rljob_api.v1alpha1.algorithm import KLEstimator, LossAggregation, PolicyLoss
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.update import Ranks, apply_update, compute_row_log_probs

CPU = torch.device("cpu")
ONE_RANK = Ranks(1, lambda values: values, lambda values: values)


@pytest.fixture(scope="module")
def pristine(tiny_model):
    return PolicyModel(load_causal_lm(tiny_model))


def run(policy, rows, loss, *, learning_rate=0.0, clip=1e9, supervised=False, **limits):
    """Metrics and gradients of one update (SGD-free: gradients are read through a hook before the step)."""
    limits = limits or {"micro_batch_tokens": 10_000}
    optimizer = build_optimizer(policy, Training(weight_decay=0.1))
    gradients = {}

    def keep(*_):
        gradients.update({name: parameter.grad.clone() for name, parameter in policy.named_parameters()})

    optimizer.register_step_pre_hook(keep)
    plan = plan_batches([row.num_tokens for row in rows], 1, **limits)
    num_tokens, num_sequences = count_trainable(rows)
    batch = MiniBatch(
        split_rows(rows, plan)[0],
        num_tokens,
        num_sequences,
        learning_rate,
        kl_coefficient=0.1,
        is_supervised=supervised,
    )
    metrics = apply_update(
        policy, optimizer, batch, loss, gradient_clip=clip, ranks=ONE_RANK, device=CPU, on_micro_batch=lambda: None
    )
    return metrics, gradients


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("policy_loss", [PolicyLoss.PPO_CLIP, PolicyLoss.GSPO, PolicyLoss.CISPO])
def test_gradient_does_not_depend_on_micro_batches(pristine, aggregation, policy_loss):
    rows = make_rows(reference=True)
    loss = make_loss(
        aggregation=aggregation,
        policy_loss=policy_loss,
        entropy_coefficient=0.01,
        loss_kl_estimator=KLEstimator.K3,
    )
    whole, expected = run(pristine, rows, loss)
    for limits in ({"micro_batch_sequences": 1}, {"micro_batch_sequences": 5}, {"micro_batch_tokens": 16}):
        metrics, gradients = run(pristine, rows, loss, **limits)
        assert metrics.loss == pytest.approx(whole.loss, rel=1e-5)
        assert metrics.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-5)
        assert_same_gradient(gradients, expected)


def test_the_first_update_has_ratio_exactly_one(pristine):
    metrics, _ = run(pristine, make_rows(old=False), make_loss(options=make_loss().options.__class__()))
    assert metrics.ratio_max_deviation == 0.0
    assert metrics.clip_fraction == 0.0


def test_recomputed_old_log_probs_give_ratio_one(pristine):
    rows = make_rows()
    values = compute_row_log_probs(
        pristine, [rows[:5], [], rows[5:]], temperature=0.8, device=CPU, on_micro_batch=lambda: None
    )
    assert [len(group) for group in values] == [5, 0, 7]
    for row, log_probs in zip(rows, [value for group in values for value in group], strict=True):
        assert log_probs.shape == (len(row.response_ids),)
        row.old_log_probs = log_probs
    metrics, _ = run(pristine, rows, make_loss(), micro_batch_sequences=2)
    assert metrics.ratio_max_deviation < 1e-5


def test_a_positive_advantage_raises_the_probability(pristine):
    policy = copy.deepcopy(pristine)
    rows = make_rows(4, old=False)
    for row in rows:
        row.advantages = np.ones_like(row.advantages)
        row.trainable = True

    def mean_log_prob():
        values = compute_row_log_probs(policy, [rows], temperature=0.8, device=CPU, on_micro_batch=lambda: None)
        return float(np.mean(np.concatenate(values[0])))

    before = mean_log_prob()
    run(policy, rows, make_loss(), learning_rate=1e-3)
    assert mean_log_prob() > before


def test_rows_outside_the_loss_change_nothing(pristine):
    """Numerator and denominator alike (TRL 3476)."""
    rows = make_rows(8)
    for row in rows:
        row.trainable = True
    extra = make_rows(3, seed=9)
    for row in extra:
        row.trainable = False
        row.advantages = np.full_like(row.advantages, np.nan)
    whole, expected = run(pristine, rows, make_loss())
    metrics, gradients = run(pristine, [*rows, *extra], make_loss())
    assert metrics.loss == pytest.approx(whole.loss, rel=1e-5)
    assert_same_gradient(gradients, expected)


def test_nothing_trainable_leaves_the_weights_alone(pristine):
    policy = copy.deepcopy(pristine)
    rows = make_rows(4)
    for row in rows:
        row.trainable = False
    metrics, gradients = run(policy, rows, make_loss(), learning_rate=1.0)
    assert metrics.loss == 0.0
    assert metrics.is_finite
    assert metrics.num_tokens == 0
    assert not gradients  # no optimizer step: weight decay and momentum would move the weights
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, dict(pristine.named_parameters())[name])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_updates_are_skipped(pristine, poison):
    policy = copy.deepcopy(pristine)
    rows = make_rows(6)
    rows[2].advantages = np.full_like(rows[2].advantages, poison)
    metrics, gradients = run(policy, rows, make_loss(), learning_rate=1.0, micro_batch_sequences=2)
    assert not metrics.is_finite
    assert not gradients
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, dict(pristine.named_parameters())[name])


def test_responses_without_tokens_are_harmless(pristine):
    rows = make_rows(5)
    rows[0].response_ids = []
    for name in ("advantages", "rollout_log_probs", "old_log_probs"):
        setattr(rows[0], name, np.zeros(0, dtype=np.float32))
    metrics, _ = run(pristine, rows, make_loss(), micro_batch_sequences=1)
    assert metrics.is_finite
    assert metrics.num_tokens == sum(len(row.response_ids) for row in rows if row.trainable)


def test_supervised_loss_is_the_mean_negative_log_likelihood(pristine):
    rows = make_rows(6)
    for row in rows:
        row.trainable = True
    metrics, _ = run(pristine, rows, make_loss(), supervised=True)
    values = compute_row_log_probs(pristine, [rows], temperature=1.0, device=CPU, on_micro_batch=lambda: None)
    assert metrics.loss == pytest.approx(-float(np.mean(np.concatenate(values[0]))), rel=1e-5)


def test_clipping_scales_the_update_but_reports_the_norm(pristine):
    free, _ = run(pristine, make_rows(), make_loss())
    clipped, gradients = run(pristine, make_rows(), make_loss(), clip=free.gradient_norm / 2)
    assert clipped.gradient_norm == pytest.approx(free.gradient_norm, rel=1e-6)
    total = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients.values()))
    assert total == pytest.approx(free.gradient_norm / 2, rel=1e-4)
