"""How runs of `python -m rljob_trainer` end when something breaks: exit code, reason, and a message that names it."""

import os
import signal

import pytest
from tr_run import find_processes, finish, start, wait_for_line, write_job

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]


def test_a_silence_leaves_stacks_and_a_killed_engine_is_reported_with_its_exit_code(ray, assets, tmp_path):
    address, ray_pid = ray
    run, log = tmp_path / "run", tmp_path / "run.log"
    environment = write_job(
        assets,
        run,
        training={"total_steps": 10_000},
        cluster={"ranks_per_node": 1},
        failure_policy={"stall_timeout_seconds": 5},
    )
    process = start(environment | address, log)
    wait_for_line(process, log, "train 1/")
    (rank,) = find_processes(ray_pid, "ray::TrainWorker")
    os.kill(rank, signal.SIGSTOP)
    try:
        wait_for_line(process, log, "no answer within 10 s")
    finally:
        os.kill(rank, signal.SIGCONT)
    text = log.read_text()
    assert "stacks of the driver:\nthread MainThread:\n" in text
    assert "stacks of rank 0 (" in text
    assert f"pid {rank}" in text
    victims = find_processes(ray_pid, "ray::EngineActor")
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    result = finish(process, log, 74)
    assert result.verdict.reason == "EngineDied"
    assert "engine" in result.verdict.message
    assert f"pid {victims[0]}" in result.verdict.message


def test_a_failing_reward_function_ends_with_its_traceback(ray, assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    (tmp_path / "reward.py").write_text("def score(prompt, response, answer, **row):\n    return row['missing']\n")
    reward = {"functions": [{"type": "Python", "path": str(tmp_path / "reward.py")}]}
    result = finish(start(write_job(assets, run, reward=reward) | ray[0], log), log, 73)
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
