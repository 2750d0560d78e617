"""Whole runs of `python -m rljob_trainer` with two FSDP2 ranks: on a Ray of their own, stopped, and resumed."""

import signal

import pytest
import torch
from tr_run import (
    TOTAL_STEPS,
    finish,
    read_lines,
    read_weights,
    shared_ray,
    start,
    wait_for_line,
    write_job,
)

from rljob_api.contract import TrainerState

TRACKING = {"tensorboard": True}
pytestmark = [pytest.mark.runs, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def uninterrupted(assets, tmp_path_factory):
    """One run from beginning to end."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    log = run.with_suffix(".log")
    return run, finish(start(write_job(assets, run, tracking=TRACKING), log), log, 0), log


def test_a_whole_run_leaves_everything_in_place(uninterrupted, assets):
    run, result, log = uninterrupted
    assert result.progress.state is TrainerState.SUCCEEDED
    assert result.progress.progress.step == result.progress.progress.total_steps == TOTAL_STEPS
    assert result.progress.checkpoint is not None
    assert result.progress.checkpoint.step == TOTAL_STEPS
    assert result.progress.progress.weight_version == TOTAL_STEPS + 1
    assert sorted(path.name for path in run.glob("step-*")) == ["step-3", "step-4"]
    assert (run / "latest").read_text() == "step-4\n"
    assert (run / "reward.png").stat().st_size > 0
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward_mean" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "evaluation_reward_mean" in row] == [0, 2, 4]
    steps = [row for row in rows if "reward_mean" in row]
    assert {row["num_updates"] for row in steps} == {2}
    assert all(row["num_samples"] == 16 for row in steps)
    # Two updates per rollout: the second one moves away from ratio 1, and the reference from KL 0.
    assert all(row["ratio_max_deviation"] > 1e-4 for row in steps[:-1])  # the last learning rate is 0
    # The reference is the policy after the warm start: step 1 starts at KL 0 to it.
    assert steps[0]["kl_mean"] < min(0.1, steps[-1]["kl_mean"])
    assert [row["learning_rate"] for row in steps] == pytest.approx([3e-3 * (1 - step / 4) for step in range(1, 5)])
    exported = read_weights(run / "export" / "step-4")
    initial = read_weights(assets / "model")
    assert any(not torch.equal(exported[name], initial[name]) for name in exported)
    assert "warm start 3/3" in log.read_text()
    # One validation file is one set, named after it.
    sets = [row["evaluation"] for row in rows if "evaluation_reward_mean" in row]
    assert [list(entry) for entry in sets] == [["validation"]] * 3
    assert all(entry["validation"]["num_samples"] == 6 for entry in sets)
    assert all(0 <= entry["validation"]["pass_at_1"] <= 1 for entry in sets)
    assert read_tensorboard(run, "train/reward_mean") == [1, 2, 3, 4]
    assert read_tensorboard(run, "evaluation/validation/reward_mean") == [0, 2, 4]


def read_tensorboard(run, tag):
    """Steps of a scalar in the event files of all attempts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_a_stopped_run_resumes_as_if_nothing_had_happened(uninterrupted, assets, tmp_path):
    """SIGTERM after one or more steps: 143 and a checkpoint; the second attempt ends exactly where the first would.

    Both attempts run on one Ray that outlives them, as the retry of an operator does.
    """
    whole, _, _ = uninterrupted
    run, log = tmp_path / "run", tmp_path / "first.log"
    with shared_ray(tmp_path) as (address, _):
        # Saves only when stopped: what is on disk then is what the stop wrote.
        environment = write_job(assets, run, checkpoint={"every_steps": 0}, tracking=TRACKING) | address
        process = start(environment, log)
        wait_for_line(process, log, f"train 1/{TOTAL_STEPS}")
        process.send_signal(signal.SIGTERM)
        result = finish(process, log, 143)
        assert result.verdict.reason == "Stopped"
        assert result.progress.state is TrainerState.STOPPED
        stopped_at = result.progress.checkpoint.step
        assert 1 <= stopped_at < TOTAL_STEPS
        assert (run / "latest").read_text() == f"step-{stopped_at}\n"

        log = tmp_path / "second.log"
        environment |= {"RLJOB_ATTEMPT": "2", "RLJOB_RESUME_FLOOR_STEP": str(stopped_at)}
        result = finish(start(environment, log), log, 0)
    assert result.progress.attempt == 2
    assert result.progress.resumed_from_step == stopped_at
    assert "warm start" not in log.read_text()
    assert read_lines(run / "metrics.jsonl") == read_lines(whole / "metrics.jsonl")
    assert read_lines(run / "samples.jsonl") == read_lines(whole / "samples.jsonl")
    assert read_tensorboard(run, "train/reward_mean") == [1, 2, 3, 4]
    expected = read_weights(whole / "export" / f"step-{TOTAL_STEPS}")
    for name, tensor in read_weights(run / "export" / f"step-{TOTAL_STEPS}").items():
        assert torch.equal(tensor, expected[name]), name
