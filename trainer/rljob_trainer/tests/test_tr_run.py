"""Whole runs of `python -m rljob_trainer` on a local Ray with two FSDP2 ranks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tr_job import build_job
from tr_tiny import save_byte_model

from rljob_api.contract import Result, TrainerState, find_result
from rljob_trainer.models.policy import load_causal_lm

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

REWARD = """
def score(prompt, response, answer, **row):
    return sum(map(ord, response)) % 7 / 7 + (answer in response)  # differs within a group, also untrained
"""
TIMED_KEYS = {"step_seconds"}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    directory = tmp_path_factory.mktemp("assets")
    save_byte_model(directory / "model")
    rng = random.Random(0)
    rows = [{"prompt": f"{rng.randrange(10)} {rng.randrange(10)}", "answer": str(row % 4)} for row in range(24)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    demonstrations = [{"prompt": row["prompt"], "response": f"{row['answer']}1"} for row in rows]
    (directory / "warm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    (directory / "reward.py").write_text(REWARD)
    return directory


def write_job(assets: Path, run: Path, **sections) -> dict[str, str]:
    """A job with every optional pass: warm start, two mini-batches, KL in the loss, evaluation, checkpoints."""
    settings = {
        "algorithm": {"kl": {"placement": "Loss", "coefficient": 0.01}},
        "data": {"validation": [str(assets / "validation.jsonl")]},
        "reward": {"functions": [{"type": "Python", "path": str(assets / "reward.py")}]},
        "training": {"total_steps": 6, "mini_batch_prompts": 2, "learning_rate": 3e-3, "schedule": "Linear"},
        "evaluation": {"every_steps": 2, "temperature": 1.0},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "tracking": {"sample_every_steps": 1},
    }
    for name, values in sections.items():
        settings[name] = settings.get(name, {}) | values
    job = build_job(
        run_directory=str(run),
        model=str(assets / "model"),
        train=str(assets / "train.jsonl"),
        spec={"warm_start": {"supervised": {"data": [str(assets / "warm.jsonl")], "steps": 3, "rows_per_step": 8}}},
        **settings,
    )
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.parent / f"{run.name}.json"
    path.write_text(job.model_dump_json(exclude_none=True))
    return dict(os.environ) | {"RLJOB_CONFIG": str(path)}


def start(environment: dict[str, str], log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "rljob_trainer"], env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen, log: Path, expected: int) -> Result:
    code = process.wait(timeout=600)
    text = log.read_text()
    assert code == expected, text[-6000:]
    assert text.rstrip().splitlines()[-1].startswith('{"rljobResult":')
    result = find_result(text)
    assert result is not None
    assert result.verdict.exit_code == expected
    return result


def wait_for_line(process: subprocess.Popen, log: Path, marker: str) -> None:
    deadline = time.monotonic() + 600
    while marker not in log.read_text():
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.02)


def read_lines(path: Path) -> list[dict]:
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMED_KEYS}
        for line in path.read_text().splitlines()
    ]


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_causal_lm(str(directory)).named_parameters())


@pytest.fixture(scope="module")
def uninterrupted(assets, tmp_path_factory):
    """One run from beginning to end."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    log = run.with_suffix(".log")
    return run, finish(start(write_job(assets, run), log), log, 0), log


def test_a_whole_run_leaves_everything_in_place(uninterrupted, assets):
    run, result, log = uninterrupted
    assert result.progress.state is TrainerState.SUCCEEDED
    assert result.progress.progress.step == result.progress.progress.total_steps == 6
    assert result.progress.checkpoint is not None
    assert result.progress.checkpoint.step == 6
    assert result.progress.progress.weight_version == 7
    assert sorted(path.name for path in run.glob("step-*")) == ["step-4", "step-6"]
    assert (run / "latest").read_text() == "step-6\n"
    assert (run / "reward.png").stat().st_size > 0
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward_mean" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "evaluation_reward_mean" in row] == [0, 2, 4, 6]
    steps = [row for row in rows if "reward_mean" in row]
    assert {row["num_updates"] for row in steps} == {2}
    assert all(row["num_samples"] == 16 for row in steps)
    # Two updates per rollout: the second one moves away from ratio 1, and the reference from KL 0.
    assert all(row["ratio_max_deviation"] > 1e-4 for row in steps[:-1])  # the last learning rate is 0
    # The reference is the policy after the warm start: step 1 starts at KL 0 to it.
    assert steps[0]["kl_mean"] < min(0.1, steps[-1]["kl_mean"])
    assert [row["learning_rate"] for row in steps] == pytest.approx([3e-3 * (1 - step / 6) for step in range(1, 7)])
    exported = read_weights(run / "export" / "step-6")
    initial = read_weights(assets / "model")
    assert any(not torch.equal(exported[name], initial[name]) for name in exported)
    assert "warm start 3/3" in log.read_text()


def test_a_stopped_run_resumes_as_if_nothing_had_happened(uninterrupted, assets, tmp_path):
    """SIGTERM after two or more steps: 143 and a checkpoint; the second attempt ends exactly where the first would."""
    whole, _, _ = uninterrupted
    run, log = tmp_path / "run", tmp_path / "first.log"
    environment = write_job(assets, run)
    process = start(environment, log)
    wait_for_line(process, log, "train 1/6")
    process.send_signal(signal.SIGTERM)
    result = finish(process, log, 143)
    assert result.verdict.reason == "Stopped"
    assert result.progress.state is TrainerState.STOPPED
    stopped_at = result.progress.checkpoint.step
    assert 1 <= stopped_at < 6
    assert (run / "latest").read_text() == f"step-{stopped_at}\n"

    log = tmp_path / "second.log"
    environment |= {"RLJOB_ATTEMPT": "2", "RLJOB_RESUME_FLOOR_STEP": str(stopped_at)}
    result = finish(start(environment, log), log, 0)
    assert result.progress.attempt == 2
    assert result.progress.resumed_from_step == stopped_at
    assert "warm start" not in log.read_text()
    assert read_lines(run / "metrics.jsonl") == read_lines(whole / "metrics.jsonl")
    assert read_lines(run / "samples.jsonl") == read_lines(whole / "samples.jsonl")
    expected = read_weights(whole / "export" / "step-6")
    for name, tensor in read_weights(run / "export" / "step-6").items():
        assert torch.equal(tensor, expected[name]), name


def test_a_killed_engine_is_reported_with_its_exit_code(assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    environment = write_job(assets, run, training={"total_steps": 10_000}, cluster={"ranks_per_node": 1})
    process = start(environment, log)
    wait_for_line(process, log, "train 1/")
    victims = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_engine_of(entry, process.pid)
    ]
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    result = finish(process, log, 74)
    assert result.verdict.reason == "EngineDied"
    assert "engine" in result.verdict.message
    assert f"pid {victims[0]}" in result.verdict.message


def is_engine_of(entry: Path, driver: int) -> bool:
    """Whether a process is an engine actor below the driver (several test runs may share the machine)."""
    try:
        if b"EngineActor" not in (entry / "cmdline").read_bytes():
            return False
        parent = int(entry.name)
        while parent > 1:
            if parent == driver:
                return True
            status = Path(f"/proc/{parent}/status").read_text()
            parent = int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])
    except (OSError, StopIteration):
        return False
    return False


def test_a_failing_reward_function_ends_with_its_traceback(assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    (tmp_path / "reward.py").write_text("def score(prompt, response, answer, **row):\n    return row['missing']\n")
    reward = {"functions": [{"type": "Python", "path": str(tmp_path / "reward.py")}]}
    result = finish(start(write_job(assets, run, reward=reward), log), log, 73)
    assert result.verdict.reason == "RewardFunctionError"
    assert "KeyError" in result.verdict.message


def test_missing_data_fails_before_anything_is_started(assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    environment = write_job(assets, run, data={"train": [str(assets / "trian.jsonl")]})
    result = finish(start(environment, log), log, 65)
    assert result.verdict.reason == "InvalidData"
    assert "spec.data.train[0]" in result.verdict.message
    assert "train.jsonl" in result.verdict.message
    assert not run.exists()
