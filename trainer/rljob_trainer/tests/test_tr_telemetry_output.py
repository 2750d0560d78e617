"""JSON lines, console and closing summary."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console as RichConsole

from rljob_trainer.telemetry import Console, MetricsWriter, SampleRecord, SampleWriter, StepStatistics, write_summary
from rljob_trainer.telemetry.console import describe_step, format_duration
from rljob_trainer.telemetry.summary import CURVE_FILE, read_series
from rljob_trainer.telemetry.writers import read_metrics


def read_strictly(path):
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in path.read_text().splitlines()
    ]


def test_lines_are_strict_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            {
                "step": 1,
                "reward_mean": math.nan,
                "kl": np.float32(np.inf),
                "means": {"a": -math.inf, 1: [np.int64(3), (0.5, None)]},
                "array": np.array([1.0, np.nan]),
                "text": "ü",
                "path": tmp_path,
            }
        )
    assert read_strictly(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "reward_mean": None,
            "kl": None,
            "means": {"a": None, "1": [3, [0.5, None]]},
            "array": [1.0, None],
            "text": "ü",
            "path": str(tmp_path),
        }
    ]


def test_a_resumed_run_repeats_no_line_and_drops_a_torn_one(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write({"step": step, "attempt": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    with MetricsWriter(tmp_path, resumed_from_step=3) as writer:
        writer.write({"step": 4, "attempt": 2})
    rows = read_strictly(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_a_run_from_the_beginning_starts_a_new_file(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path) as writer:
            writer.write({"step": 1})
    assert len(read_strictly(tmp_path / "metrics.jsonl")) == 1


def test_lines_are_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1})
    assert len(read_metrics(tmp_path)) == 1
    writer.close()


def test_samples(tmp_path):
    with SampleWriter(tmp_path) as writer:
        writer.write_samples(
            2, [SampleRecord("train/0/1", "2+2?", "4", 1.0, 4), SampleRecord("train/0/2", "?", "", None)]
        )
    rows = read_strictly(tmp_path / "samples.jsonl")
    assert rows[0] == {
        "step": 2,
        "kind": "train",
        "uid": "train/0/1",
        "prompt": "2+2?",
        "response": "4",
        "reward": 1.0,
        "answer": 4,
    }
    assert rows[1]["reward"] is None


def test_samples_say_what_each_function_found(tmp_path):
    with SampleWriter(tmp_path) as writer:
        record = SampleRecord("u", "p", "r", None, 4, {"math": 1.0, "style": None}, "4", "style: Timeout: late")
        writer.write_samples(1, [record])
    (row,) = read_strictly(tmp_path / "samples.jsonl")
    assert row["scores"] == {"math": 1.0, "style": None}
    assert row["prediction"] == "4"
    assert row["failure"] == "style: Timeout: late"


def test_step_line_has_reward_speed_phases_and_eta():
    statistics = StepStatistics(step=3, step_seconds=2.0, num_tokens=5000, reward_mean=0.5, num_dropped_samples=2)
    text = describe_step(statistics, phase_seconds={"train": 0.7, "rollout": 1.2, "sync": 0.01}, seconds_left=65.4)
    assert text == "reward 0.500  2,500 tok/s  2.0 s (rollout 1.2, train 0.7)  2 samples dropped  ETA 1:05"
    bare = StepStatistics(step=3, step_seconds=0.0, num_tokens=0, reward_mean=math.nan)
    assert describe_step(bare, phase_seconds={}, seconds_left=None) == "reward n/a  0.0 s"
    assert format_duration(3725) == "1:02:05"


def test_without_a_terminal_plain_lines_are_printed():
    out = io.StringIO()
    with Console(console=RichConsole(file=out, force_terminal=False, soft_wrap=True, highlight=False)) as console:
        console.start("warm start", total=100)
        for step in range(1, 101):
            console.update(step, 100, f"loss {step}", every=50)
        console.start("train", total=2)
        console.show_step(
            StepStatistics(step=1, step_seconds=1.0, num_tokens=10, reward_mean=1.0),
            total_steps=2,
            phase_seconds={},
            seconds_left=1.0,
        )
        console.note("a [bold]note[/bold]")
    assert out.getvalue().splitlines() == [
        "warm start 1/100  loss 1",
        "warm start 50/100  loss 50",
        "warm start 100/100  loss 100",
        "train 1/2  reward 1.000  10 tok/s  1.0 s  ETA 0:01",
        "a [bold]note[/bold]",
    ]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_a_bar_is_drawn():
    out = io.StringIO()
    with Console(console=RichConsole(file=out, force_terminal=True, width=120)) as console:
        console.start("train", total=2)
        console.update(1, 2, "reward 0.5")
        console.note("between")
    text = out.getvalue()
    assert "1/2" in text
    assert "reward 0.5" in text
    assert "between" in text


def test_summary_tells_first_and_last_reward_and_draws_the_curve(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 0, "evaluation_reward_mean": 0.1})
        for step, reward in ((1, 0.2), (2, math.nan), (3, 0.9)):
            writer.write({"step": step, "reward_mean": reward, "num_tokens": 1000, "step_seconds": 0.5})
        writer.write({"step": 3, "evaluation_reward_mean": 0.95})
    text = write_summary(tmp_path, name="demo", seconds=75, checkpoint_path="/x/step-3", export_path="/x/export")
    assert "Finished demo: 3 steps in 1:15" in text
    assert "0.100 -> 0.950" in text
    assert "0.200 -> 0.900" in text
    assert "2,000 tokens/s" in text
    assert "/x/step-3" in text
    assert (tmp_path / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    series = read_series(read_metrics(tmp_path), "reward_mean")
    assert (series.steps, series.values) == ([1, 3], [0.2, 0.9])


def test_summary_of_a_run_without_steps(tmp_path):
    text = write_summary(tmp_path, name="demo", seconds=1, checkpoint_path=None)
    assert "n/a" in text
    assert not (tmp_path / CURVE_FILE).exists()
