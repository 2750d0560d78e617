"""The GSM8K check: extraction table, gold answers, golden vectors, and the real test set through the whole path."""

import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest

from rljob_api.v1alpha1.data import Data, Reward
from rljob_trainer.data import load_prompts
from rljob_trainer.quickstart.model import build_tokenizer
from rljob_trainer.rewards import Backend, RewardService, ScoreRequest, make_answer_check
from rljob_trainer.rewards.gsm8k import extract_gold, score_gsm8k
from rljob_trainer.rewards.numbers import parse_number

SHARED = Path(os.environ.get("RLJOB_SHARED_DIR", Path(__file__).parents[4] / "shared"))
TEST_SET = SHARED / "data" / "gsm8k" / "test.jsonl"
VECTORS = SHARED / "numerics" / "rewards.json"


@pytest.mark.parametrize(
    ("text", "gold", "strict", "flexible"),
    [
        ("#### 1,000", 1000, 1, 1),
        ("#### 1,000.", 1000, 1, 1),
        ("#### 1000.", 1000, 1, 1),
        ("####42", 42, 1, 1),
        ("####  42", 42, 1, 1),
        ("#### $42", 42, 1, 1),
        ("#### **42**", 42, 1, 1),
        ("#### $-42", -42, 1, 1),
        ("#### -$42", -42, 1, 1),
        ("#### 42%", 42, 1, 1),
        ("#### 42 apples", 42, 1, 1),
        ("#### -5", -5, 1, 1),
        ("#### \u22125", -5, 1, 1),
        ("#### --5", -5, 0, 0),
        ("#### +7", 7, 1, 1),
        ("#### 42.0", 42, 1, 1),
        ("#### .5", 0.5, 1, 1),
        ("#### 0.50", 0.5, 1, 1),
        ("#### 1 000", 1000, 0, 0),
        ("#### 1\u00a0000", 1000, 1, 1),
        ("#### 1\u202f000", 1000, 1, 1),
        ("#### 1\u2009000", 1000, 1, 1),
        ("#### 3/4", 0.75, 1, 1),
        ("#### 3/0", 0, 0, 0),
        ("#### 1e3", 1000, 1, 1),
        ("#### 1e999999999", 1, 0, 0),
        ("#### ,", 42, 0, 0),
        ("#### .", 42, 0, 0),
        ("####", 42, 0, 0),
        ("####\n42", 42, 0, 0),
        ("#### 3\n#### 4", 4, 1, 1),
        ("#### 3\n#### 4", 3, 0, 0),
        ("#### 42\n####", 42, 1, 1),
        ("#### 42" + " verified" * 50, 42, 1, 1),
        ("answer is 42", 42, 0, 1),
        ("1,234", 1234, 0, 1),
        ("It costs $5 each, so 3 cost $15.", 15, 0, 1),
        ("10-3", 3, 0, 1),
        ("10-3", -3, 0, 0),
        ("it is -3", -3, 0, 1),
        ("72 clips, altogether.", 72, 0, 1),
        ("Reward: 10", 10, 0, 1),
        ("Reward: 10", 1, 0, 0),
        ("one hundred", 100, 0, 0),
        ("", 42, 0, 0),
        ("\n", 42, 0, 0),
        ("#### 1,23", 123, 0, 0),  # a malformed group is no number
        ("#### 1.2.3", 1.2, 0, 0),
        ("#### 1001", 1000, 0, 0),
        ("#### -1000", 1000, 0, 0),
        ("#### 100000000000000000000001", "100000000000000000000000", 0, 0),
        ("#### 10%", 0.1, 0, 0),
        ("#### 0.3333", "1/3", 0, 0),
        ("#### 9" + "9" * 100_000, 9, 0, 0),
    ],
)
def test_extraction_table(text, gold, strict, flexible):
    assert score_gsm8k(text, gold, flexible=False) == strict
    assert score_gsm8k(text, gold, flexible=True) == flexible


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        ("He has 48/2 = <<48/2=24>>24 clips.\n#### 1,450,000", 1450000),
        ("#### 18", 18),
        ("18", 18),
        (" 1,000 ", 1000),
        (18, 18),
        (0.1, Fraction(1, 10)),
        ("\u22125", -5),
        ("$5", 5),
        ("<<48/2=24>>24", None),
        ("24 clips", None),
        ("", None),
        (None, None),
        (True, None),
        (float("nan"), None),
        ("#### ,", None),
        ("####", None),
        ([1], None),
    ],
)
def test_gold_answers(gold, expected):
    assert extract_gold(gold) == expected


def test_an_unparsable_gold_answer_is_an_error_never_a_score():
    for response in ("#### ,", "", "#### 42"):
        with pytest.raises(ValueError, match="holds no number"):
            score_gsm8k(response, "", flexible=True)


def test_numbers_are_compared_exactly():
    assert parse_number("0.1") + parse_number("0.2") == parse_number("0.3")
    assert parse_number("1" + "0" * 5000) is None


@pytest.mark.skipif(not VECTORS.exists(), reason=f"no golden vectors at {VECTORS} (set RLJOB_SHARED_DIR)")
def test_golden_vectors():
    cases = [case for case in json.loads(VECTORS.read_text())["cases"] if case["kind"].startswith("gsm8k")]
    assert len(cases) > 40
    wrong = []
    for case in cases:
        question = case.get("question")
        accepted = [case["expected"]["score"]] if question is None or question["verdict"] == "convention" else []
        if question is not None:
            accepted += [question["preferred"]["score"]] if question["preferred"] else []
            accepted += [other["expected"]["score"] for other in question.get("also_ok", [])]
        text, gold = case["inputs"]["text"], case["inputs"]["gold"]
        try:
            score = score_gsm8k(text, gold, flexible=case["kind"].endswith("flexible"))
        except ValueError:
            score = 0.0  # the row is a data error and never scored
        if score not in accepted:
            wrong.append((case["name"], score, accepted))
    assert wrong == []


@pytest.mark.skipif(not TEST_SET.exists(), reason=f"no GSM8K test set at {TEST_SET} (set RLJOB_SHARED_DIR)")
def test_real_test_set_from_file_to_reward(capsys):
    """Every gold answer scores 1, every corrupted one 0, through loading, templates and the reward service."""
    tokenizer = build_tokenizer()
    reward = Reward.model_validate({"functions": [{"type": "GSM8K"}]})
    data = Data(train=[str(TEST_SET)], prompt_field="question", max_prompt_tokens=4096)
    start = time.perf_counter()
    with make_answer_check(reward) as check:
        rows = load_prompts(data.train, data, tokenizer, check_answer=check, show=lambda text: None).rows
    service = RewardService(reward, backend=Backend.LOCAL)
    try:
        for row in rows:
            gold = extract_gold(row.answer)
            service.submit(ScoreRequest(f"{row.uid} gold", row.prompt_text, row.answer, row.answer))
            for name, number in (("more", gold + 1), ("negated", -gold if gold else 1), ("tenfold", gold * 10 or 10)):
                response = f"{row.answer.rsplit('####', 1)[0]}#### {number}"
                service.submit(ScoreRequest(f"{row.uid} {name}", row.prompt_text, response, row.answer))
        results = {result.sample_id: result.reward for result in service.collect(120)}
    finally:
        service.close()
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{len(rows)} GSM8K rows from file to reward, {len(results)} scores: {seconds:.2f} s")
    assert len(rows) == 1319
    assert all(results[f"{row.uid} gold"] == 1.0 for row in rows)
    assert not any(results[f"{row.uid} {name}"] for row in rows for name in ("more", "negated", "tenfold"))
