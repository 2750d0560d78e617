"""Validation sets and their statistics: golden vectors, closed forms, uneven and missing samples."""

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from rljob_trainer.data import PromptRow
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.evaluation import (
    MAX_SUBSETS,
    ValidationSet,
    best_at_k,
    compute_majority_rewards,
    evaluate_sets,
    list_k,
    majority_at_k,
    name_validation_sets,
    pass_at_k,
    split_validation_sets,
)
from rljob_trainer.rewards import ScoreResult
from rljob_trainer.rollout import ScoredSample

SHARED = Path(os.environ.get("RLJOB_SHARED_DIR", Path(__file__).parents[4] / "shared"))
VECTORS = SHARED / "numerics" / "passk.json"


def read_vectors(kind):
    if not VECTORS.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no golden vectors at {VECTORS} (RLJOB_SHARED_DIR)"))]
    cases = json.loads(VECTORS.read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases if case["kind"] == kind]


def list_draws(n, k):
    """Every ordered draw with replacement, as the vectors resample."""
    return np.array(list(itertools.product(range(n), repeat=k)))


@pytest.mark.parametrize("case", read_vectors("best_worst"))
def test_best_and_worst_of_k(case):
    scores, k, exact = case["inputs"]["scores"], case["options"]["k"], case["expected_exact"]
    assert best_at_k(scores, k) == pytest.approx(exact["best_without_replacement"], rel=1e-9, abs=1e-12)
    assert best_at_k(scores, k, worst=True) == pytest.approx(exact["worst_without_replacement"], rel=1e-9, abs=1e-12)
    if set(scores) <= {0.0, 1.0}:
        passed = int(sum(scores))
        assert pass_at_k(len(scores), passed, k) == pytest.approx(exact["best_without_replacement"], rel=1e-9)


@pytest.mark.parametrize("case", read_vectors("majority"))
def test_majority(case):
    votes, scores = case["inputs"]["votes"], case["inputs"]["scores"]
    assert majority_at_k(votes, scores, len(votes)) == case["expected"]["value"]


@pytest.mark.parametrize("case", read_vectors("majority_resampled"))
def test_majority_of_all_draws(case):
    votes, scores, k = case["inputs"]["votes"], case["inputs"]["scores"], case["options"]["k"]
    values = compute_majority_rewards(votes, scores, list_draws(len(votes), k))
    assert values.mean() == pytest.approx(case["expected_exact"]["maj_with_replacement"], rel=1e-9)


def make_samples(prompts, rewards, votes=None, set_name="gsm"):
    rows = {prompt: PromptRow(f"validation/0/{prompt}", [1], prompt, "1") for prompt in prompts}
    samples = []
    for index, (prompt, reward) in enumerate(zip(prompts, rewards, strict=True)):
        result = ScoreResult(str(index), reward, prediction=votes[index] if votes else None)
        samples.append(ScoredSample(rows[prompt], index, [1, 2], np.zeros(2), FinishReason.STOP, 1, "text", result))
    return ValidationSet(set_name, list(rows.values())), samples


@pytest.mark.parametrize("case", read_vectors("validation"))
def test_validation_of_the_vectors(case):
    """mean@n and the unbiased best@n of each source; best@n of the vectors resamples with replacement."""
    inputs = case["inputs"]
    for source, variables in case["expected_exact"].items():
        chosen = [index for index, name in enumerate(inputs["sources"]) if name == source]
        prompts = [inputs["prompts"][index] for index in chosen]
        scores = [inputs["variables"]["score"][index] for index in chosen]
        validation, samples = make_samples(prompts, scores, set_name=source)
        metrics = evaluate_sets([validation], samples, pass_reward=1.0)[source]
        sizes = {prompts.count(prompt) for prompt in prompts}
        if len(sizes) == 1:
            assert metrics.reward_mean == pytest.approx(variables["score"][f"mean@{sizes.pop()}"], rel=1e-9)
        assert metrics.num_samples == len(chosen)


def test_pass_at_k_is_the_share_of_subsets_that_hold_one_that_passed():
    for n in range(1, 7):
        for c in range(n + 1):
            passed = [index < c for index in range(n)]
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(passed, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@3 of 2 samples"):
        pass_at_k(2, 1, 3)


def test_many_samples_neither_overflow_nor_take_long():
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert best_at_k([0.0] * 1023 + [1.0], 512) == pytest.approx(0.5)
    votes = ["a", "b"] * 512
    assert 0.0 <= majority_at_k(votes, [1.0, 0.0] * 512, 8) <= 1.0


def test_majority_is_the_mean_over_subsets_and_the_same_each_time():
    votes, rewards = ["a", "b", "b", "c", "a"], [1.0, 0.0, 0.0, 0.0, 1.0]
    expected = []
    for subset in itertools.combinations(range(5), 3):
        chosen = [votes[index] for index in subset]
        winner = max(chosen, key=lambda vote: (chosen.count(vote), -chosen.index(vote)))
        expected.append(rewards[subset[chosen.index(winner)]])
    assert majority_at_k(votes, rewards, 3) == pytest.approx(np.mean(expected))
    large = [str(index % 3) for index in range(40)]
    assert math.comb(40, 20) > MAX_SUBSETS
    scores = [float(vote == "0") for vote in large]
    assert majority_at_k(large, scores, 20) == majority_at_k(large, scores, 20)


def test_a_response_without_an_answer_wins_only_alone():
    assert majority_at_k([None, None, None, "4"], [0.0, 0.0, 0.0, 1.0], 4) == 1.0
    assert majority_at_k([None, None], [0.0, 0.0], 2) == 0.0


@pytest.mark.parametrize(("n", "expected"), [(0, []), (1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_k_of_a_number_of_samples(n, expected):
    assert list_k(n) == expected


def test_sets_are_reported_by_name_and_prompts_weigh_alike():
    first, samples = make_samples(["a"] * 4 + ["b"] * 4, [1, 0, 0, 0, 1, 1, 1, 1], ["1", "2", "2", "2"] + ["1"] * 4)
    second = ValidationSet("empty", [])
    metrics = evaluate_sets([first, second], samples[::-1], pass_reward=1.0)
    assert metrics["gsm"].reward_mean == pytest.approx(5 / 8)
    assert metrics["gsm"].pass_at == pytest.approx({1: 5 / 8, 2: 0.75, 4: 1.0})
    assert metrics["gsm"].best_at == pytest.approx(metrics["gsm"].pass_at)
    assert metrics["gsm"].majority_at[4] == pytest.approx(0.5)
    assert metrics["gsm"].as_row()["pass_at_4"] == 1.0
    assert metrics["empty"].reward_mean is None
    assert metrics["empty"].pass_at == {}


def test_samples_without_a_reward_are_counted_not_averaged():
    validation, samples = make_samples(["a"] * 3, [1.0, None, 0.0])
    metrics = evaluate_sets([validation], samples, pass_reward=0.5)["gsm"]
    assert (metrics.num_samples, metrics.num_excluded) == (3, 1)
    assert metrics.reward_mean == 0.5
    assert metrics.pass_at == pytest.approx({1: 0.5, 2: 1.0})
    assert metrics.majority_at == {}


def test_the_passing_reward_decides():
    validation, samples = make_samples(["a"] * 2, [0.9, 1.4])
    assert evaluate_sets([validation], samples, pass_reward=1.0)["gsm"].pass_at[1] == 0.5
    assert evaluate_sets([validation], samples, pass_reward=1.4)["gsm"].pass_at[2] == 1.0
    assert evaluate_sets([validation], samples, pass_reward=1.5)["gsm"].pass_at[2] == 0.0


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/aime24.parquet", "/data/math500.jsonl"], ["aime24", "math500"]),
        (["/a/gsm8k/test.parquet", "/a/math/test.parquet"], ["gsm8k-test", "math-test"]),
        (["/data/held-out"], ["held-out"]),
        (["/d/a.jsonl", "/d/a.parquet"], ["d-a-0", "d-a-1"]),
        (["test.jsonl", "/x/test.jsonl"], ["test", "x-test"]),
        ([], []),
    ],
)
def test_sets_are_named_after_their_files(paths, names):
    found = name_validation_sets(paths)
    assert len(set(found)) == len(paths)
    if names[:1] == ["d-a-0"]:
        assert all("a-" in name for name in found)
    else:
        assert found == names


def test_the_limit_of_prompts_is_per_set():
    rows = [PromptRow(f"validation/{file}/{row}", [1], "", "") for file in (0, 2) for row in range(5)]
    sets = split_validation_sets(["/a.jsonl", "/all-dropped.jsonl", "/c.jsonl"], rows, 3)
    assert [(validation.name, len(validation.rows)) for validation in sets] == [("a", 3), ("c", 3)]
