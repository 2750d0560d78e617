"""How runs of `python -m rljob_trainer` end when something breaks: exit code, reason, and a message that names it."""

import os
import signal

import pytest
from tr_run import find_processes, finish, start, wait_for_line, write_job

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]


def test_a_killed_engine_is_reported_with_its_exit_code(ray, assets, tmp_path):
    address, ray_pid = ray
    run, log = tmp_path / "run", tmp_path / "run.log"
    environment = write_job(assets, run, training={"total_steps": 10_000}, cluster={"ranks_per_node": 1})
    process = start(environment | address, log)
    wait_for_line(process, log, "train 1/")
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
