"""Dynamic sampling, shaping of rewards, rollout correction, and which passes over the models a step makes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tr_local import LocalStep, make_sample

from rljob_api.presets import resolve_algorithm
from rljob_api.v1alpha1.algorithm import Algorithm, DynamicSampling
from rljob_trainer.data import PromptRow, PromptSampler
from rljob_trainer.dynamic_sampling import CollectedBatch, collect_batch, estimate_prompts, has_signal
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.experience import (
    apply_correction,
    build_rows,
    compute_explained_variance,
    fill_advantages,
    summarise,
)
from rljob_trainer.models.policy import PolicyModel, load_causal_lm

NUM_ROWS = 40
DAPO = DynamicSampling(enabled=True, max_refills=3)


def make_row(index: int) -> PromptRow:
    return PromptRow(uid=f"p{index}", prompt_ids=[6], prompt_text=f"{index}", answer="", fields={})


def collect(
    informative: set[int], sampling: DynamicSampling | None = DAPO, num_prompts: int = 4, sampler: Any = None
) -> tuple[CollectedBatch, list[list[int]]]:
    """A step over prompts of which only some have different rewards; also which prompts each round rolled out."""
    sampler = sampler or PromptSampler(NUM_ROWS, num_prompts, seed=0)
    rounds: list[list[int]] = []

    def roll_out(rows: list[PromptRow]) -> list[Any]:
        rounds.append([int(row.uid[1:]) for row in rows])
        return [
            make_sample(row.uid, index, reward=float(index == 1 and int(row.uid[1:]) in informative))
            for row in rows
            for index in range(2)
        ]

    batch = collect_batch(
        num_prompts, sampling, draw=lambda n: [make_row(i) for i in sampler.take(n)], roll_out=roll_out
    )
    return batch, rounds


def list_uids(batch: CollectedBatch) -> list[str]:
    return [row.uid for row in batch.rows]


@pytest.mark.parametrize("sampling", [None, DynamicSampling(enabled=False)])
def test_without_dynamic_sampling_a_step_is_one_round(sampling):
    batch, rounds = collect(set(), sampling)
    assert len(rounds) == 1
    assert batch.samples == batch.all_samples
    assert len(batch.rows) == 4


def test_over_sampling_draws_more_and_counts_what_was_aborted():
    sampler = PromptSampler(NUM_ROWS, 6, seed=0)
    drawn: list[str] = []

    def roll_out(rows: list[PromptRow]) -> list[Any]:
        drawn.extend(row.uid for row in rows)
        return [make_sample(row.uid, index, reward=1.0) for row in rows[2:] for index in range(2)]

    batch = collect_batch(
        4, None, draw=lambda n: [make_row(i) for i in sampler.take(n)], roll_out=roll_out, num_drawn=6
    )
    assert len(drawn) == 6
    assert list_uids(batch) == drawn[2:]
    assert batch.num_aborted_groups == 2


def test_constant_groups_are_replaced_by_other_prompts():
    order = PromptSampler(NUM_ROWS, 4, seed=0).take(4)
    informative = set(range(NUM_ROWS)) - set(order[:2])
    batch, rounds = collect(informative)
    assert len(rounds) == 2
    assert rounds[0] == order
    assert not {f"p{index}" for index in order[:2]} & set(list_uids(batch))
    assert len(batch.rows) == 4
    assert len(batch.samples) == 8
    assert batch.num_refills == 1
    assert batch.num_dropped_groups == 2
    assert len(batch.all_samples) == 2 * sum(len(rows) for rows in rounds)
    # Half of the groups had a signal, so twice the missing two were drawn; what is left over is counted.
    assert len(rounds[1]) == 4
    assert batch.num_surplus_groups == 2


def test_refills_are_bounded_and_a_short_batch_is_completed_with_constant_groups():
    batch, rounds = collect(set())
    assert len(rounds) == 1 + DAPO.max_refills
    assert batch.num_refills == 3
    assert list_uids(batch) == [f"p{index}" for index in rounds[0]], "the groups drawn first"
    assert batch.num_dropped_groups == 12
    one, _ = collect({PromptSampler(NUM_ROWS, 4, seed=0).take(4)[2]})
    assert len(one.rows) == 4
    assert has_signal(one.samples[:2]), "groups with a signal come first"


def test_no_refill_is_a_plain_filter():
    batch, rounds = collect(set(), DynamicSampling(enabled=True, max_refills=0))
    assert len(rounds) == 1
    assert len(batch.rows) == 4


def test_a_prompt_that_comes_again_in_the_same_step_is_not_rolled_out_twice():
    """Where an epoch ends inside a step: the same prompt would be the same group, with the same samples (case 126)."""
    sampler = PromptSampler(6, 4, seed=3)
    batch, rounds = collect(set(), DynamicSampling(enabled=True, max_refills=5), sampler=sampler)
    drawn = [index for rows in rounds for index in rows]
    assert len(drawn) == len(set(drawn))
    assert len(batch.rows) == len(set(list_uids(batch))) == 4


@given(st.sets(st.integers(0, NUM_ROWS - 1)), st.integers(0, 4), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_resumed_run_draws_what_the_uninterrupted_one_does(informative, max_refills, stop_after):
    sampling = DynamicSampling(enabled=True, max_refills=max_refills)
    whole = PromptSampler(NUM_ROWS, 4, seed=1)
    saved = whole.state_dict()
    steps = []
    for step in range(5):
        if step == stop_after:
            saved = whole.state_dict()
        steps.append(collect(informative, sampling, sampler=whole))
    resumed = PromptSampler(NUM_ROWS, 4, seed=1)
    resumed.load_state_dict(saved)
    for batch, rounds in steps[stop_after:]:
        again, again_rounds = collect(informative, sampling, sampler=resumed)
        assert again_rounds == rounds
        assert list_uids(again) == list_uids(batch)
        assert len(batch.rows) == 4
        assert len(batch.samples) == 8


def test_refills_are_as_large_as_the_share_of_useful_groups_suggests():
    assert estimate_prompts(4, 0, 8, 8) == 8, "nothing useful yet: a full round"
    assert estimate_prompts(2, 6, 8, 8) == 3
    assert estimate_prompts(7, 1, 8, 8) == 8, "never more than a step"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0, 1.0], False), ([1.0, 0.0], True), ([1.0, None], False), ([None, None], False), ([0.7, 0.7 + 1e-12], False)],
)
def test_a_signal_is_a_difference_in_float32(rewards, expected):
    assert has_signal([make_sample("p", index, reward=reward) for index, reward in enumerate(rewards)]) is expected


def shape(samples: list[Any], **document: Any) -> tuple[list[Any], Any]:
    algorithm = resolve_algorithm(Algorithm.model_validate(document))
    rows = build_rows(samples, algorithm)
    report = fill_advantages(
        rows, samples, algorithm, reward_weights={"a": 1.0, "b": 0.5}, max_response_tokens=10, kl_coefficient=0.0
    )
    return rows, report


def test_the_overlong_penalty_is_part_of_the_reward_and_not_of_the_report():
    lengths = [2, 8, 9, 10]
    samples = [make_sample("p", i, reward=1.0, token_ids=[3] * length) for i, length in enumerate(lengths)]
    rows, report = shape(samples, overlongPenalty={"bufferTokens": 4, "factor": 2.0}, normalizeByStd=False)
    # Penalties 0, -1, -1.5, -2 around their mean -1.125.
    assert [row.advantages[0] for row in rows] == pytest.approx([1.125, 0.125, -0.375, -0.875])
    assert report.overlong_penalty_mean == pytest.approx(-1.125)
    assert summarise(samples).reward_mean == 1.0
    assert not has_signal(samples), "dynamic sampling judges the answer, not its length"


def test_gdpo_reads_every_reward_function_with_its_weight():
    scores = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 100.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 100.0}]
    samples = [
        make_sample("p", i, reward=score["a"] + 0.5 * score["b"], scores=score, token_ids=[3])
        for i, score in enumerate(scores)
    ]
    rows, _ = shape(samples, advantageEstimator="GDPO")
    assert rows[0].advantages[0] > 0, "the first function has the larger weight once both are normalised"
    rows, _ = shape(samples, advantageEstimator="GRPO")
    assert rows[0].advantages[0] < 0, "the sum is ruled by the function with the larger scale"


def test_gdpo_leaves_out_a_sample_without_a_reward():
    samples = [make_sample("p", i, reward=r, scores={"a": r, "b": r}) for i, r in enumerate([1.0, 0.0, None])]
    rows, _ = shape(samples, advantageEstimator="GDPO")
    assert not rows[2].trainable
    assert rows[2].advantages.tolist() == [0, 0, 0]
    assert rows[0].advantages[0] == pytest.approx(-rows[1].advantages[0])


def test_the_overlong_penalty_of_a_sample_without_a_reward_is_nobodys_baseline():
    lengths, rewards = [2, 9, 8, 10], [1.0, 0.0, 0.5, None]
    samples = [
        make_sample("p", i, reward=reward, scores={"a": reward, "b": 0.0}, token_ids=[3] * length)
        for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    penalty = {"overlongPenalty": {"bufferTokens": 4, "factor": 2.0}}
    with_excluded, _ = shape(samples, advantageEstimator="GDPO", **penalty)
    without, _ = shape(samples[:3], advantageEstimator="GDPO", **penalty)
    for row, expected in zip(with_excluded, without, strict=False):
        assert row.advantages.tolist() == pytest.approx(expected.advantages.tolist())


@pytest.mark.parametrize("estimator", ["GRPO", "GRPOPassK", "RLOO", "OPO", "GPG", "ReinforcePlusPlusBaseline"])
def test_a_kl_reward_of_coefficient_0_changes_nothing_for_masked_responses(estimator):
    """A truncated and a rejected response have no token to carry their reward; both still count in the baseline."""
    samples = [
        make_sample("p", 0, reward=1.5),
        make_sample("p", 1, reward=1.0, token_ids=[3] * 5, finish_reason=FinishReason.LENGTH),
        make_sample("p", 2, reward=0.5),
        make_sample("p", 3, reward=-2.0, token_ids=[3, 4]),
    ]
    found = []
    for placement in ("None", "Reward"):
        algorithm = resolve_algorithm(
            Algorithm.model_validate(
                {"advantageEstimator": estimator, "maskTruncated": True, "kl": {"placement": placement}}
            )
        )
        rows = build_rows(samples, algorithm)
        rows[3].kept = np.zeros(2, dtype=np.bool_)
        for row in rows:
            row.reference_log_probs = np.full(len(row.response_ids), -2.5, dtype=np.float32)
        log_probs = [np.full(len(row.response_ids), -2.0, dtype=np.float32) for row in rows]
        fill_advantages(rows, samples, algorithm, kl_coefficient=0.0, policy_log_probs=log_probs)
        found.append([row.advantages.tolist() for row in rows])
    assert found[0] == found[1]
    assert any(found[0][0] + found[0][2])
    assert not any(found[0][1] + found[0][3])


def test_truncated_responses_can_be_left_out():
    samples = [
        make_sample("p", 0, reward=1.0),
        make_sample("p", 1, reward=0.0, finish_reason=FinishReason.LENGTH),
        make_sample("p", 2, reward=0.5),
    ]
    rows, _ = shape(samples, maskTruncated=True)
    assert [row.trainable for row in rows] == [True, False, True]
    assert not rows[1].advantages.any()


def correct(log_ratios: list[list[float]], **document: Any) -> list[Any]:
    """Rows whose trainer log-probabilities exceed the engine's by `log_ratios`."""
    samples = [
        make_sample(
            "p", i, reward=float(i), token_ids=[3] * len(ratios), log_probs=np.full(len(ratios), -2, np.float32)
        )
        for i, ratios in enumerate(log_ratios)
    ]
    algorithm = resolve_algorithm(Algorithm.model_validate({"rolloutCorrection": document}))
    rows = build_rows(samples, algorithm)
    apply_correction(rows, [np.float32(-2) + np.array(r, np.float32) for r in log_ratios], algorithm.rollout_correction)
    return rows


def test_token_weights_are_the_ratio_truncated():
    rows = correct([[0.1, 1.0], [-0.5]], level="Token", truncation=1.5)
    assert rows[0].token_weights == pytest.approx([math.exp(0.1), 1.5], rel=1e-5)
    assert rows[1].token_weights == pytest.approx([math.exp(-0.5)], rel=1e-5)
    assert all(row.kept.all() for row in rows)


def test_sequence_weights_are_one_per_response_and_may_be_normalised():
    rows = correct([[0.1, 0.2], [-0.5]], level="Sequence")
    assert rows[0].token_weights == pytest.approx([math.exp(0.3)] * 2, rel=1e-5)
    rows = correct([[0.1, 0.2], [-0.5]], level="Sequence", normalize=True)
    mean = (math.exp(0.3) + math.exp(-0.5)) / 2
    assert rows[1].token_weights == pytest.approx([math.exp(-0.5) / mean], rel=1e-5)


def test_icepop_drops_what_truncation_would_keep():
    rows = correct([[0.1, 1.0, -1.0]], level="Token", floor=0.5, truncation=2.0)
    assert rows[0].token_weights == pytest.approx([math.exp(0.1), 0, 0], rel=1e-5)


def test_rejected_tokens_leave_the_loss_and_its_denominator():
    rows = correct([[0.1, 1.0], [0.0]], rejection=[{"statistic": "K3", "upper": 0.1}])
    assert rows[0].kept.tolist() == [True, False]
    assert rows[0].num_trainable_tokens == 1
    assert rows[0].token_weights is None
    whole = correct([[0.1, 1.0], [0.0]], rejection=[{"statistic": "K3", "scope": "SequenceMax", "upper": 0.1}])
    assert whole[0].num_trainable_tokens == 0
    assert whole[1].num_trainable_tokens == 1


def test_a_row_without_tokens_is_not_corrected():
    rows = correct([[], [0.2]], level="Token")
    assert rows[0].token_weights is None
    assert rows[1].token_weights == pytest.approx([math.exp(0.2)], rel=1e-5)
    assert correct([[]], level="Token")[0].kept is None


@pytest.fixture(scope="module")
def policy(tiny_model):
    return PolicyModel(load_causal_lm(tiny_model))


def count_passes(policy: PolicyModel, *, mini: int = 4, **algorithm: Any) -> int:
    step = LocalStep(policy, algorithm=algorithm, training={"prompts_per_step": 4, "mini_batch_prompts": mini})
    step.run(
        lambda count: [make_row(index) for index in range(count)],
        lambda rows: [make_sample(row.uid, i, reward=float(i == 0)) for row in rows for i in range(4)],
    )
    return step.dispatcher.num_passes


@pytest.mark.parametrize(
    ("mini", "algorithm", "expected"),
    [
        (4, {}, 0),
        (2, {}, 1),
        (4, {"kl": {"placement": "Loss"}}, 1),
        (4, {"kl": {"placement": "Reward"}}, 2),
        (4, {"rolloutCorrection": {"level": "Token"}}, 1),
        (2, {"rolloutCorrection": {"bypassOldLogProbs": True}}, 0),
        (4, {"advantageEstimator": "OptimalTokenBaseline"}, 1),
        (2, {"policyLoss": "KLCov"}, 3),
    ],
)
def test_no_pass_that_nothing_reads(policy, mini, algorithm, expected):
    assert count_passes(policy, mini=mini, **algorithm) == expected


def test_a_policy_is_at_kl_zero_to_itself(policy):
    """In float32 and exactly: the same pass over the same weights (the starting reference is a copy)."""
    step = LocalStep(
        policy, algorithm={"kl": {"placement": "Loss", "coefficient": 0.1}}, training={"mini_batch_prompts": 4}
    )
    with torch.no_grad():
        for parameter, origin in zip(step.dispatcher.reference.parameters(), policy.parameters(), strict=True):
            parameter.copy_(origin)
    (metrics,) = step.run(
        lambda count: [make_row(index) for index in range(count)],
        lambda rows: [make_sample(row.uid, i, reward=float(i == 0)) for row in rows for i in range(4)],
    )
    assert metrics.ratio_max_deviation == 0.0
    assert metrics.clip_fraction == 0.0
    assert metrics.kl == 0.0


def test_the_critic_learns_nothing_from_rejected_tokens():
    """Its returns there are 0, which is no return."""
    rows = correct([[0.1, 1.0, 0.0], [0.0]], rejection=[{"statistic": "K3", "upper": 0.1}])
    assert rows[0].loss_mask.tolist() == [True, False, True]
    for row in rows:
        row.values = np.linspace(0.2, 0.4, len(row.response_ids), dtype=np.float32)
    samples = [make_sample("p", i, reward=float(i), token_ids=row.response_ids) for i, row in enumerate(rows)]
    fill_advantages(rows, samples, resolve_algorithm(Algorithm.model_validate({"type": "PPO"})))
    assert rows[0].returns[1] == 0
    before = compute_explained_variance(rows)
    rows[0].values[1] = 100.0
    assert compute_explained_variance(rows) == before
    rows[0].trainable = False
    assert not rows[0].loss_mask.any()
    assert rows[0].num_trainable_tokens == 0
