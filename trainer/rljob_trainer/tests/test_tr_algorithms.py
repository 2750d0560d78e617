"""Worked values of the formulas, and the mistakes other implementations made with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import AdvantageEstimator, KLControllerType, KLEstimator, LossAggregation, PolicyLoss
from rljob_trainer.algorithms.advantages import compute_advantages, compute_gdpo, place_outcome_rewards
from rljob_trainer.algorithms.aggregation import aggregate, compute_token_weights
from rljob_trainer.algorithms.covariance import select_tokens
from rljob_trainer.algorithms.groups import compute_group_statistics
from rljob_trainer.algorithms.kl import compute_kl, compute_mean_kl, update_kl_coefficient
from rljob_trainer.algorithms.masked import masked_mean, whiten
from rljob_trainer.algorithms.overlong import compute_overlong_penalty
from rljob_trainer.algorithms.policy_losses import COVARIANCE_LOSSES, PolicyLossOptions, compute_policy_loss
from rljob_trainer.algorithms.token_advantages import compute_discounted_returns, compute_gae

GROUP_ESTIMATORS = [
    AdvantageEstimator.GRPO,
    AdvantageEstimator.GRPO_PASS_K,
    AdvantageEstimator.RLOO,
    AdvantageEstimator.OPO,
    AdvantageEstimator.GPG,
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
]


def estimate(estimator, rewards, groups=None, *, width=1, **options):
    """Advantage of the first token of each row."""
    rewards = torch.tensor(rewards, dtype=torch.float32)
    groups = torch.zeros(len(rewards), dtype=torch.long) if groups is None else torch.tensor(groups)
    mask = torch.ones(len(rewards), width, dtype=torch.bool)
    return compute_advantages(estimator, rewards_B=rewards, group_ids_B=groups, mask_BT=mask, **options)[:, 0]


@pytest.mark.parametrize(
    ("rewards", "want"),
    [
        ([1, 0, 1, 0], [0.866023903787, -0.866023903787, 0.866023903787, -0.866023903787]),
        ([1, 0, 0, 0], [1.499997000006, -0.499999000002, -0.499999000002, -0.499999000002]),
        ([1, 1, 1, 0, 0, 0, 0, 0], [1.20761239552] * 3 + [-0.724567437312] * 5),
        ([1.0, 1.00001], [-0.619, 0.619]),
    ],
)
def test_grpo_uses_the_sample_deviation_and_epsilon_1e_6(rewards, want):
    got = estimate(AdvantageEstimator.GRPO, rewards)
    assert got.sum().abs() < 1e-6
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-2 if rewards[1] == 1.00001 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize(("value", "size"), [(0.7, 8), (0.7, 16), (0.3, 6), (0.1, 8)])
def test_equal_rewards_are_exactly_no_signal(estimator, value, size):
    assert torch.equal(estimate(estimator, [value] * size), torch.zeros(size))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_lone_survivor_of_a_group_gets_no_advantage(estimator):
    got = estimate(estimator, [0.3, 1.0, 0.0, 0.5], [0, 1, 1, 1])
    assert got[0] == 0
    assert got[1] > 0


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_an_unscored_row_is_excluded_and_not_punished(missing):
    got = estimate(AdvantageEstimator.GRPO, [1, 0, missing, 1])
    torch.testing.assert_close(got, torch.tensor([0.577349, -1.154699, 0.0, 0.577349]), rtol=1e-5, atol=1e-6)


def test_a_partial_group_does_not_shift_the_next_group():
    got = estimate(AdvantageEstimator.GRPO, [1, 0, 0, 1, 1, 0, 0], [7, 7, 7, 3, 3, 3, 3])
    want = [1.154699, -0.577349, -0.577349, 0.866024, 0.866024, -0.866024, -0.866024]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0, math.nan])), min_size=2, max_size=12),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_groups_are_found_by_id_wherever_their_rows_are(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    for estimator in GROUP_ESTIMATORS:
        straight = estimate(estimator, [reward for _, reward in rows], [group for group, _ in rows])
        shuffled = estimate(estimator, [rows[i][1] for i in order], [rows[i][0] for i in order])
        assert torch.isfinite(straight).all()
        torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)


def test_the_share_of_groups_without_signal_is_counted():
    statistics = compute_group_statistics(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert statistics.constant_fraction == 0.5


def test_an_empty_response_writes_its_reward_nowhere():
    placed = place_outcome_rewards(torch.tensor([10.0, 1.0]), torch.tensor([[0, 0, 0], [1, 1, 0]]).bool())
    assert placed.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("as_tokens", [False, True], ids=["outcome", "token rewards"])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_masked_row_counts_in_its_group_with_its_own_reward(estimator, as_tokens):
    """Row 1 was truncated or rejected: it trains nothing, but it was an answer to the prompt, and not one of reward 0.

    A KL reward with coefficient 0 (`as_tokens`) changes nothing.
    """
    rewards, groups = torch.tensor([0.25, 1.0, 0.5, -0.5, 0.75, 0.25]), torch.tensor([0, 0, 0, 0, 1, 1])
    whole = torch.ones(6, 3, dtype=torch.bool)
    masked = whole.clone()
    masked[1] = False
    found, expected = (
        compute_advantages(
            estimator,
            rewards_B=rewards,
            group_ids_B=groups,
            mask_BT=mask,
            token_rewards_BT=place_outcome_rewards(rewards, mask) if as_tokens and mask is masked else None,
            num_tokens_B=torch.full((6,), 3),
        )
        for mask in (masked, whole)
    )
    assert not found[1].any()
    if estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
        centered = rewards - torch.tensor([0.3125] * 4 + [0.5] * 2)
        expected = whiten(torch.where(masked, centered[:, None], 0.0), masked)
    else:
        assert expected[1].any(), "the masked row is the best of its group"
    torch.testing.assert_close(found[[0, 2, 3, 4, 5]], expected[[0, 2, 3, 4, 5]], rtol=1e-6, atol=1e-7)


def test_opo_weighs_a_masked_row_by_the_length_of_its_response():
    rewards, mask = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([[1, 0], [1, 0], [0, 0]]).bool()
    found = compute_advantages(
        AdvantageEstimator.OPO,
        rewards_B=rewards,
        group_ids_B=torch.zeros(3, dtype=torch.long),
        mask_BT=mask,
        num_tokens_B=torch.tensor([1, 1, 6]),
    )
    assert found[:, 0].tolist() == [0.75, 0.75, 0.0]


def test_remax_and_unknown_estimators_say_what_is_missing():
    with pytest.raises(ValueError, match="greedy_rewards_B"):
        estimate(AdvantageEstimator.REMAX, [1, 0])
    with pytest.raises(ValueError, match="GAE"):
        estimate(AdvantageEstimator.GAE, [1, 0])


def test_gdpo_normalises_components_before_mixing():
    components = torch.tensor([[1.0, 0.0, 1.0, 0.0], [100.0, 300.0, 100.0, 300.0]])
    got = compute_gdpo(components, torch.tensor([1.0, 1.0]), torch.zeros(4).long(), torch.ones(4, 1))
    assert got.abs().max() < 0.05, "opposite components of equal weight cancel whatever their scale (up to epsilon)"
    alone = compute_gdpo(components, torch.tensor([1.0, 0.0]), torch.zeros(4).long(), torch.ones(4, 1))
    assert alone[:, 0].tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


def test_gae_ignores_padding_and_its_values():
    rewards, values = torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.3, 0.5, 7.0, math.nan]])
    mask = torch.tensor([[1, 1, 0, 0]]).bool()
    got, returns = compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    torch.testing.assert_close(got, torch.tensor([[0.675, 0.5, 0, 0]]).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(returns, torch.tensor([[0.975, 1.0, 0, 0]]).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("gamma", "want"), [(1.0, [0.775, 0.5, 0]), (0.0, [-0.2, 0.5, 0])])
def test_a_terminal_reward_on_a_masked_token_is_not_lost(gamma, want):
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.5, 0.9]])
    got, _ = compute_gae(rewards, values, torch.tensor([[1, 1, 0]]).bool(), gamma, 0.95)
    torch.testing.assert_close(got, torch.tensor([want]).double(), rtol=1e-6, atol=1e-6)


def test_returns_skip_tool_tokens():
    returns = compute_discounted_returns(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]]).bool(), 0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("difference", "k1", "k2", "k3"),
    [
        (0.1, 0.1, 0.005, 0.004837418035959606),
        (-0.1, -0.1, 0.005, 0.005170918075647624),
        (1.0, 1.0, 0.5, 0.36787944117144233),
        (-1.0, -1.0, 0.5, 0.7182818284590451),
        (-5.0, -5.0, 12.5, 142.4131591025766),
        (20.0, 20.0, 200.0, 19.000000002061153),
        (-20.0, -20.0, 200.0, 485165174.4097903),
    ],
)
def test_kl_point_values(difference, k1, k2, k3):
    log_probs, reference = torch.tensor([difference], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for estimator, want in ((KLEstimator.K1, k1), (KLEstimator.K2, k2), (KLEstimator.K3, k3)):
        assert compute_kl(estimator, log_probs, reference).item() == pytest.approx(want, rel=1e-9)


def test_kl_estimators_are_unbiased_under_the_policy():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
    for estimator in (KLEstimator.K1, KLEstimator.K3):
        assert (p * compute_kl(estimator, p.log(), q.log())).sum().item() == pytest.approx(0.0851228259572216, rel=1e-9)


@pytest.mark.parametrize("estimator", list(KLEstimator))
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0, 0.0])
def test_kl_is_finite_in_value_and_gradient(estimator, log_ratio):
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    value = compute_kl(estimator, log_probs, torch.zeros(1))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(log_probs.grad).all()


def test_the_straight_through_estimator_has_the_unbiased_gradient():
    log_probs = torch.tensor([-0.5], requires_grad=True)
    compute_kl(KLEstimator.K3_STRAIGHT_THROUGH, log_probs, torch.tensor([0.2])).sum().backward()
    assert log_probs.grad.item() == pytest.approx(-0.7)


def test_the_adaptive_controller_is_bounded_and_the_fixed_one_never_moves():
    options = {"measured_kl": 10.0, "target": 0.1, "horizon_samples": 100, "num_samples": 10}
    assert update_kl_coefficient(1.0, KLControllerType.ADAPTIVE, **options) == pytest.approx(1.02)
    assert update_kl_coefficient(1.0, KLControllerType.FIXED, **options) == 1.0


LENGTHS = [2, 8, 6, 4]
LOSS_OF_ROW = [3.0, 0.5, 1.0, 2.0]


def weigh(aggregation, lengths, num_tokens, num_sequences, norm_tokens=10):
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return compute_token_weights(
        aggregation,
        mask,
        ids,
        num_tokens_global=num_tokens,
        num_sequences_global=num_sequences,
        sequence_token_counts_S=torch.tensor(lengths),
        norm_tokens=norm_tokens,
    )


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        (LossAggregation.TOKEN_MEAN, 1.2),
        (LossAggregation.TOKEN_SUM, 24.0),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN, 1.625),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_SUM, 6.0),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM, 0.6),
    ],
)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [1], [0], [2]]])
def test_the_loss_does_not_depend_on_the_split_into_micro_batches(aggregation, want, split):
    total = 0.0
    for rows in split:
        losses = torch.cat([torch.full((LENGTHS[row],), LOSS_OF_ROW[row]) for row in rows])
        weights = weigh(aggregation, [LENGTHS[row] for row in rows], sum(LENGTHS), len(LENGTHS))
        total += aggregate(losses, weights).item()
    assert total == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(aggregation):
    losses = torch.full((4,), math.nan, requires_grad=True)
    weights = compute_token_weights(
        aggregation,
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.long),
        num_tokens_global=0,
        num_sequences_global=0,
        sequence_token_counts_S=torch.zeros(1),
        norm_tokens=1,
    )
    loss = aggregate(losses, weights)
    loss.backward()
    assert loss.item() == 0
    assert losses.grad.tolist() == [0, 0, 0, 0]


def test_masked_mean_never_leaks_and_never_divides_by_zero():
    assert masked_mean(torch.tensor([1, math.nan, 3]), torch.tensor([1, 0, 1]).bool()) == 2.0
    assert masked_mean(torch.tensor([math.nan]), torch.zeros(1).bool()) == 0.0


def test_whitening_one_token_or_a_constant_batch():
    assert whiten(torch.tensor([0.7, 9.0]), torch.tensor([1, 0]).bool()).tolist() == pytest.approx([0.7, 0.0])
    assert whiten(torch.full((7,), 0.1), torch.ones(7).bool()).tolist() == [0.0] * 7


def select(loss, new, old, advantages, mask=None, seed=0, **options):
    new = torch.as_tensor(new)
    return select_tokens(
        loss,
        log_probs_N=new,
        old_log_probs_N=torch.as_tensor(old),
        advantages_N=torch.as_tensor(advantages),
        mask_N=torch.ones(len(new), dtype=torch.bool) if mask is None else mask,
        options=PolicyLossOptions(**options),
        rng=np.random.default_rng(seed),
    )


def run_loss(loss, new, old, advantages, mask=None, ids=None, **options):
    new = torch.tensor(new, requires_grad=True)
    mask = torch.ones(len(new)).bool() if mask is None else torch.tensor(mask).bool()
    ids = torch.zeros(len(new)).long() if ids is None else torch.tensor(ids)
    selected = select(loss, new, old, advantages, mask, **options) if loss in COVARIANCE_LOSSES else None
    output = compute_policy_loss(
        loss,
        log_probs_N=new,
        old_log_probs_N=torch.tensor(old),
        advantages_N=torch.tensor(advantages),
        mask_N=mask,
        sequence_ids_N=ids,
        num_sequences=int(ids.max()) + 1,
        options=PolicyLossOptions(**options),
        selected_N=None if selected is None else torch.from_numpy(selected),
    )
    output.token_losses_N.sum().backward()
    return output, new.grad


@pytest.mark.parametrize("loss", [loss for loss in PolicyLoss if loss not in (PolicyLoss.CLIP_COV,)])
def test_every_loss_pushes_good_tokens_up_and_bad_ones_down(loss):
    _, gradient = run_loss(loss, [-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0], ids=[0, 1])
    assert gradient[0] < 0, "minimising must raise the log-probability of a token with positive advantage"
    assert gradient[1] > 0


@pytest.mark.parametrize("loss", list(PolicyLoss))
def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient(loss):
    output, gradient = run_loss(loss, [-1.0, math.nan], [-1.2, math.inf], [0.5, math.nan], mask=[1, 0])
    assert torch.isfinite(output.token_losses_N).all()
    assert torch.isfinite(gradient).all()
    assert gradient[1] == 0


def test_ppo_clip_stops_the_gradient_outside_the_band():
    _, gradient = run_loss(PolicyLoss.PPO_CLIP, [0.0, 0.0, -1.0], [-1.0, -0.1, -1.0], [1.0, 1.0, 1.0])
    assert gradient[0] == 0, "ratio e > 1.2 with positive advantage is clipped"
    assert gradient[1] != 0
    assert gradient[2] != 0


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    output, gradient = run_loss(PolicyLoss.PPO_CLIP, [0.0], [-3.0], [-1.0], clip_dual=3.0)
    assert output.token_losses_N.item() == pytest.approx(3.0)
    assert gradient.item() == 0
    unbounded, _ = run_loss(PolicyLoss.PPO_CLIP, [0.0], [-3.0], [-1.0], clip_dual=None)
    assert unbounded.token_losses_N.item() == pytest.approx(math.exp(3.0), rel=1e-5)


def test_gspo_uses_one_ratio_per_sequence():
    output, _ = run_loss(
        PolicyLoss.GSPO, [-1.0, -2.0, -1.0], [-1.1, -2.3, -1.0], [1.0, 1.0, 1.0], ids=[0, 0, 1], clip_high=9
    )
    want = [-math.exp(0.2), -math.exp(0.2), -1.0]
    assert output.token_losses_N.tolist() == pytest.approx(want, rel=1e-5)


def test_kl_cov_selects_the_highest_covariances_and_clip_cov_draws_inside_its_band():
    advantages = [2.0, -2.0, 0.5, -0.5, 3.0, 0.0]
    log_probs = [-0.1, -3.0, -1.0, -1.1, -0.2, -1.0]
    chosen = select(PolicyLoss.KL_COV, log_probs, log_probs, advantages, cov_fraction=0.34)
    assert np.flatnonzero(chosen).tolist() == [1, 4], "covariances 4.8 and 2.2 are the largest"
    draws = {
        tuple(
            np.flatnonzero(
                select(PolicyLoss.CLIP_COV, log_probs, log_probs, advantages, seed=seed, cov_low=1.0, cov_high=3.0)
            )
        )
        for seed in range(20)
    }
    assert draws == {(0,), (4,)}, "one token at least, drawn among those with a covariance between 1 and 3"
    repeated = [select(PolicyLoss.CLIP_COV, log_probs, log_probs, advantages, seed=3, cov_low=1.0) for _ in range(2)]
    assert repeated[0].tolist() == repeated[1].tolist()


def test_clip_cov_takes_the_gradient_of_its_tokens_and_kl_cov_adds_a_penalty():
    new, old, advantages = [-0.1, -3.0, -1.0], [-0.2, -3.0, -1.0], [2.0, -2.0, 0.5]
    _, gradient = run_loss(PolicyLoss.CLIP_COV, new, old, advantages, cov_low=1.0, cov_high=9.0, clip_high=1.0)
    assert (gradient == 0).sum() == 1
    plain, _ = run_loss(PolicyLoss.KL_COV, new, old, advantages, kl_cov_coefficient=0.0, cov_fraction=1.0)
    penalised, _ = run_loss(PolicyLoss.KL_COV, new, old, advantages, kl_cov_coefficient=3.0, cov_fraction=1.0)
    assert (penalised.token_losses_N - plain.token_losses_N).tolist() == pytest.approx([0.3, 0.0, 0.0], abs=1e-6)


def test_covariance_losses_refuse_to_choose_from_a_micro_batch():
    with pytest.raises(ValueError, match="whole mini-batch"):
        compute_policy_loss(
            PolicyLoss.KL_COV,
            log_probs_N=torch.zeros(1),
            old_log_probs_N=torch.zeros(1),
            advantages_N=torch.zeros(1),
            mask_N=torch.ones(1).bool(),
            sequence_ids_N=torch.zeros(1).long(),
            num_sequences=1,
        )


def test_the_overlong_penalty_is_linear_in_its_buffer():
    penalty = compute_overlong_penalty(torch.tensor([10, 32, 36, 40]), max_tokens=40, buffer_tokens=8, factor=2.0)
    assert penalty.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_a_mean_kl_leaves_empty_rows_out():
    kl, mask = torch.tensor([[1.0, 3.0], [math.nan, math.nan], [4.0, math.nan]]), torch.tensor([[1, 1], [0, 0], [1, 0]])
    assert compute_mean_kl(kl, mask) == 3.0
    assert compute_mean_kl(kl, torch.zeros_like(mask)) == 0.0
