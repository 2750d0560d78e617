"""The quickstart's assets: a loadable model, a lossless tokenizer, and a task whose split is clean."""

import json

import pytest

from rljob_trainer.quickstart.__main__ import main
from rljob_trainer.quickstart.task import (
    CORRECT_SHARE,
    NUM_PROBLEMS,
    NUM_VALIDATION_PROBLEMS,
    demonstrate,
    draw_problems,
    split_problems,
)
from rljob_trainer.rewards.gsm8k import score_gsm8k


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    directory = tmp_path_factory.mktemp("assets")
    assert main([str(directory), "--seed", "3"]) == 0
    return directory


def read(directory, name):
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def test_held_out_problems_are_never_trained_on_or_demonstrated(assets):
    train, validation, warm_start = (read(assets, name) for name in ("train", "validation", "warmstart"))
    held_out = {row["prompt"] for row in validation}
    assert len(held_out) == NUM_VALIDATION_PROBLEMS
    assert len({row["prompt"] for row in train}) == NUM_PROBLEMS - NUM_VALIDATION_PROBLEMS
    assert held_out.isdisjoint({row["prompt"] for row in train})
    assert {row["prompt"] for row in warm_start} == {row["prompt"] for row in train}


def test_answers_are_right_and_the_teacher_is_mostly_off_by_one(assets):
    answers = {}
    for row in [*read(assets, "train"), *read(assets, "validation")]:
        left, right = row["prompt"].removesuffix(" =").split(" + ")
        assert int(row["answer"]) == int(left) + int(right)
        answers[row["prompt"]] = int(row["answer"])
    errors = [int(row["response"]) - answers[row["prompt"]] for row in read(assets, "warmstart")]
    assert set(errors) == {0, 1}
    assert errors.count(0) / len(errors) == pytest.approx(CORRECT_SHARE, abs=0.02)
    scored = [score_gsm8k(row["response"], answers[row["prompt"]], flexible=True) for row in read(assets, "warmstart")]
    assert sum(scored) == errors.count(0)


def test_same_seed_same_task():
    problems = draw_problems(5, 50)
    assert problems == draw_problems(5, 50)
    assert problems != draw_problems(6, 50)
    train, _ = split_problems(problems, 10)
    assert demonstrate(train, 1) == demonstrate(train, 1)


def test_more_problems_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr("rljob_trainer.quickstart.task._MAX_DRAWS", 20_000)
    with pytest.raises(ValueError, match="901 distinct problems wanted"):
        draw_problems(0, 901)


def test_model_and_tokenizer_load_and_agree(assets):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    assert model.config.model_type == "qwen2"
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert model.config.vocab_size == len(tokenizer)
    assert GenerationConfig.from_pretrained(assets / "model").eos_token_id == [tokenizer.eos_token_id]
    for text in ("12 + 30 =", "-7 - 5", "42", "Any text: Ü, 数, \n tabs\t."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12 + 30 ="}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode([*tokenizer("42")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "42"
    assert all((path.stat().st_mode & 0o044) == 0o044 for path in (assets / "model").iterdir())
