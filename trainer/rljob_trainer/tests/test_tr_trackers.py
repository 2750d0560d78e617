"""Experiment trackers with their real libraries, offline, and what an outage does."""

import json
import math
import sys
import threading
from pathlib import Path

import pytest

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.telemetry import TelemetryState
from rljob_trainer.telemetry.metrics import build_registry
from rljob_trainer.telemetry.trackers.base import TrackerRecord, TrackerRecords, describe_config, select_numbers
from rljob_trainer.telemetry.trackers.feed import MAX_ROWS, TrackedRow, TrackerFeed
from rljob_trainer.telemetry.trackers.hub import TrackerHub, check_libraries, list_trackers

ROWS = [
    {"step": step, "reward_mean": step / 10, "note": "x", "reward_function_means": {"gsm8k": 0.5}} for step in (1, 2)
]


class Log:
    """Warnings and counted failures."""

    def __init__(self):
        self.warnings, self.failures = [], []

    def open_hub(self, job, *, is_new_run):
        return TrackerHub(job, is_new_run=is_new_run, warn=self.warnings.append, count_failure=self.failures.append)


def run_attempts(job):
    """A first attempt that fails after step 2, and a second that repeats step 2 from a checkpoint of step 1."""
    log = Log()
    first = log.open_hub(job, is_new_run=True)
    for row in ROWS:
        first.log_step(row["step"], row)
    first.log_evaluation(2, {"reward_mean": 0.5, "aime24": {"pass_at_8": 0.75, "reward_mean": None}})
    first.close(succeeded=False, timeout_seconds=300)
    second = log.open_hub(job, is_new_run=False)
    second.log_step(2, ROWS[1])
    second.log_step(3, {"step": 3, "reward_mean": 0.3})
    second.close(succeeded=True, timeout_seconds=300)
    assert log.warnings == []
    assert log.failures == []
    return json.loads((Path(job.paths.run_directory) / "trackers.json").read_text())


def test_tensorboard(make_job, tmp_path):
    records = run_attempts(make_job(run_directory=str(tmp_path), tracking={"tensorboard": True}))
    assert records["tensorboard"]["logged"] == {"train": 3, "evaluation": 2}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward_mean")] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, pytest.approx(0.3)),
    ]
    assert events.Scalars("train/reward_function_means/gsm8k")[0].value == 0.5
    assert events.Scalars("evaluation/aime24/pass_at_8")[0].value == 0.75
    assert "train/note" not in events.Tags()["scalars"]
    assert "evaluation/aime24/reward_mean" not in events.Tags()["scalars"]


def test_mlflow(make_job, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    job = make_job(run_directory=str(tmp_path), tracking={"mlflow": {"tracking_uri": uri, "experiment": "rl"}})
    records = run_attempts(job)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("rl")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.run_id for run in runs] == [records["mlflow"]["run_id"]]
    assert runs[0].info.status == "FINISHED"
    assert runs[0].data.tags["rljob.uid"] == "uid-1"
    assert runs[0].data.params["algorithm/type"] == "GRPO"
    history = client.get_metric_history(runs[0].info.run_id, "train/reward_mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert runs[0].data.metrics["evaluation/aime24/pass_at_8"] == 0.75


def test_wandb_offline(make_job, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    records = run_attempts(make_job(run_directory=str(tmp_path), tracking={"wandb": {"project": "rl"}}))
    run_id = records["wandb"]["run_id"]
    assert run_id.startswith("tiny-")
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2  # one of each attempt, to be synced into the same run
    logged = b"".join(path.read_bytes() for path in files)
    assert b"train/reward_mean" in logged
    assert b"evaluation/aime24/pass_at_8" in logged


def test_a_new_run_in_the_same_directory_is_another_run(make_job, tmp_path):
    job = make_job(run_directory=str(tmp_path), tracking={"tensorboard": True})
    run_attempts(job)
    log = Log()
    third = log.open_hub(job, is_new_run=True)
    third.log_step(1, ROWS[0])
    third.close(succeeded=True, timeout_seconds=300)
    assert json.loads((tmp_path / "trackers.json").read_text())["tensorboard"]["logged"] == {"train": 1}


def test_records_that_cannot_be_read_begin_anew(tmp_path):
    (tmp_path / "trackers.json").write_text('{"wandb": {"run')
    records = TrackerRecords(tmp_path, is_new_run=False)
    assert "trackers.json" in records.problem
    assert records.get("wandb").run_id is None


class Flaky:
    """A tracker that refuses until it is told otherwise."""

    def __init__(self, *, works=False, opens=True):
        self.works, self.opens = works, opens
        self.steps, self.closed, self.num_calls = [], [], 0
        self.called = threading.Event()

    def open(self):
        self.called.set()
        if not self.opens:
            raise ConnectionError("nobody there")

    def log(self, step, values):
        self.num_calls += 1
        self.called.set()
        if not self.works:
            raise RuntimeError("503")
        self.steps.append(step)

    def close(self, *, succeeded):
        self.closed.append(succeeded)


def feed_tracker(tracker, record=None):
    log = Log()
    feed = TrackerFeed(
        "flaky",
        tracker,
        record or TrackerRecord(),
        save=lambda: None,
        warn=log.warnings.append,
        count_failure=log.failures.append,
        first_delay_seconds=0.01,
    )
    return feed, log


def test_an_outage_is_warned_once_counted_and_made_up_for():
    tracker = Flaky()
    feed, log = feed_tracker(tracker)
    for step in range(5):
        feed.log(TrackedRow("train", step, {}))
    assert tracker.called.wait(60)
    while tracker.num_calls < 3:
        threading.Event().wait(0.01)
    tracker.works = True
    feed.close(succeeded=True, timeout_seconds=60)
    assert tracker.steps == [0, 1, 2, 3, 4]
    assert tracker.closed == [True]
    assert len(log.failures) >= 3
    assert len(log.warnings) == 2
    assert "does not take metrics, training goes on without it: RuntimeError: 503" in log.warnings[0]
    assert "takes metrics again" in log.warnings[1]


@pytest.mark.parametrize("tracker", [Flaky(opens=False), Flaky(works=False)], ids=["never opens", "never logs"])
def test_a_tracker_that_never_works_loses_rows_and_nothing_else(tracker):
    feed, log = feed_tracker(tracker)
    for step in range(MAX_ROWS + 10):
        feed.log(TrackedRow("train", step, {}))
    feed.close(succeeded=True, timeout_seconds=0.5)
    assert any(f"{MAX_ROWS + 10} rows did not reach it" in warning for warning in log.warnings)
    assert log.failures


def test_a_tracker_that_hangs_does_not_hold_up_the_end():
    release = threading.Event()
    tracker = Flaky(works=True)
    tracker.open = lambda: release.wait(60)
    feed, log = feed_tracker(tracker)
    feed.log(TrackedRow("train", 1, {}))
    feed.close(succeeded=True, timeout_seconds=0.2)
    assert "1 rows did not reach it" in log.warnings[-1]
    release.set()


def test_steps_that_were_logged_before_are_not_repeated():
    tracker = Flaky(works=True)
    feed, _ = feed_tracker(tracker, TrackerRecord("id", {"train": 3}))
    for step in (2, 3, 4):
        feed.log(TrackedRow("train", step, {}))
    feed.log(TrackedRow("evaluation", 2, {}))
    feed.close(succeeded=True, timeout_seconds=60)
    assert tracker.steps == [4, 2]


def test_mlflow_that_is_not_there_only_warns(make_job, tmp_path, monkeypatch):
    """The real client against a closed port."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    job = make_job(run_directory=str(tmp_path), tracking={"mlflow": {"tracking_uri": "http://127.0.0.1:9"}})
    log = Log()
    trackers = log.open_hub(job, is_new_run=True)
    trackers.log_step(1, ROWS[0])
    deadline = threading.Event()
    for _ in range(600):
        if log.failures:
            break
        deadline.wait(0.1)
    trackers.close(succeeded=True, timeout_seconds=1)
    assert log.failures[0] == "mlflow"
    assert "tracker mlflow does not take metrics" in log.warnings[0]


def test_only_finite_numbers_are_sent():
    row = {"step": 3, "a": 1, "b": math.nan, "c": None, "d": {"e@2": 0.5, "f": [1, 2]}, "g": True, "h": "x"}
    assert select_numbers(row, "train") == {"train/a": 1.0, "train/d/e_2": 0.5, "train/d/f/0": 1.0, "train/d/f/1": 2.0}


def test_the_configuration_of_a_run_holds_no_environment(make_job, tmp_path):
    job = make_job(run_directory=str(tmp_path), cluster={"env": [{"name": "HF_TOKEN", "value": "sesame"}]})
    assert "sesame" not in json.dumps(describe_config(job.spec))
    assert describe_config(job.spec)["algorithm"]["type"] == "GRPO"


def test_a_library_that_is_not_installed_is_said_before_the_start(make_job, tmp_path, monkeypatch):
    job = make_job(run_directory=str(tmp_path), tracking={"wandb": {"project": "rl"}})
    assert list_trackers(job.spec.tracking) == ["wandb"]
    check_libraries(job.spec.tracking)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"spec\.tracking\.wandb: the package wandb is not installed"):
        check_libraries(job.spec.tracking)


def test_without_trackers_nothing_is_loaded_or_written(make_job, tmp_path):
    loaded = {"wandb", "mlflow", "tensorboard"} & set(sys.modules)
    trackers = Log().open_hub(make_job(run_directory=str(tmp_path)), is_new_run=True)
    trackers.log_step(1, ROWS[0])
    trackers.close(succeeded=True)
    assert {"wandb", "mlflow", "tensorboard"} & set(sys.modules) == loaded
    assert list(tmp_path.iterdir()) == []


def test_failures_and_evaluations_are_metrics(make_job, tmp_path):
    state = TelemetryState(make_job(run_directory=str(tmp_path)))
    state.count_tracker_failure("wandb")
    state.count_tracker_failure("wandb")
    state.record_evaluation(0.5, {"aime24": {"reward_mean": None, "pass_at_1": 0.1, "pass_at_16": 0.7}})
    registry = build_registry(state, job="j", namespace="n")
    labels = {"name": "j", "namespace": "n"}
    assert registry.get_sample_value("rljob_tracker_failures_total", labels | {"tracker": "wandb"}) == 2
    assert registry.get_sample_value("rljob_evaluation_pass", labels | {"set": "aime24"}) == 0.7
    assert math.isnan(registry.get_sample_value("rljob_evaluation_set_reward_mean", labels | {"set": "aime24"}))
    assert registry.get_sample_value("rljob_evaluation_majority", labels | {"set": "aime24"}) is None
