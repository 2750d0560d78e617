"""The preStop hook as the kubelet runs it: a real process against a real HTTP server."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

import pytest

SCRIPT = files("rljob_operator.render").joinpath("scripts", "prestop.py")
TOKEN = "secret"


class FakeTrainer:
    """Answers `/v1/stop` and `/v1/progress` like the driver; its state moves with every progress request."""

    def __init__(self, states, *, die_after=None, token=TOKEN):
        self.states, self.die_after, self.requests = list(states), die_after, []
        trainer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def handle_request(self, body):
                trainer.requests.append((self.command, self.path, body))
                if self.headers.get("Authorization") != f"Bearer {token}":
                    self.send_error(401)
                    return
                state = trainer.states[0] if len(trainer.states) == 1 else trainer.states.pop(0)
                answer = json.dumps({"state": state}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
                if trainer.die_after is not None and len(trainer.requests) >= trainer.die_after:
                    threading.Thread(target=trainer.close).start()

            def do_GET(self):
                self.handle_request(None)

            def do_POST(self):
                self.handle_request(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def run_hook(port, deadline_seconds=60, host="127.0.0.1", **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), f"--port={port}", f"--deadline-seconds={deadline_seconds}"],
        env={"PATH": os.environ["PATH"], "FQ_RAY_IP": host, "RAY_AUTH_TOKEN": TOKEN, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def trainer(request):
    fake = FakeTrainer(**request.param)
    yield fake
    fake.close()


def find_closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("trainer", [{"states": ["Stopping", "Stopping", "Stopping", "Stopped"]}], indirect=True)
def test_hook_stops_the_trainer_once_and_waits_for_it(trainer):
    result = run_hook(trainer.port)
    assert (result.returncode, result.stdout) == (0, "preStop: the trainer ended: Stopped\n")
    assert trainer.requests[0] == ("POST", "/v1/stop", {"deadlineSeconds": 60})
    assert [request[0] for request in trainer.requests[1:]] == ["GET"] * 3


@pytest.mark.parametrize("trainer", [{"states": ["Stopping"], "die_after": 2}], indirect=True)
def test_hook_ends_when_the_driver_is_gone(trainer):
    result = run_hook(trainer.port)
    assert (result.returncode, result.stdout) == (0, "preStop: the trainer is not running\n")


def test_no_driver_means_nothing_to_save():
    result = run_hook(find_closed_port())
    assert (result.returncode, result.stdout) == (0, "preStop: the trainer is not running\n")


@pytest.mark.parametrize("trainer", [{"states": ["Stopping"]}], indirect=True)
def test_deadline_bounds_the_wait(trainer):
    result = run_hook(trainer.port, deadline_seconds=1)
    assert (result.returncode, result.stdout) == (0, "preStop: no checkpoint within 1 s\n")


@pytest.mark.parametrize("trainer", [{"states": ["Running"], "token": "another"}], indirect=True)
def test_refused_token_fails_loudly(trainer):
    """The kubelet turns it into a FailedPreStopHook event."""
    result = run_hook(trainer.port)
    assert result.returncode == 1
    assert "answered 401" in result.stderr


def test_unknown_head_is_given_up_after_three_attempts():
    result = run_hook(8090, host="head.invalid")
    assert result.returncode == 0
    assert "does not answer" in result.stdout


def test_an_address_that_answers_nothing_is_given_up_long_before_the_deadline():
    """A head that was deleted first: its workers must not hold their GPUs for several long time-outs."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # more than the backlog takes: further SYNs are dropped
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(address)
        try:
            result = run_hook(address[1], deadline_seconds=25)
        finally:
            for client in waiting:
                client.close()
    assert result.returncode == 0
    assert "does not answer" in result.stdout


@pytest.mark.parametrize("trainer", [{"states": ["Succeeded"]}], indirect=True)
def test_proxy_settings_of_the_pod_are_not_used(trainer):
    proxy = f"http://127.0.0.1:{find_closed_port()}"
    result = run_hook(trainer.port, http_proxy=proxy, HTTP_PROXY=proxy)
    assert (result.returncode, result.stdout) == (0, "preStop: the trainer ended: Succeeded\n")


def test_hook_needs_nothing_but_the_standard_library():
    result = subprocess.run(
        [sys.executable, "-S", "-I", str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0
