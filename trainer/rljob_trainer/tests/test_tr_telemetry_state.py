"""Telemetry state, metrics and the HTTP server: what outsiders see of a run."""

import json
import math
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rljob_api.contract import (
    Layout,
    Paths,
    Progress,
    ResolvedJob,
    Server,
    StopRequest,
    TrainerPhase,
    TrainerState,
    Verdict,
)
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.telemetry import ProgressServer, StepStatistics, TelemetryState, docs
from rljob_trainer.telemetry.metrics import METRICS, PREFIX, build_registry
from rljob_trainer.telemetry.server import open_listening_socket


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def job(tmp_path):
    spec = {
        "model": {"source": "model"},
        "data": {"train": ["train.jsonl"]},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "training": {"totalSteps": 10},
    }
    return ResolvedJob(
        name="demo",
        namespace="lab",
        uid="u-1",
        attempt=2,
        spec=RLJobSpec.model_validate(spec),
        layout=Layout(
            num_nodes=1, ranks_per_node=2, gpus_per_node=0, world_size=2, tensor_parallel_size=1, num_engines=2
        ),
        engine="Native",
        ip_family="Auto",
        paths=Paths(run_directory=str(tmp_path)),
        server=Server(port=0),
    )


def step(number: int, **values) -> StepStatistics:
    return StepStatistics(step=number, step_seconds=values.pop("step_seconds", 4.0), num_tokens=800, **values)


def test_progress_of_a_step(job):
    clock = Clock()
    state = TelemetryState(job, clock=clock)
    assert state.build_progress().state is TrainerState.STARTING
    checkpoint = CheckpointStatus(step=3, path="/x/step-3", time="2027-01-15T08:00:00Z")
    state.start_training(total_steps=10, step=3, resumed_from_step=3, checkpoint=checkpoint)
    with state.phase(TrainerPhase.ROLLOUT):
        clock.now += 2
        assert state.build_progress().phase is TrainerPhase.ROLLOUT
    with state.phase(TrainerPhase.TRAIN):
        clock.now += 2
    state.finish_step(step(4, reward_mean=0.5, epoch=0.4, weight_version=5))
    progress = state.build_progress()
    assert (progress.job_uid, progress.attempt, progress.state) == ("u-1", 2, TrainerState.RUNNING)
    assert (progress.resumed_from_step, progress.checkpoint) == (3, checkpoint)
    status = progress.progress
    assert (status.step, status.total_steps, status.epoch, status.reward_mean) == (4, 10, 0.4, 0.5)
    assert (status.tokens_per_second, status.tokens_per_second_per_gpu) == (200, 100)
    assert status.phase_seconds.model_dump(exclude_none=True) == {"rollout": 2.0, "train": 2.0}
    assert status.estimated_completion_time == "2027-01-15T08:00:28Z"  # six steps of four seconds after 08:00:04
    state.set_verdict(Verdict(exit_code=0, reason="Completed", message="done"), TrainerState.SUCCEEDED)
    assert (state.build_progress().state, state.build_progress().phase) == (TrainerState.SUCCEEDED, TrainerPhase.DONE)


def test_nested_phases_are_not_counted_twice_and_step_times_do_not_leak(job):
    clock = Clock()
    state = TelemetryState(job, clock=clock)
    state.start_training(total_steps=10)
    with state.phase(TrainerPhase.TRAIN):
        clock.now += 1
        with state.phase(TrainerPhase.SYNC):
            clock.now += 5
        clock.now += 2
    state.finish_step(step(1))
    assert state.last_phase_seconds == {"train": 3.0, "sync": 5.0}

    def fail() -> None:
        with state.phase(TrainerPhase.REWARD):
            clock.now += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    state.finish_step(step(2))
    assert state.last_phase_seconds == {"reward": 1.0}


def test_heartbeat_moves_with_every_sign_of_progress(job):
    clock = Clock()
    state = TelemetryState(job, clock=clock)
    seen = [state.take_snapshot().heartbeat_seconds]
    for action in (
        state.heartbeat,
        lambda: state.phase(TrainerPhase.ROLLOUT).__enter__(),
        lambda: state.finish_step(step(1)),
        lambda: state.record_evaluation(0.5),
        lambda: state.record_checkpoint(CheckpointStatus(step=1, path="p", time="2027-01-15T08:00:00Z")),
    ):
        clock.now += 1
        action()
        seen.append(state.take_snapshot().heartbeat_seconds)
    assert seen == [1_800_000_000.0 + n for n in range(6)]


def test_undefined_statistics_are_null_in_json_and_nan_in_prometheus(job):
    state = TelemetryState(job)
    state.start_training(total_steps=10)
    state.finish_step(step(1, reward_mean=math.nan, entropy=None, kl_mean=math.inf, num_nan_steps_total=2))
    text = state.build_progress().model_dump_json(exclude_none=True)
    parsed = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "rewardMean" not in parsed["progress"]
    assert "klMean" not in parsed["progress"]
    registry = build_registry(state, job="demo", namespace="lab")
    assert math.isnan(read(registry, "reward_mean"))
    assert math.isnan(read(registry, "entropy"))
    assert read(registry, "nan_steps_total") == 2


def read(registry, name, **labels):
    return registry.get_sample_value(PREFIX + name, {"name": "demo", "namespace": "lab", **labels})


def test_every_metric_of_the_table_appears_once_there_is_a_step(job):
    state = TelemetryState(job)
    registry = build_registry(state, job="demo", namespace="lab")
    assert read(registry, "reward_mean") is None
    assert read(registry, "attempt") == 2
    state.start_training(
        total_steps=10,
        resumed_from_step=1,
        checkpoint=CheckpointStatus(step=1, path="p", time="2027-01-15T08:00:00Z"),
    )
    with state.phase(TrainerPhase.TRAIN):
        pass
    state.record_evaluation(0.25, {"aime24": {"reward_mean": 0.25, "pass_at_4": 0.5, "majority_at_4": 0.3}})
    state.count_tracker_failure("wandb")
    state.finish_step(step(2, num_dropped_samples=3, num_nan_rewards=1, num_reward_timeouts=1, weight_version=3))
    state.finish_step(step(3, num_dropped_samples=4, weight_version=4))
    with state.phase(TrainerPhase.TRAIN):
        pass
    assert read(registry, "value_loss") is None, "only jobs with a critic have it"
    assert read(registry, "rollout_ahead_seconds") is None, "only jobs whose rollout runs ahead have it"
    further = {"value_loss": 0.1, "value_clip_fraction": 0.0, "value_explained_variance": 0.3}
    further["rollout_ahead_seconds"] = 7.0
    state.finish_step(step(4, weight_version=5, reward_function_means={"gsm8k": 0.5, "gsm8k/length": 9.0}, **further))
    labels = {"phase": "train", "function": "gsm8k", "set": "aime24", "tracker": "wandb"}
    for spec in METRICS:
        value = read(registry, spec.name, **({spec.label: labels[spec.label]} if spec.label else {}))
        assert value is not None, spec.name
    assert read(registry, "reward_function_mean", function="gsm8k/length") is None
    assert read(registry, "evaluation_pass", set="aime24") == 0.5
    assert read(registry, "tokens_total") == 2400
    assert read(registry, "dropped_samples_total") == 7
    assert read(registry, "evaluation_reward_mean") == 0.25
    assert read(registry, "checkpoint_timestamp_seconds") == 1_800_000_000.0


def test_gpus_of_engines_count_where_speed_is_per_gpu(job):
    update = {"gpus_per_node": 8, "ranks_per_node": 6, "engine_gpus_per_node": 2}
    state = TelemetryState(job.model_copy(update={"layout": job.layout.model_copy(update=update)}))
    state.start_training(total_steps=10)
    state.finish_step(step(1))
    assert state.build_progress().progress.tokens_per_second_per_gpu == 800 / 4 / 8


def test_label_sets_are_bounded(job):
    state = TelemetryState(job)
    registry = build_registry(state, job="demo", namespace="lab")
    state.start_training(total_steps=10)
    for number in range(1, 6):
        for phase in TrainerPhase:
            with state.phase(phase):
                pass
        state.finish_step(step(number, reward_function_means={f"f{number}": 1.0, f"f{number}/{number}": 1.0}))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert {key for sample in samples for key in sample.labels} == {"name", "namespace", "phase", "function"}
    assert len(samples) <= len(METRICS) + len(TrainerPhase)


def test_names_follow_prometheus_conventions():
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    for spec in METRICS:
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert spec.help.endswith(".")


def test_reference_page_is_checked(tmp_path, capsys):
    page = tmp_path / "metrics.md"
    assert docs.main([str(page), "--check"]) == 1
    assert "out of date; run `python -m rljob_trainer.telemetry.docs`" in capsys.readouterr().err
    assert docs.main([str(page)]) == 0
    assert docs.main([str(page), "--check"]) == 0
    for spec in METRICS:
        assert f"`{PREFIX}{spec.name}`" in page.read_text()


@pytest.fixture
def serve(job, monkeypatch):
    started = []

    def start(token=None, state=None):
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        stops: list[StopRequest] = []
        server = ProgressServer(job, state or TelemetryState(job), stops.append)
        server.start()
        started.append(server)
        return server, stops

    yield start
    for server in started:
        server.stop()


def call(server, path, *, body=None, token=None, host="127.0.0.1", method=None, header="Authorization"):
    request = urllib.request.Request(
        f"http://{host}:{server.port}{path}", data=body, method=method or ("POST" if body is not None else "GET")
    )
    if token is not None:
        request.add_header(header, f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no ::1")),
    ],
)
def test_progress_and_metrics_over_both_families(serve, host):
    server, _ = serve()
    status, body = call(server, "/v1/progress", host=host)
    assert status == 200
    assert Progress.model_validate_json(body).job_uid == "u-1"
    status, body = call(server, "/metrics", host=host)
    names = {family.name for family in text_string_to_metric_families(body)}
    assert {"rljob_step", "rljob_tokens", "rljob_attempt"} <= names


def test_guarded_routes_need_the_token_and_open_ones_do_not(serve):
    server, stops = serve(token="secret")
    for token in (None, "wrong", "secret2", ""):
        assert call(server, "/v1/progress", token=token)[0] == 401
        assert call(server, "/v1/stop", body=b"{}", token=token)[0] == 401
    assert stops == []
    assert call(server, "/v1/progress", token="secret")[0] == 200
    assert call(server, "/v1/progress", token="secret", header="X-Ray-Authorization")[0] == 200, "through a proxy"
    assert call(server, "/v1/progress", token="wrong", header="X-Ray-Authorization")[0] == 401
    assert call(server, "/healthz")[0] == 200
    assert call(server, "/metrics")[0] == 200


def test_stop_request(serve):
    server, stops = serve()
    assert call(server, "/v1/stop", body=b'{"deadlineSeconds": 60}')[0] == 202
    assert call(server, "/v1/stop", body=b"")[0] == 202
    assert [stop.deadline_seconds for stop in stops] == [60, 300]
    for body in (b'{"deadlineSeconds": 0}', b'{"deadline": 5}', b"not json", b"[1]"):
        status, text = call(server, "/v1/stop", body=body)
        assert status == 400
        assert "deadlineSeconds" in json.loads(text)["error"]
    assert len(stops) == 2
    assert call(server, "/v1/stop")[0] == 405


def test_health_is_false_when_the_loop_is_dead(job, serve):
    made: list[TelemetryState] = []
    leave = threading.Event()
    entered = threading.Event()

    def loop():
        made.append(TelemetryState(job))
        entered.set()
        leave.wait(60)

    thread = threading.Thread(target=loop)
    thread.start()
    assert entered.wait(60)
    server, _ = serve(state=made[0])
    assert call(server, "/healthz") == (200, "ok\n")
    leave.set()
    thread.join(60)
    status, text = call(server, "/healthz")
    assert (status, "ended" in text) == (503, True)


def test_taken_port_names_itself(job):
    taken = open_listening_socket(0)
    try:
        port = taken.getsockname()[1]
        busy = job.model_copy(update={"server": Server(port=port)})
        with pytest.raises(ConfigurationError, match=rf"cannot listen on {port}.*0 for a free one"):
            ProgressServer(busy, TelemetryState(busy), lambda stop: None).start()
    finally:
        taken.close()


def test_falls_back_to_ipv4_where_there_is_no_ipv6(monkeypatch):
    real = socket.socket

    def without_ipv6(family=socket.AF_INET, *arguments, **options):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    listener = open_listening_socket(0)
    try:
        assert listener.family == socket.AF_INET
    finally:
        listener.close()


def test_server_stops_and_frees_its_port(serve):
    server, _ = serve()
    server.stop()
    again = open_listening_socket(server.port)
    again.close()
