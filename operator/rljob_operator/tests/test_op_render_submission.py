"""The submission's body, and its entrypoint run exactly as Ray runs it: `sh -c` in a session of its own."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from render_cases import UID, make_resolved

from rljob_operator.render import collect_findings, render_submission
from rljob_operator.render.submission import CONTAINER_STDOUT, build_entrypoint


def start(script, container_stdout, tmp_path):
    """`script` is the driver; returns the process and its log file (Ray gives both streams one file)."""
    driver = tmp_path / "driver.py"
    driver.write_text(textwrap.dedent(script))
    log = tmp_path / "job.log"
    command = build_entrypoint((sys.executable, "-u", str(driver)), str(container_stdout))
    with log.open("a") as stream:
        process = subprocess.Popen(command, shell=True, start_new_session=True, stdout=stream, stderr=subprocess.STDOUT)
    return process, log


def run(script, container_stdout, tmp_path):
    process, log = start(script, container_stdout, tmp_path)
    return process.wait(60), log.read_text()


def wait_for(text, path, process):
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert process.poll() is None, f"ended with {process.returncode}: {path.read_text()}"
        assert time.monotonic() < deadline, f"no {text!r} within 60 s in: {path.read_text()}"
        time.sleep(0.05)


def list_session(session_id):
    """Every process below the entrypoint: Ray starts it in a session of its own."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and read_session(int(name)) == session_id]


def read_session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("code", [0, 1, 64, 75, 143])
def test_driver_exit_code_is_the_entrypoints(code, tmp_path):
    returncode, log = run(f"import sys; print('line'); sys.exit({code})", tmp_path / "stdout", tmp_path)
    assert returncode == code
    assert log == "line\n"


def test_both_streams_reach_the_container_log_too(tmp_path):
    container = tmp_path / "stdout"
    container.write_text("from ray start\n")
    _, log = run("import sys; print('out'); print('err', file=sys.stderr)", container, tmp_path)
    assert sorted(log.splitlines()) == ["err", "out"]
    assert container.read_text() == "from ray start\n" + log


@pytest.mark.parametrize("code", [0, 71])
def test_unwritable_container_log_is_said_and_does_no_harm(code, tmp_path):
    returncode, log = run(f"import sys; print('line'); sys.exit({code})", tmp_path / "no" / "such" / "stdout", tmp_path)
    assert returncode == code
    assert "line\n" in log
    assert "No such file or directory" in log


def test_closed_container_log_does_not_end_the_training(tmp_path):
    """The kubelet's end of the pipe may go away: EPIPE, not SIGPIPE."""
    read_end, write_end = os.pipe()
    try:
        script = """
            import time
            for line in range(50):
                print("line", line)
                time.sleep(0.02)
            """
        process, log = start(script, f"/proc/{os.getpid()}/fd/{write_end}", tmp_path)
        wait_for("line 5", log, process)
        os.close(read_end)
        read_end = -1
        assert process.wait(60) == 0
        assert "line 49" in log.read_text()
    finally:
        os.close(write_end)
        if read_end >= 0:
            os.close(read_end)


def test_ray_stop_keeps_the_exit_code_and_the_last_line(tmp_path):
    """Ray signals every process below the entrypoint: the shell and tee must outlive the driver's checkpoint."""
    script = """
        import signal, sys, time
        def stop(number, frame):
            time.sleep(0.5)
            print("the last line")
            sys.exit(143)
        signal.signal(signal.SIGTERM, stop)
        print("ready")
        while True:
            time.sleep(0.1)
        """
    process, log = start(script, tmp_path / "stdout", tmp_path)
    wait_for("ready", log, process)
    members = list_session(process.pid)
    assert len(members) >= 3, "shell, driver and tee"
    for pid in members:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(60) == 143
    assert log.read_text().endswith("the last line\n")
    assert (tmp_path / "stdout").read_text().endswith("the last line\n")


def test_killed_driver_reports_its_signal(tmp_path):
    returncode, _ = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "stdout", tmp_path)
    assert returncode == 128 + signal.SIGKILL


def test_submission_of_our_trainer():
    body = render_submission(make_resolved(), attempt=3, submission_id=f"{UID}-3", resume_floor_step=40)
    assert body["submission_id"] == f"{UID}-3"
    assert body["runtime_env"] == {"env_vars": {"RLJOB_ATTEMPT": "3", "RLJOB_RESUME_FLOOR_STEP": "40"}}
    assert body["metadata"] == {"rljob.io/job": "job", "rljob.io/job-uid": UID, "rljob.io/attempt": "3"}
    assert "python -m rljob_trainer 2>&1" in body["entrypoint"]
    assert CONTAINER_STDOUT in body["entrypoint"]


def test_submission_of_another_trainer_quotes_its_command():
    command = ["python", "-m", "verl.trainer.main_ppo", 'data.prompt=it\'s "fine" $HOME {x}']
    trainer = {"command": command, "env": [{"name": "A", "value": "1"}]}
    body = render_submission(make_resolved(trainer=trainer), attempt=1, submission_id="s", resume_floor_step=0)
    assert body["runtime_env"]["env_vars"]["A"] == "1"
    script = shlex.split(body["entrypoint"])[3]
    assert shlex.split(script.split(";")[1].split("2>&1")[0]) == command


def test_command_with_awkward_arguments_arrives_unchanged(tmp_path):
    awkward = ["it's", 'a "quote"', "$HOME", "{x}", "a;b", "", "ü|&"]
    driver = tmp_path / "driver.py"
    driver.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    command = build_entrypoint((sys.executable, str(driver), *awkward), str(tmp_path / "stdout"))
    output = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(output.stdout) == awkward


def test_reference_in_another_trainers_env_is_refused():
    variable = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    findings = collect_findings(make_resolved(trainer={"command": ["x"], "env": [variable]}))
    assert [finding.path for finding in findings] == ["spec.trainer.env[0].valueFrom"]


@pytest.mark.parametrize(("attempt", "floor"), [(0, 0), (1, -1)])
def test_impossible_attempts_are_refused(attempt, floor):
    with pytest.raises(ValueError, match="must be at least"):
        render_submission(make_resolved(), attempt=attempt, submission_id="s", resume_floor_step=floor)
