"""Entry point: configuration errors, verdicts, stop requests."""

import json
import os
import re
import subprocess
import sys
import threading

import pytest

from rljob_api.contract import TrainerState, find_result
from rljob_trainer import __main__ as entry
from rljob_trainer.config import build_loss_settings, compute_updates_per_rollout, load_job
from rljob_trainer.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    EngineDied,
    GPUMemoryError,
    NumericalError,
    RewardError,
    StopRequested,
    TransientError,
)
from rljob_trainer.stopping import StopSignal


def write_job(tmp_path, job):
    path = tmp_path / "job.json"
    path.write_text(job.model_dump_json(exclude_none=True))
    return {"RLJOB_CONFIG": str(path)}


def test_a_job_is_loaded_and_paths_become_absolute(tmp_path, make_job, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    job = load_job(write_job(tmp_path, make_job(run_directory="runs/tiny")))
    assert job.spec.model.source == str(tmp_path / "model")
    assert job.paths.run_directory == str(tmp_path / "runs/tiny")
    loss = build_loss_settings(job)
    assert (loss.options.clip_low, loss.options.clip_high, loss.norm_tokens) == (0.2, 0.2, 5)
    assert compute_updates_per_rollout(job) == 1


def test_the_environment_wins(tmp_path, make_job):
    environment = write_job(tmp_path, make_job(run_directory="x"))
    job = load_job(environment | {"RLJOB_ATTEMPT": "3", "RLJOB_RESUME_FLOOR_STEP": "40"})
    assert (job.attempt, job.resume_floor_step) == (3, 40)
    with pytest.raises(ConfigurationError, match="RLJOB_ATTEMPT='three'"):
        load_job(environment | {"RLJOB_ATTEMPT": "three"})


def edit(path, value):
    def change(document):
        target = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(["spec", "rollout", "temprature"], 1), "spec.rollout.temprature"),
        (edit(["spec", "training", "promptsPerStep"], "many"), "spec.training.promptsPerStep"),
        (edit(["spec", "network", "fabric"], "RoCE"), "spec.network.fabric"),
        (edit(["spec", "rollout", "maxStalenessSteps"], 1), "spec.rollout.maxStalenessSteps: 1"),
        (edit(["layout", "engineGpusPerNode"], 1), "layout.engineGpusPerNode: 1 does not fit"),
        (edit(["spec", "training", "miniBatchPrompts"], 3), "miniBatchPrompts: 3 does not divide"),
        (edit(["spec", "training", "totalEpochs"], 1), "exactly one of totalSteps and totalEpochs"),
        (edit(["layout", "worldSize"], 3), "layout.worldSize: 3"),
        (edit(["layout", "gpusPerNode"], 1), "ranksPerNode: 2 ranks and 0 GPUs for engines on 1 GPUs"),
        (edit(["layout", "tensorParallelSize"], 2), "tensorParallelSize"),
    ],
)
def test_bad_jobs_name_their_field(tmp_path, make_job, change, message):
    document = json.loads(make_job(run_directory="x").model_dump_json(exclude_none=True))
    change(document)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError) as caught:
        load_job({"RLJOB_CONFIG": str(path)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "placement", "message"),
    [
        ({"ranks": 6, "engine_gpus": 2, "gpus": 8}, "Separate", None),
        ({"ranks": 8, "engine_gpus": 0, "gpus": 8}, "Colocated", None),
        ({"ranks": 2, "engine_gpus": 0, "gpus": 0}, "Separate", None),
        # A GPU that nobody uses, that two would use, and engines that would share GPUs and yet run ahead.
        ({"ranks": 6, "engine_gpus": 0, "gpus": 8}, "Colocated", "ranksPerNode: 6 ranks and 0 GPUs for engines on 8"),
        ({"ranks": 7, "engine_gpus": 2, "gpus": 8}, "Separate", "ranksPerNode: 7 ranks and 2 GPUs for engines on 8"),
        ({"ranks": 8, "engine_gpus": 0, "gpus": 8}, "Separate", "layout.engineGpusPerNode: 0 does not fit"),
        ({"ranks": 6, "engine_gpus": 2, "gpus": 8}, "Colocated", "layout.engineGpusPerNode: 2 does not fit"),
    ],
)
def test_every_gpu_has_one_owner(tmp_path, make_job, layout, placement, message):
    job = make_job(run_directory="x", rollout={"placement": placement})
    update = {
        "ranks_per_node": layout["ranks"],
        "world_size": layout["ranks"],
        "gpus_per_node": layout["gpus"],
        "engine_gpus_per_node": layout["engine_gpus"],
        "num_engines": layout["engine_gpus"] or layout["ranks"],
    }
    environment = write_job(tmp_path, job.model_copy(update={"layout": job.layout.model_copy(update=update)}))
    if message is None:
        assert load_job(environment).layout.engine_gpus_per_node == layout["engine_gpus"]
        return
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        load_job(environment)


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_files_that_are_no_job(tmp_path, text):
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"job\.json"):
        load_job({"RLJOB_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("error", "code", "reason", "state"),
    [
        (None, 0, "Completed", TrainerState.SUCCEEDED),
        (StopRequested("SIGTERM"), 143, "Stopped", TrainerState.STOPPED),
        (ConfigurationError("m"), 64, "InvalidConfiguration", TrainerState.FAILED),
        (DataError("m"), 65, "InvalidData", TrainerState.FAILED),
        (CheckpointError("m"), 66, "CheckpointUnusable", TrainerState.FAILED),
        (RuntimeError("m"), 70, "InternalError", TrainerState.FAILED),
        (GPUMemoryError("m"), 71, "GPUOutOfMemory", TrainerState.FAILED),
        (NumericalError("m"), 72, "NumericalError", TrainerState.FAILED),
        (RewardError("m"), 73, "RewardFunctionError", TrainerState.FAILED),
        (EngineDied("m"), 74, "EngineDied", TrainerState.FAILED),
        (TransientError("m" * 9000), 75, "TransientError", TrainerState.FAILED),
    ],
)
def test_verdicts(error, code, reason, state):
    outcome = entry.judge(error)
    assert (outcome.verdict.exit_code, outcome.verdict.reason, outcome.state) == (code, reason, state)
    assert 0 < len(outcome.verdict.message) <= 4096


def test_a_missing_job_file_ends_with_a_result_line(tmp_path):
    environment = os.environ | {"RLJOB_CONFIG": str(tmp_path / "none.json"), "RLJOB_ATTEMPT": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "rljob_trainer"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 64
    assert done.stdout.rstrip().splitlines()[-1].startswith('{"rljobResult":')
    result = find_result(done.stdout)
    assert result is not None
    assert result.verdict.reason == "InvalidConfiguration"
    assert "none.json" in result.verdict.message
    assert result.progress.attempt == 2
    assert result.progress.state is TrainerState.FAILED


def test_a_bad_job_file_still_names_its_uid(tmp_path, make_job, capsys):
    document = json.loads(make_job(run_directory="x").model_dump_json(exclude_none=True))
    document["spec"]["nonsense"] = 1
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    assert entry.main({"RLJOB_CONFIG": str(path)}) == 64
    result = find_result(capsys.readouterr().out)
    assert result is not None
    assert result.progress.job_uid == "uid-1"
    assert "spec.nonsense" in result.verdict.message


def test_a_stop_is_seen_once_and_by_everyone():
    late = threading.Event()
    stop = StopSignal(late.set)
    stop.raise_if_requested()
    stop.request("POST /v1/stop", 3600)
    stop.request("SIGTERM", 3600)
    with pytest.raises(StopRequested, match="POST /v1/stop"):
        stop.raise_if_requested()
    stop.finish()
    assert not late.is_set()


def test_a_late_stop_reaches_its_deadline():
    late = threading.Event()
    stop = StopSignal(late.set)
    stop.request("POST /v1/stop", 3600)
    stop.request("SIGTERM", 0.0)  # a second request may only shorten the deadline
    assert late.wait(timeout=30)


def test_a_finished_stop_never_reaches_its_deadline():
    late = threading.Event()
    stop = StopSignal(late.set)
    stop.finish()
    stop.request("SIGTERM", 0.0)
    assert not late.wait(timeout=0.6)
