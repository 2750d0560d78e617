"""Schedules, logits, answer checks and their penalties against golden vectors."""

from __future__ import annotations

import pytest
import torch
from tr_golden import as_tensor, assert_accepted, load_cases

from rljob_api.v1alpha1.rollout import Schedule
from rljob_trainer.algorithms.overlong import compute_overlong_penalty
from rljob_trainer.models.log_probs import compute_entropy, compute_log_probs, compute_sum_pi_squared
from rljob_trainer.optimization import compute_learning_rate

OVERLONG = tuple(case.id for case in load_cases("rewards") if str(case.id).startswith("overlong/"))


@pytest.mark.parametrize("case", load_cases("schedules"))
def test_schedules(case):
    options = case["options"]
    if options.get("init_ratio") or options.get("cycles", 0.5) != 0.5:
        pytest.skip("the warm-up starts at 0 and the cosine is half a wave: neither is an option of spec.training")
    shift = 0 if options.get("zero_indexed", True) else 1
    rates = [
        compute_learning_rate(
            step + shift,
            peak=options["base_lr"],
            schedule=Schedule.COSINE if case["kind"] == "cosine" else Schedule.CONSTANT,
            warmup_steps=options["warmup_steps"],
            total_steps=options.get("total_steps", 10_000),
            min_ratio=options.get("min_ratio", 0.0),
        )
        for step in case["inputs"]["steps"]
    ]
    question = case.get("question", {})
    expected = (question["preferred"] if question.get("verdict") == "wrong" else case["expected"])["lr"]
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("case", load_cases("logits"))
def test_logits(case):
    logits = as_tensor(case["inputs"]["logits"]).requires_grad_()
    if case["kind"] == "entropy":
        value = compute_entropy(logits)
    else:
        value, _ = compute_log_probs(
            logits,
            torch.tensor(case["inputs"]["labels"]),
            lambda hidden: hidden,
            temperature=case["options"].get("temperature", 1.0),
        )
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert_accepted(case, {"value": value, "grad": gradient})


@pytest.mark.parametrize("case", [case for case in load_cases("rewards") if case.id in ("rewards", *OVERLONG)])
def test_overlong(case):
    """The oracle's score is -1 or +1 for the answer, plus the penalty."""
    options, inputs = case["options"], case["inputs"]
    answer = 1.0 if inputs["text"].endswith(inputs["gold"]) else -1.0
    penalty = compute_overlong_penalty(
        torch.tensor([inputs["response_tokens"]]),
        max_tokens=options["max_tokens"],
        buffer_tokens=options["buffer_tokens"],
        factor=options["penalty"],
    )
    assert answer + penalty.item() == pytest.approx(case["expected"]["score"], abs=1e-6)


def test_the_sum_of_squared_probabilities():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [10.0, -torch.inf, -torch.inf, -torch.inf], [1.0, 2.0, 0.0, -1.0]])
    expected = torch.softmax(logits, dim=1).square().sum(dim=1)
    torch.testing.assert_close(compute_sum_pi_squared(logits), expected)
