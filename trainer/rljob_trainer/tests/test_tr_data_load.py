"""Loading prompts: formats, cells, columns, limits, and what the errors say."""

import json
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rljob_api.v1alpha1.data import Data, OverlongPrompts, SupervisedWarmStart
from rljob_trainer.data import load_prompts, load_supervised_rows
from rljob_trainer.data.cells import UnusableCellError, normalise_prompt
from rljob_trainer.errors import DataError
from rljob_trainer.quickstart.model import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_rows(count: int) -> list[dict]:
    return [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "level": n % 3} for n in range(count)]


def load(files, tokenizer, *, show=lambda text: None, check_answer=None, **options):
    files = files if isinstance(files, list) else [files]
    data = Data(train=[str(file) for file in files], **options)
    return load_prompts(data.train, data, tokenizer, show=show, check_answer=check_answer)


def test_jsonl_rows_carry_ids_text_answer_and_other_columns(tmp_path, tokenizer):
    dataset = load(write_jsonl(tmp_path / "a.jsonl", make_rows(3)), tokenizer)
    row = dataset.rows[2]
    assert row.uid == "train/0/2"
    assert row.prompt_text == "<|user|>2 + 1 =<|end|><|assistant|>"
    assert tokenizer.decode(row.prompt_ids) == row.prompt_text
    assert (row.answer, dict(row.fields)) == ("3", {"level": 2})


@pytest.mark.parametrize(
    "prompt",
    [
        "2+2?",
        [{"role": "user", "content": "2+2?"}],
        np.array([{"role": "user", "content": "2+2?"}], dtype=object),
        [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
        [{"role": "user", "content": np.array([{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}])}],
    ],
)
def test_all_spellings_of_a_prompt_give_the_same_message(prompt):
    normalised = normalise_prompt(prompt)
    assert normalised == "2+2?" or normalised == [{"role": "user", "content": "2+2?"}]


def test_text_and_messages_give_the_same_ids(tmp_path, tokenizer):
    rows = {
        "text": [{"prompt": "2+2?", "answer": 4}],
        "messages": [{"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4}],
        "parts": [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}], "answer": 4}],
    }
    ids = [
        load(write_jsonl(tmp_path / f"{name}.jsonl", row), tokenizer).rows[0].prompt_ids for name, row in rows.items()
    ]
    assert ids[0] == ids[1] == ids[2]


def test_parquet_with_nested_messages_over_several_row_groups(tmp_path, tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + {'1' * 200} ="}], "answer": n, "extra": {"index": n}}
        for n in range(50)
    ]
    path = tmp_path / "nested.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    assert pq.ParquetFile(path).num_row_groups == 8
    dataset = load(path, tokenizer)
    assert [row.answer for row in dataset.rows] == list(range(50))
    assert dataset.rows[49].fields == {"extra": {"index": 49}}
    same = load(write_jsonl(tmp_path / "nested.jsonl", rows), tokenizer)
    assert [row.prompt_ids for row in dataset.rows] == [row.prompt_ids for row in same.rows]


def test_parquet_round_trip_through_pandas_arrays(tmp_path, tokenizer):
    messages = np.array([{"role": "user", "content": "2+2?"}], dtype=object)
    pq.write_table(pa.table({"prompt": [messages.tolist()], "answer": [4]}), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet", tokenizer).rows[0].prompt_text == "<|user|>2+2?<|end|><|assistant|>"


def test_saved_dataset_and_its_splits(tmp_path, tokenizer):
    rows = make_rows(5)
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "dict"))
    assert len(load(tmp_path / "one", tokenizer)) == 5
    with pytest.raises(DataError, match=r"spec.data.train\[0\].*splits \['train'\].*dict/train"):
        load(tmp_path / "dict", tokenizer)
    assert len(load(tmp_path / "dict" / "train", tokenizer)) == 5


def test_directory_of_shards_is_read_in_name_order(tmp_path, tokenizer):
    write_jsonl(tmp_path / "b.jsonl", make_rows(2))
    write_jsonl(tmp_path / "a.jsonl", make_rows(3))
    assert [row.answer for row in load(tmp_path, tokenizer).rows] == ["1", "2", "3", "1", "2"]
    pq.write_table(pa.Table.from_pylist(make_rows(1)), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="mixes formats"):
        load(tmp_path, tokenizer)


def test_files_with_other_columns_are_united(tmp_path, tokenizer):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "1", "answer": "2", "extra_info": {"index": 0}}]), first)
    pq.write_table(
        pa.Table.from_pylist([{"extra_info": {"split": "t", "index": 0}, "answer": "3", "prompt": "2"}]), second
    )
    rows = load([first, second], tokenizer).rows
    assert [row.uid for row in rows] == ["train/0/0", "train/1/0"]
    assert [row.fields["extra_info"] for row in rows] == [{"index": 0}, {"split": "t", "index": 0}]


def test_type_conflict_names_both_files(tmp_path, tokenizer):
    first = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": 2}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "1", "answer": "2"}])
    with pytest.raises(DataError) as caught:
        load([first, second], tokenizer)
    assert "a.jsonl row 0" in str(caught.value)
    assert "b.jsonl row 0" in str(caught.value)
    assert "number" in str(caught.value)
    assert "text" in str(caught.value)


def test_missing_file_names_field_path_and_neighbours(tmp_path, tokenizer):
    good = write_jsonl(tmp_path / "train.jsonl", make_rows(1))
    with pytest.raises(DataError) as caught:
        load([good, tmp_path / "trian.jsonl"], tokenizer)
    assert "spec.data.train[1]" in str(caught.value)
    assert "trian.jsonl does not exist" in str(caught.value)
    assert "beside it are train.jsonl" in str(caught.value)


def test_missing_directory_names_what_exists_above(tmp_path, tokenizer):
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"nor does its directory; .* holds data/"):
        load(tmp_path / "dta" / "deep" / "train.jsonl", tokenizer)


def test_pattern_is_not_expanded(tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", make_rows(1))
    with pytest.raises(DataError, match="patterns are not expanded"):
        load(tmp_path / "*.jsonl", tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "Git-LFS pointer.*git lfs pull",
        ),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
        ("a.parquet", b"<!DOCTYPE html><html></html>", "HTML page"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "is empty"),
        ("a.parquet", b'{"prompt": "x"}', "not a Parquet file"),
        ("a.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("a.jsonl", b'[{"prompt": "x"}]', "one JSON array"),
        ("a.jsonl", b'{"prompt": "x", "answer": 1}\n{"prompt": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"prompt": "x", "answer": 1}\n"text"\n', "line 2 is a JSON string"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "compressed"),
        ("a.csv", b"prompt,answer\n", "no known format"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "not UTF-8"),
    ],
)
def test_impostors_are_named(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / name, tokenizer)
    assert "spec.data.train[0]" in str(caught.value)
    assert name in str(caught.value)


def test_byte_order_mark_and_blank_lines_do_no_harm(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": "2"}\n\n{"prompt": "2", "answer": "3"}')
    assert len(load(tmp_path / "a.jsonl", tokenizer)) == 2


def test_raw_gsm8k_schema_is_found_by_its_column_names(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "<<2+2=4>>4\n#### 4"}])
    with pytest.raises(
        DataError, match=r"'prompt' not found.*\['question', 'answer'\].*spec.data.promptField: question"
    ):
        load(path, tokenizer)
    assert load(path, tokenizer, prompt_field="question").rows[0].answer.endswith("#### 4")


def test_missing_answer_column_suggests_one(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2?", "ground_truth": "4"}])
    with pytest.raises(DataError, match=r"'answer' not found.*set spec.data.answerField: ground_truth"):
        load(path, tokenizer)


def test_nested_answer_column(tmp_path, tokenizer):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "2+2?", "reward_model": {"ground_truth": "4", "style": "rule"}}]
    )
    row = load(path, tokenizer, answer_field="reward_model.ground_truth").rows[0]
    assert row.answer == "4"
    assert row.fields == {"reward_model": {"ground_truth": "4", "style": "rule"}}


@pytest.mark.parametrize(("num_tokens", "kept"), [(1023, True), (1024, True), (1025, False)])
def test_length_limit_is_exact_on_the_rendered_ids(tmp_path, tokenizer, num_tokens, kept):
    frame = 3  # <|user|>, <|end|>, <|assistant|>
    rows = [{"prompt": "1" * (num_tokens - frame), "answer": 1}, {"prompt": "1", "answer": 1}]
    dataset = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=1024)
    assert dataset.report.longest_prompt_tokens == num_tokens
    assert len(dataset.rows) == 1 + kept
    assert dataset.report.num_rows_overlong == 1 - kept


def test_overlong_fail_names_row_and_length(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": 1}, {"prompt": "1" * 60, "answer": 1}])
    with pytest.raises(DataError, match=r"a.jsonl row 1 has 63 tokens, spec.data.maxPromptTokens is 32"):
        load(path, tokenizer, max_prompt_tokens=32, overlong_prompts=OverlongPrompts.FAIL)


def test_truncate_left_keeps_the_end(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1" * 60 + "2 + 2 =", "answer": 4}])
    dataset = load(path, tokenizer, max_prompt_tokens=8, overlong_prompts=OverlongPrompts.TRUNCATE_LEFT)
    assert dataset.rows[0].prompt_text == "12 + 2 =<|end|><|assistant|>"
    assert len(dataset.rows[0].prompt_ids) == 8
    assert dataset.report.num_rows_truncated == 1


def test_everything_dropped_is_an_error_with_the_length_that_works(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(3))
    with pytest.raises(DataError, match=r"0 rows left of 3: 3 are longer.*maxPromptTokens: 8 keeps"):
        load(path, tokenizer, max_prompt_tokens=4)


def test_report_counts_and_shows_examples(tmp_path, tokenizer):
    rows = make_rows(299)
    rows[7]["prompt"] = "1" * 100
    rows[9]["answer"] = None
    rows[11]["prompt"] = " "
    shown: list[str] = []
    dataset = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=64, show=shown.append)
    assert len(dataset) == 296
    assert dataset.report.unusable == {"answer is null": 1, "prompt is empty": 1}
    text = "\n".join(shown)
    assert "296 of 299 rows used" in text
    assert "1 of 299 dropped" in text
    assert "row 7 has 103 tokens" in text
    assert "row 9" in text
    assert "train/0/298" in {row.uid for row in dataset.rows}  # dropping rows renames no other


@pytest.mark.parametrize("answer", [None, "", "  ", float("nan")])
def test_more_than_one_percent_of_unusable_rows_is_an_error(tmp_path, tokenizer, answer):
    rows = make_rows(50)
    rows[5]["answer"] = answer
    with pytest.raises(DataError, match=r"1 of 50 rows are unusable, more than 1%.*row 5"):
        load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)


def test_gold_answers_are_checked_by_the_reward(tmp_path, tokenizer):
    rows = make_rows(200)
    rows[5]["answer"] = "five"
    check = lambda answer: None if answer.isdigit() else "no number"  # noqa: E731
    dataset = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, check_answer=check)
    assert dataset.report.unusable == {"no number": 1}


def test_image_part_is_refused_with_its_row(tmp_path, tokenizer):
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "x.png"}]
    rows = [*make_rows(1), {"prompt": [{"role": "user", "content": parts}], "answer": "a cat"}]
    with pytest.raises(DataError, match=r"row 1.*'image'.*only text"):
        load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)


def test_without_a_template_text_works_and_messages_do_not(tmp_path):
    bare = build_tokenizer()
    bare.chat_template = None
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2?", "answer": 4}])
    assert load(path, bare).rows[0].prompt_text == "2+2?"
    messages = write_jsonl(tmp_path / "b.jsonl", [{"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4}])
    with pytest.raises(DataError, match=r"no chat template; set spec.data.chatTemplate"):
        load(messages, bare)
    with pytest.raises(DataError, match=r"spec.data.systemPrompt is set"):
        load(path, bare, system_prompt="Be brief.")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    row = load(messages, bare, chat_template=template).rows[0]
    assert row.prompt_text == "[user]2+2?>"


def test_system_prompt_stands_before_text_prompts(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2?", "answer": 4}])
    row = load(path, tokenizer, system_prompt="Be brief.").rows[0]
    assert row.prompt_text == "<|system|>Be brief.<|end|><|user|>2+2?<|end|><|assistant|>"


def test_same_text_twice_keeps_two_uids(tmp_path, tokenizer):
    rows = load(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2?", "answer": 4}] * 2), tokenizer).rows
    assert rows[0].prompt_ids == rows[1].prompt_ids
    assert rows[0].uid != rows[1].uid


def test_unusual_messages_are_unusable_not_guessed():
    for prompt in (None, 5, [], [{"role": "user"}], [{"role": "alien", "content": "x"}], ["text"]):
        with pytest.raises(UnusableCellError):
            normalise_prompt(prompt)


def test_demonstrations_end_with_the_end_token(tmp_path, tokenizer):
    rows = [{"prompt": "1 + 1 =", "response": "2"}, {"prompt": "1 + 2 =", "response": "3<|end|>"}]
    path = write_jsonl(tmp_path / "w.jsonl", rows)
    data = Data(train=["unused"])
    warm_start = SupervisedWarmStart(data=[path], steps=1)
    loaded = load_supervised_rows(warm_start, data, tokenizer, show=lambda text: None)
    assert [tokenizer.decode(row.response_ids) for row in loaded] == ["2<|end|>", "3<|end|>"]
    assert tokenizer.decode(loaded[0].prompt_ids) == "<|user|>1 + 1 =<|end|><|assistant|>"
    with pytest.raises(DataError, match=r"spec.warmStart.supervised.data\[0\].*'target'.*responseField: response"):
        load_supervised_rows(
            SupervisedWarmStart(data=[path], steps=1, response_field="target"), data, tokenizer, show=lambda text: None
        )


def test_unreadable_directory_entry_is_an_error_not_a_crash(tmp_path, tokenizer):
    os.symlink(tmp_path / "nowhere", tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "train.jsonl", tokenizer)
