"""The Math reward: what counts as the answer, what is equal, and formulas that never end."""

import json
import os
from pathlib import Path

import pytest

from rljob_api.v1alpha1.data import Reward
from rljob_trainer.rewards import Backend, FailureKind, RewardService, ScoreRequest, make_answer_check
from rljob_trainer.rewards.math_answers import describe_gold_problem, find_boxes, find_unboxed, score_math
from rljob_trainer.rewards.plans import plan_functions

SHARED = Path(os.environ.get("RLJOB_SHARED_DIR", Path(__file__).parents[4] / "shared"))
VECTORS = SHARED / "numerics" / "rewards.json"

EQUAL = [
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{1/2}", r"\frac{1}{2}"),
    (r"\boxed{0.5}", "1/2"),
    (r"\boxed{ 42. }", "42"),
    (r"\fbox{42}", "42"),
    (r"\boxed 5", "5"),
    (r"\boxed{1} so \boxed{2}", "2"),
    (r"\boxed{\boxed{3}}", "3"),
    (r"\boxed{007}", "7"),
    (r"\boxed{-0}", "0"),
    ("\\boxed{\uff14\uff12}", "42"),
    ("\\boxed{\u22127}", "-7"),
    (r"\boxed{35 cm}", "35"),
    (r"\boxed{35\text{ cm}}", "35"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1.0e3}", "1000"),
    (r"\boxed{50\%}", r"50\%"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x=5"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}"),
    (r"\boxed{1} or \boxed{2}", r"\{1,2\}"),
    (r"\boxed{(1,2)}", "(1,2)"),
    (r"\boxed{[0,1)}", "[0,1)"),
    (r"\boxed{x \in (-\infty, 2]}", r"(-\infty,2]"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\pi/2}", r"\frac{\pi}{2}"),
    (r"\boxed{3<x}", "x>3"),
    (r"\boxed{1+i}", "i+1"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{\binom{5}{2}}", "10"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{x^2 + y^2 = 1}", "y^2+x^2=1"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
    (r"\boxed{EVELYN}", r"\text{Evelyn}"),
    (r"\boxed{\text{(B)}}", "(B)"),
    (r"\boxed{42}", 42),
    (r"\boxed{1/10}", 0.1),
]
DIFFERENT = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}"),
    (r"\boxed{\frac{1}{2}}", "2"),
    (r"\boxed{1", "1"),
    (r"\boxed{}", "0"),
    ("", "1"),
    ("\n", "1"),
    ("5", "5"),
    (r"\boxed{None}", "0"),
    (r"\boxed{1} or \boxed{2}", "1"),
    (r"\boxed{7 or 8}", "7"),
    (r"\boxed{1 2}", "12"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{[0,1]}", "[0,1)"),
    (r"\boxed{0.333}", "1/3"),
    (r"\boxed{1.000}", "1000"),
    (r"\boxed{-5}", "5"),
    (r"\boxed{x}", "y"),
    (r"\boxed{x+1}", "x-1"),
    (r"\boxed{x<3}", "x>3"),
    (r"\boxed{2\sqrt{3}}", r"3\sqrt{2}"),
    (r"\boxed{\infty}", "1"),
    (r"\boxed{nan}", "1"),
    (r"\boxed{\frac{1}}", "1"),
    (r"\boxed{Evelyn}", "Carla"),
    (r"\boxed{" + "(" * 50_000 + "}", "1"),
]


@pytest.mark.parametrize(("response", "gold"), EQUAL)
def test_equal_answers_score_one(response, gold):
    assert score_math(response, gold, flexible=False)[0] == 1.0


@pytest.mark.parametrize(("response", "gold"), DIFFERENT)
def test_other_answers_score_zero(response, gold):
    assert score_math(response, gold, flexible=False)[0] == 0.0


def read_vectors():
    if not VECTORS.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no golden vectors at {VECTORS} (RLJOB_SHARED_DIR)"))]
    cases = json.loads(VECTORS.read_text())["cases"]
    return [
        pytest.param(case, id=case["name"])
        for case in cases
        if case["kind"] in ("math_boxed", "dapo_math") and str(case["inputs"]["gold"] or "").strip()
    ]


@pytest.mark.parametrize("case", read_vectors())
def test_golden_vectors(case):
    """DAPO scores -1 and 1 and looks for `Answer:`; a gold answer that is missing is a data error with us."""
    question = case.get("question", {})
    accepted = [] if question.get("verdict") == "wrong" else [case["expected"]]
    accepted += [question["preferred"]] if question.get("preferred") else []
    accepted += [choice["expected"] for choice in question.get("also_ok", [])]
    is_dapo = case["kind"] == "dapo_math"
    score, _ = score_math(case["inputs"]["text"], case["inputs"]["gold"], flexible=is_dapo)
    assert (2 * score - 1 if is_dapo else score) in [choice["score"] for choice in accepted]


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", ["1", r"\frac{1}{2}"]),
        (r"\boxed{a\}b}", [r"a\}b"]),
        (r"\boxed{\{1\}}", [r"\{1\}"]),
        (r"\boxed{1 \boxed{2}", ["2"]),
        ("no box", []),
    ],
)
def test_boxes_are_found_by_counting_braces(text, boxes):
    assert find_boxes(text) == boxes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 42.", "42"),
        ("Answer: $x^2$ as shown", "x^2"),
        ("**Answer:** 7", "7"),
        (r"So \(3\) then \(4\)", "4"),
        ("we have 3 and 1,234", "1,234"),
        ("nothing", None),
    ],
)
def test_without_a_box_only_flexible_looks_further(text, found):
    assert find_unboxed(text) == found
    assert score_math(text, "42", flexible=False) == (0.0, None)


@pytest.mark.parametrize("gold", [None, "", " ", "$", r"\text{}", r"\frac{1", r"\sqrt", "}{"])
def test_gold_answers_that_compare_with_nothing_are_named(gold):
    assert "gold answer" in describe_gold_problem(gold)
    with pytest.raises(ValueError, match="gold answer"):
        score_math(r"\boxed{1}", gold, flexible=False)


@pytest.mark.parametrize("gold", ["12", 12, 0.5, "yes", r"\text{Friday}", r"\frac{1}{2}", "f(x)=x^2", "(A)"])
def test_usable_gold_answers(gold):
    assert describe_gold_problem(gold) is None


def test_predictions_vote_in_a_normal_form():
    votes = {score_math(text, "1", flexible=False)[1] for text in (r"\boxed{\dfrac{1}{2}}", r"\boxed{ \frac{1}{2}. }")}
    assert votes == {r"\frac{1}{2}"}


@pytest.fixture(scope="module")
def service():
    reward = Reward.model_validate(
        {"functions": [{"type": "Math", "timeoutSeconds": 4, "memory": "400Mi"}], "onError": "DropSample"}
    )
    service = RewardService(reward, backend=Backend.LOCAL)
    yield service
    service.close()


def test_a_formula_that_never_ends_costs_its_own_sample_only(service):
    """Math-Verify issue 65: evaluating a tower of powers holds a core, and then the memory, for ever."""
    responses = [r"\boxed{2}", r"\boxed{5^{5^{5^5}}}", r"\boxed{10^{10^{10}}!}", r"\boxed{1+1}", r"\boxed{3}", "2"]
    for number, response in enumerate([*responses, *[r"\boxed{2}"] * 6]):
        service.submit(ScoreRequest(f"p/{number}", "1+1", response, "2"))
    results = service.collect(300)
    rewards = [result.reward for result in results]
    assert rewards[0] == 1.0
    assert rewards[3:] == [1.0, 0.0, 0.0, *[1.0] * 6]
    for result in results[1:3]:
        # Either the library answers at once that it cannot say, or the process is killed: never for ever.
        assert result.reward == 0.0 or result.failure.kind in (FailureKind.TIMEOUT, FailureKind.MEMORY)
    assert any(result.failure is not None for result in results[1:3])


def test_a_memory_bomb_is_killed_and_named(tmp_path):
    """Whatever the function catches: the limit is kept by the parent."""
    (tmp_path / "bomb.py").write_text(
        "def score(prompt, response, answer):\n"
        "    held = []\n"
        "    try:\n"
        "        while response == 'bomb':\n"
        "            held.append(bytearray(10_000_000))\n"
        "    except MemoryError:\n"
        "        return 0\n"
        "    return 1\n"
    )
    function = {"type": "Python", "path": str(tmp_path / "bomb.py"), "memory": "300Mi", "timeoutSeconds": 60}
    service = RewardService(
        Reward.model_validate({"functions": [function], "onError": "DropSample"}), backend=Backend.LOCAL
    )
    try:
        for number, response in enumerate(["a", "bomb", "b"]):
            service.submit(ScoreRequest(f"p/{number}", "", response, ""))
        results = service.collect(200)
    finally:
        service.close()
    assert [result.reward for result in results] == [1.0, None, 1.0]
    assert results[1].failure.kind is FailureKind.MEMORY
    assert "300Mi" in results[1].failure.message


def test_gold_answers_are_checked_before_training(service):
    with make_answer_check(Reward.model_validate({"functions": [{"type": "Math"}]})) as check:
        assert check("12") is None
        assert check(r"\frac{1}{2}") is None
        assert "neither a number" in check(r"\frac{1")
        assert "empty" in check("")


def test_math_has_a_memory_limit_by_default():
    functions = Reward.model_validate({"functions": [{"type": "Math"}, {"type": "Regex", "pattern": "x"}]}).functions
    assert [plan.memory_bytes for plan in plan_functions(functions)] == [2**30, None]
