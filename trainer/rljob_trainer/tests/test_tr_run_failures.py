"""How runs of `python -m rljob_trainer` end when something breaks: exit code, reason, and a message that names it."""

import os
import signal
from pathlib import Path

import pytest
from tr_run import finish, make_assets, shared_ray, start, wait_for_line, write_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    with shared_ray(tmp_path_factory.mktemp("ray")) as started:
        yield started


def test_a_killed_engine_is_reported_with_its_exit_code(ray, assets, tmp_path):
    address, ray_pid = ray
    run, log = tmp_path / "run", tmp_path / "run.log"
    environment = write_job(assets, run, training={"total_steps": 10_000}, cluster={"ranks_per_node": 1})
    process = start(environment | address, log)
    wait_for_line(process, log, "train 1/")
    victims = [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_engine_of(entry, ray_pid)
    ]
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    result = finish(process, log, 74)
    assert result.verdict.reason == "EngineDied"
    assert "engine" in result.verdict.message
    assert f"pid {victims[0]}" in result.verdict.message


def is_engine_of(entry: Path, ancestor: int) -> bool:
    """Whether a process is an engine actor below `ancestor` (several test runs may share the machine)."""
    try:
        if b"EngineActor" not in (entry / "cmdline").read_bytes():
            return False
        parent = int(entry.name)
        while parent > 1:
            if parent == ancestor:
                return True
            status = Path(f"/proc/{parent}/status").read_text()
            parent = int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])
    except (OSError, StopIteration):
        return False
    return False


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
