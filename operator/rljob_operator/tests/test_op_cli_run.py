"""`rljob run`: refusals before the start, and a real child process after it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_cases import CLI, make_job, run_cli, write_assets, write_fake_trainer, write_job
from click.testing import CliRunner

from rljob_api.contract import ResolvedJob
from rljob_operator.cli.main import main


@pytest.fixture
def workspace(tmp_path):
    """A directory with assets and a trainer that records what it gets."""
    write_assets(tmp_path)
    environment = write_fake_trainer(tmp_path)
    return tmp_path, environment


def run_job(workspace, document, *arguments, **environment):
    """In this process; the trainer is a real child."""
    directory, base = workspace
    path = write_job(directory, document)
    with contextlib.chdir(directory):
        return CliRunner().invoke(
            main, ["run", str(path), *arguments], env={**base, **environment}, catch_exceptions=False
        )


def read_job(directory, run="runs/tiny"):
    return ResolvedJob.model_validate_json((directory / run / "job.json").read_text())


@pytest.mark.parametrize("code", [0, 1, 64, 75, 143])
def test_exit_code_is_the_trainers(workspace, code):
    assert run_job(workspace, make_job(), FAKE_TRAINER_MODE=f"exit:{code}").exit_code == code


def test_job_json_is_resolved_for_this_machine(workspace):
    directory, _ = workspace
    assert run_job(workspace, make_job()).exit_code == 0
    job = read_job(directory)
    assert job.namespace == "local"
    assert job.paths.run_directory == str(directory / "runs/tiny")
    assert job.server.port == 0
    assert job.spec.data.train == [str(directory / "assets/train.jsonl")]
    assert job.spec.model.source == str(directory / "assets/model")
    assert job.spec.training.mini_batch_prompts == 4


def test_uid_belongs_to_the_directory(workspace):
    directory, _ = workspace
    run_job(workspace, make_job())
    run_job(workspace, make_job(training={"totalSteps": 3}), "--run-directory", "elsewhere")
    first = read_job(directory)
    run_job(workspace, make_job(training={"totalSteps": 5}))
    assert read_job(directory).uid == first.uid
    assert read_job(directory, "elsewhere").uid != first.uid


@pytest.mark.parametrize(
    ("storage", "option", "want"),
    [(None, None, "runs/tiny"), ("out/a", None, "out/a"), ("out/a", "out/b", "out/b")],
)
def test_run_directory(workspace, storage, option, want):
    directory, _ = workspace
    document = make_job(checkpoint={"storage": {"path": storage}}) if storage else make_job()
    arguments = ["--run-directory", option] if option else []
    assert run_job(workspace, document, *arguments).exit_code == 0
    assert read_job(directory, want).paths.run_directory == str(directory / want)


def test_port_reaches_the_trainer(workspace):
    directory, _ = workspace
    run_job(workspace, make_job(), "--port", "18090")
    assert read_job(directory).server.port == 18090


def test_environment_of_the_child(workspace):
    """Plain values of cluster.env arrive; a stale attempt number of the caller does not."""
    directory, _ = workspace
    env = [
        {"name": "GREETING", "value": "hello"},
        {"name": "FROM_SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    result = run_job(workspace, make_job(cluster={"env": env}), RLJOB_ATTEMPT="7", RLJOB_RESUME_FLOOR_STEP="99")
    assert result.exit_code == 0
    environment = json.loads((directory / "runs/tiny/environment.json").read_text())
    assert environment["GREETING"] == "hello"
    assert environment["RLJOB_CONFIG"] == str(directory / "runs/tiny/job.json")
    assert "RLJOB_ATTEMPT" not in environment
    assert "RLJOB_RESUME_FLOOR_STEP" not in environment
    assert "spec.cluster.env[1].valueFrom: FROM_SECRET comes from the cluster" in result.stderr


def test_set_changes_fields(workspace):
    directory, _ = workspace
    document = make_job(rollout={"engine": "SGLang"})
    result = run_job(workspace, document, "--set", "rollout.engine=Native", "--set", "training.learningRate=1e-5")
    assert result.exit_code == 0, result.stderr
    assert str(read_job(directory).engine) == "Native"
    assert read_job(directory).spec.training.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("override", "want"),
    [
        ("rollout.engine", "is not path=value"),
        ("=1", "is not path=value"),
        ("rollout..engine=1", "is not a field path"),
        ("data.train[5]=x", "the list has 1 items, the largest index here is 1"),
        ("data.train.x=1", "x is a field, but there is a list"),
        ("rollout[0]=1", "[0] needs a list"),
        ("rollout.engine=[", "the value is not YAML"),
    ],
)
def test_wrong_override_is_wrong_usage(workspace, override, want):
    result = run_job(workspace, make_job(), "--set", override)
    assert result.exit_code == 2
    assert want in " ".join(result.stderr.split()).replace("│ ", "")


def test_override_of_an_unknown_field_is_an_error_of_the_job(workspace):
    result = run_job(workspace, make_job(), "--set", "rollout.engin=Native")
    assert result.exit_code == 64
    assert "spec.rollout.engin" in result.stderr


@pytest.mark.parametrize(
    ("overrides", "want_code", "want"),
    [
        ({"cluster": {"nodes": 2}}, 64, "spec.cluster.nodes: 2 nodes need a cluster"),
        ({"rollout": {"samplesPerPrompt": 1}}, 64, "spec.rollout.samplesPerPrompt"),
        ({"rollout": {"maxStalenessSteps": 1}}, 64, "spec.rollout.maxStalenessSteps"),
        ({"network": {"fabric": "RoCE"}}, 64, "spec.network.fabric"),
        ({"data": {"train": ["assets/trian.jsonl"]}}, 65, "did you mean"),
        ({"data": {"train": ["nowhere/x.jsonl"]}}, 65, "spec.data.train[0]"),
        ({"data": {"validation": ["assets/none.jsonl"]}}, 65, "spec.data.validation[0]"),
        ({"model": {"source": "assets/modle"}}, 64, "spec.model.source"),
        ({"model": {"source": "assets"}}, 64, "no config.json"),
        ({"model": {"source": "assets/train.jsonl"}}, 64, "is a file"),
        ({"reward": {"functions": [{"type": "Python", "path": "score.py"}]}}, 64, "spec.reward.functions[0].path"),
        ({"checkpoint": {"resumeFromPath": "old/step-1"}}, 64, "spec.checkpoint.resumeFromPath"),
    ],
)
def test_refusals_come_before_anything_starts(workspace, overrides, want_code, want):
    directory, _ = workspace
    result = run_job(workspace, make_job(**overrides))
    assert result.exit_code == want_code, result.stderr
    assert want in result.stderr
    assert "error" in result.stderr
    assert not (directory / "runs").exists()


def test_unbuilt_feature_is_refused_and_named(workspace):
    result = run_job(workspace, make_job(network={"fabric": "RoCE"}))
    assert "NotSupportedYet" in result.stderr
    assert "--set network.fabric=VALUE" in result.stderr


def test_hugging_face_id_is_not_taken_for_a_path(workspace):
    directory, _ = workspace
    assert run_job(workspace, make_job(model={"source": "Qwen/Qwen2-0.5B"})).exit_code == 0
    assert read_job(directory).spec.model.source == "Qwen/Qwen2-0.5B"


def test_fields_without_meaning_here_are_listed(workspace):
    document = make_job(
        cluster={"image": "x:1", "volumes": [{"name": "d", "mountPath": "/d", "claimName": "c"}]},
        checkpoint={"storage": {"claimName": "c"}},
    )
    result = run_job(workspace, document)
    assert result.exit_code == 0
    for path in ("spec.cluster.image", "spec.cluster.volumes", "spec.checkpoint.storage.claimName"):
        assert path in result.stderr


def test_several_jobs_are_refused(workspace):
    other = make_job()
    other["metadata"] = {"name": "other"}
    result = run_job(workspace, [make_job(), other])
    assert result.exit_code == 64
    assert "has 2 jobs (tiny, other); a local run takes one" in result.stderr


def test_missing_trainer_is_said_with_the_remedy(workspace):
    directory, environment = workspace
    blocker = directory / "blocker"
    blocker.mkdir()
    # What an installation without the extra looks like: the module is not found.
    (blocker / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    environment = {**environment, "PYTHONPATH": f"{blocker}:{environment['PYTHONPATH']}"}
    result = run_cli("run", write_job(directory, make_job()), cwd=directory, environment=environment)
    assert result.returncode == 64
    assert "torch not installed; install the trainer: pip install 'rljob[trainer]'" in result.stderr


class LiveRun:
    """A started run and the trainer's record of events."""

    def __init__(self, workspace, mode):
        directory, environment = workspace
        path = write_job(directory, make_job())
        self.events = directory / "runs/tiny/events.txt"
        self.process = subprocess.Popen(
            [*CLI, "run", str(path)],
            cwd=directory,
            env={**environment, "FAKE_TRAINER_MODE": mode},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, event):
        deadline = time.monotonic() + 60
        while event not in self.read_events():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline, f"no {event!r} within 60 s: {self.read_events()}"
            time.sleep(0.05)

    def read_events(self):
        return self.events.read_text().splitlines() if self.events.exists() else []

    def finish(self):
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


@pytest.fixture
def start_run(workspace):
    runs = []

    def start(mode="wait"):
        runs.append(LiveRun(workspace, mode))
        runs[-1].wait_for("ready")
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signal_becomes_one_sigterm_and_the_checkpoint_is_awaited(start_run, number):
    run = start_run()
    # The whole group, as a terminal does for Ctrl-C: the trainer must not get it besides.
    os.killpg(run.process.pid, number)
    returncode, stderr = run.finish()
    assert returncode == 143
    assert run.read_events() == ["ready", "SIGTERM", "checkpoint"]
    assert "publishes a checkpoint first" in stderr


def test_repeated_sigterm_is_passed_on_once(start_run):
    run = start_run()
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("SIGTERM")
    run.process.send_signal(signal.SIGTERM)
    returncode, _ = run.finish()
    assert (returncode, run.read_events()) == (143, ["ready", "SIGTERM", "checkpoint"])


def test_second_interrupt_kills_a_trainer_that_does_not_stop(start_run):
    run = start_run("deaf")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("SIGTERM")
    run.process.send_signal(signal.SIGINT)
    returncode, stderr = run.finish()
    assert returncode == 128 + signal.SIGKILL
    assert "steps since the last checkpoint are lost" in stderr


def test_run_directory_is_used_by_one_run_at_a_time(start_run, workspace):
    directory, _ = workspace
    run = start_run()
    before = read_job(directory)
    result = run_job(workspace, make_job(training={"totalSteps": 9}))
    assert result.exit_code == 64
    assert "is in use by another run" in result.stderr
    assert read_job(directory) == before
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 143
    assert run_job(workspace, make_job()).exit_code == 0


def test_lock_outlives_a_killed_command(start_run, workspace):
    """The trainer may survive its parent; a second run in its directory must still be refused."""
    run = start_run()
    [child] = [
        int(name) for name in os.listdir("/proc") if name.isdigit() and read_parent(int(name)) == run.process.pid
    ]
    run.process.kill()
    run.process.wait(60)
    try:
        result = run_job(workspace, make_job())
        assert result.exit_code == 64
        assert "is in use by another run" in result.stderr
    finally:
        os.kill(child, signal.SIGKILL)


def read_parent(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")), None)


def test_unwritable_run_directory_is_an_error_not_a_traceback(workspace):
    directory, _ = workspace
    (directory / "file").write_text("")
    result = run_job(workspace, make_job(), "--run-directory", str(directory / "file" / "run"))
    assert result.exit_code == 64
    assert "choose another with --run-directory" in result.stderr
    assert "Traceback" not in result.stderr
