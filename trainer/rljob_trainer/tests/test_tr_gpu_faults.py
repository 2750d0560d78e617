"""What breaks on GPUs: typed, named, in time, and nothing is left on the cards. Run alone on their GPUs, or all
at once: each then waits until all have left."""

from __future__ import annotations

import os
import signal
import time

import pytest
from test_tr_gpu_runs import ONE_GPU, TWO_GPUS, write_gpu_job
from tr_gpu import list_gpu_pids, needs_gpus, read_used_bytes, wait_until_freed
from tr_run import find_processes, finish, start, wait_for_line

from rljob_trainer.engines.child_guard import read_start_time

pytestmark = [pytest.mark.ray, pytest.mark.slow, *needs_gpus(1, "sglang")]

COLLECTIVE_SECONDS = 20
WITHIN_ROLLOUT_SECONDS = 0.5
END_SECONDS = 30.0
LONG_ROLLOUTS = {
    "rollout": {"max_response_tokens": 90, "samples_per_prompt": 16},
    "training": {"total_steps": 10_000, "collective_timeout_seconds": COLLECTIVE_SECONDS},
    "checkpoint": {"every_steps": 0},
}


@pytest.fixture
def clean_gpus():
    """The GPUs are afterwards what they were before."""
    pids, used = list_gpu_pids(), read_used_bytes()
    yield
    wait_until_freed(used, pids)


@pytest.mark.usefixtures("clean_gpus")
@pytest.mark.parametrize(
    ("cluster", "tensor_parallel_size"),
    [
        pytest.param(ONE_GPU, 1, id="one GPU"),
        pytest.param(TWO_GPUS, 2, id="an engine over two GPUs", marks=needs_gpus(2)),
    ],
)
def test_a_scheduler_that_is_killed_ends_the_run_and_frees_its_gpus(cluster, tensor_parallel_size, assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    sections = LONG_ROLLOUTS | {"rollout": LONG_ROLLOUTS["rollout"] | {"tensor_parallel_size": tensor_parallel_size}}
    process = start(write_gpu_job(assets, run, cluster, sections, compile="Never"), log)
    wait_for_line(process, log, "train 2/")
    time.sleep(WITHIN_ROLLOUT_SECONDS)
    schedulers = find_processes(process.pid, "sglang::scheduler")
    assert len(schedulers) == tensor_parallel_size
    assert set(schedulers) <= list_gpu_pids()
    os.kill(schedulers[-1], signal.SIGKILL)
    result = finish(process, log, 74)
    assert result.verdict.reason == "EngineDied"
    assert f"process {schedulers[-1]} ended" in result.verdict.message


@pytest.mark.usefixtures("clean_gpus")
def test_an_engine_actor_that_is_killed_leaves_no_scheduler(assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    process = start(write_gpu_job(assets, run, ONE_GPU, LONG_ROLLOUTS, compile="Never"), log)
    wait_for_line(process, log, "train 2/")
    (actor,) = find_processes(process.pid, "ray::EngineActor")
    os.kill(actor, signal.SIGKILL)
    result = finish(process, log, 74)
    assert result.verdict.reason == "EngineDied"
    assert f"pid {actor}" in result.verdict.message


@pytest.mark.usefixtures("clean_gpus")
@pytest.mark.parametrize("stopped", [pytest.param(index, marks=needs_gpus(2)) for index in range(2)])
def test_a_rank_that_hangs_in_a_collective_is_named(stopped, assets, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    process = start(write_gpu_job(assets, run, TWO_GPUS, LONG_ROLLOUTS, compile="Never"), log)
    wait_for_line(process, log, "train 2/")
    ranks = find_processes(process.pid, "ray::TrainWorker")
    assert len(ranks) == 2
    os.kill(ranks[stopped], signal.SIGSTOP)
    result = finish(process, log, 75)
    assert result.verdict.reason == "TransientError"
    other = ranks[1 - stopped]
    assert f"pid {ranks[stopped]}" in result.verdict.message
    blamed = result.verdict.message.split(";")[0]
    assert f"pid {other}" not in blamed, result.verdict.message
    deadline = time.monotonic() + END_SECONDS
    while read_start_time(ranks[stopped]) is not None:
        assert time.monotonic() < deadline, "the stopped process outlives the run"
        time.sleep(0.2)
