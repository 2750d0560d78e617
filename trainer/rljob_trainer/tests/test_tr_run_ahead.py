"""Whole runs with `placement: Separate`: rollout beside training, stopped and resumed, and with a killed engine."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tr_run import find_processes, finish, read_lines, write_job

from rljob_trainer.config import load_job
from rljob_trainer.inputs import load_inputs

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]

NUM_STEPS = 5
SECTIONS = {
    "rollout": {"placement": "Separate", "max_concurrent_samples": 4, "max_response_tokens": 24},
    "training": {"total_steps": NUM_STEPS, "mini_batch_prompts": 2, "learning_rate": 3e-3, "schedule": "Linear"},
    "evaluation": {"every_steps": 3, "before_training": False, "temperature": 1.0},
    "checkpoint": {"every_steps": 0, "export_at_end": False},
    "cluster": {"ranks_per_node": 1},
}
WITNESS = Path(__file__).with_name("tr_witness.py")
ACTORS = ("ray::TrainWorker", "ray::EngineActor")
GONE_SECONDS = 60.0


def run_witnessed(environment, log, events, expected_code, action=""):
    """The result of the run, and its events."""
    with log.open("w") as file:
        command = [sys.executable, str(WITNESS), str(events), action]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    result = finish(process, log, expected_code)
    return result, [json.loads(line) for line in events.read_text().splitlines()]


def list_prompts_by_step(run):
    """Step -> uids of the prompts it trained on."""
    prompts = {}
    for row in read_lines(run / "samples.jsonl"):
        if row["kind"] == "train":
            prompts.setdefault(row["step"], {})[row["uid"]] = None
    return {step: list(uids) for step, uids in prompts.items()}


def test_rollout_runs_beside_training_and_a_resumed_run_loses_no_prompt(ray, assets, tmp_path):
    address, _ = ray
    run = tmp_path / "run"
    environment = write_job(assets, run, **SECTIONS) | address
    result, events = run_witnessed(environment, tmp_path / "first.log", tmp_path / "first.events", 143, "stop")
    stopped_at = result.progress.checkpoint.step
    assert stopped_at == 2
    check_events(events, range(1, stopped_at + 1))

    environment |= {"RLJOB_ATTEMPT": "2", "RLJOB_RESUME_FLOOR_STEP": str(stopped_at)}
    result, events = run_witnessed(environment, tmp_path / "second.log", tmp_path / "second.events", 0)
    assert result.progress.resumed_from_step == stopped_at
    check_events(events, range(stopped_at + 1, NUM_STEPS + 1))

    # The prompts of an uninterrupted run, whatever was drawn ahead when it stopped.
    inputs = load_inputs(load_job(environment), lambda _: None)
    expected = {
        step: [inputs.train.rows[index].uid for index in inputs.sampler.next_batch()]
        for step in range(1, NUM_STEPS + 1)
    }
    assert list_prompts_by_step(run) == expected

    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "reward_mean" in row]
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    # The first step of an attempt starts with samples of the policy as it is.
    fresh = {1, stopped_at + 1}
    assert {row["step"]: row["staleness_steps"] for row in steps} == {
        step: int(step not in fresh) for step in range(1, NUM_STEPS + 1)
    }
    assert [row["step"] for row in rows if "evaluation_reward_mean" in row] == [3, NUM_STEPS]
    # The engines hold the weights that the step started from; nothing is generated beside the last one.
    assert [row["weight_version"] for row in steps] == [1, 2, 3, 4, NUM_STEPS - 1]
    # Stale samples are weighted, without having been asked for; the first step's weights are 1 but for rounding.
    weights = {row["step"]: row["correction_weight_mean"] for row in steps}
    assert weights[1] == pytest.approx(1, abs=1e-3)
    assert any(abs(weights[step] - 1) > 1e-3 for step in weights if step not in fresh)
    assert all(row["num_updates"] == 2 and row["loss"] is not None for row in steps)


def check_events(events, steps):
    """Order and versions of an attempt that trained `steps`."""
    first, last = steps[0], steps[-1]
    versions = {event[1]: event[2] for event in events if event[0] == "versions"}
    assert {step: versions[step] for step in steps} == {step: [step if step == first else step - 1] for step in steps}
    for step in steps:
        if step == NUM_STEPS:
            continue
        order = [tuple(event) for event in events]
        begun, sampled, ended = ("update begins", step), ("first sample", step + 1), ("update ended", step)
        assert order.index(sampled) < order.index(ended), f"step {step + 1} was generated after step {step}'s update"
        assert order.index(begun) < order.index(ended)
    assert ("first sample", last + 2) not in [tuple(event) for event in events], "at most one step ahead"


def test_an_engine_that_dies_beside_the_training_ends_the_run(ray, assets, tmp_path):
    address, ray_pid = ray
    environment = write_job(assets, tmp_path / "run", **SECTIONS) | address
    result, events = run_witnessed(environment, tmp_path / "run.log", tmp_path / "run.events", 74, "kill-engine")
    assert result.verdict.reason == "EngineDied"
    assert "engine 0" in result.verdict.message
    kinds = [tuple(event[:2]) for event in events]
    assert ("update ended", 2) in kinds, "the step that was training is finished first"
    assert ("update begins", 3) not in kinds
    deadline = time.monotonic() + GONE_SECONDS
    while left := find_processes(ray_pid, *ACTORS):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)
