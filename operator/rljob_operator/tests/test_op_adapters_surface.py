"""What people and Prometheus see of the operator: metrics, health, events, settings."""

from __future__ import annotations

import asyncio
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rljob_api.v1alpha1.cluster import IPFamily
from rljob_api.v1alpha1.status import CheckpointStatus, Phase, ProgressStatus, RLJobStatus
from rljob_operator.adapters import health as health_module
from rljob_operator.adapters.events import EventRecorder, build_event
from rljob_operator.adapters.health import Health, build_health_app, build_metrics_app, serve
from rljob_operator.adapters.kube import KubeError
from rljob_operator.adapters.metrics import JOB_METRICS, Metrics
from rljob_operator.app import build_kopf_settings
from rljob_operator.plan.types import Event, EventType
from rljob_operator.scheduler import Key
from rljob_operator.settings import ClusterAccess, LogFormat, parse_settings

KEY = Key("ns", "tiny")
LABELS = {"namespace": "ns", "name": "tiny"}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_status(**fields: Any) -> RLJobStatus:
    progress = ProgressStatus(step=3, total_steps=9, reward_mean=0.5, kl_mean=None)
    checkpoint = CheckpointStatus(step=2, path="/x", time="2026-01-01T00:00:00Z")
    return RLJobStatus(phase=Phase.RUNNING, attempt=2, progress=progress, checkpoint=checkpoint, **fields)


# --- metrics -----------------------------------------------------------------------------------------------------


def test_a_job_has_its_series_while_it_exists_and_none_afterwards():
    metrics = Metrics()
    num_before = count_samples(metrics)
    metrics.observe_job(KEY, make_status())
    get = metrics.registry.get_sample_value
    assert get("rljob_job_step", LABELS) == 3
    assert get("rljob_job_attempt", LABELS) == 2
    assert get("rljob_job_checkpoint_timestamp_seconds", LABELS) == NOW.timestamp()
    assert get("rljob_job_phase", {**LABELS, "phase": "Running"}) == 1
    assert get("rljob_operator_jobs", {"phase": "Running"}) == 1
    assert get("rljob_job_kl_mean", LABELS) is None, "what is not known has no sample, not a zero"
    metrics.forget_job(KEY)
    assert get("rljob_job_step", LABELS) is None
    assert get("rljob_operator_jobs", {"phase": "Running"}) == 0
    assert count_samples(metrics) == num_before


def test_five_hundred_jobs_come_and_go_without_a_trace():
    metrics = Metrics()
    num_before = count_samples(metrics)
    for number in range(500):
        metrics.observe_job(Key("ns", f"job-{number}"), make_status())
        metrics.forget_job(Key("ns", f"job-{number}"))
    assert count_samples(metrics) == num_before


def test_a_job_has_at_most_thirty_series_and_no_unbounded_label():
    metrics = Metrics()
    num_before = count_samples(metrics)
    metrics.observe_job(KEY, make_status())
    assert count_samples(metrics) - num_before <= 30
    assert len(JOB_METRICS) + 1 <= 30
    labels = {label for family in metrics.registry.collect() for sample in family.samples for label in sample.labels}
    assert labels <= {"namespace", "name", "phase", "result", "kind", "verb", "status", "le", "version"}


@pytest.mark.parametrize(
    ("verb", "status", "want_writes", "want_errors"),
    [
        ("apply", 200, 1, 0),
        ("create", 409, 1, 0),
        ("get", 200, 0, 0),
        ("get", 404, 0, 0),
        ("apply", 500, 1, 1),
        ("list", 0, 0, 1),
    ],
)
def test_requests_are_counted_as_writes_and_errors(verb: str, status: int, want_writes: int, want_errors: int):
    metrics = Metrics()
    metrics.observe_request(verb, "RayCluster", status)
    get = metrics.registry.get_sample_value
    assert (get("rljob_operator_api_writes_total", {"kind": "RayCluster", "verb": verb}) or 0) == want_writes
    assert (get("rljob_operator_api_errors_total", {"verb": verb, "status": str(status)}) or 0) == want_errors


def count_samples(metrics: Metrics) -> int:
    return sum(len(family.samples) for family in metrics.registry.collect())


# --- health ------------------------------------------------------------------------------------------------------


async def get_text(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as response:
        return response.status, await response.text()


async def test_health_and_metrics_are_served_to_both_address_families():
    health, metrics = Health(), Metrics()
    for app, path, want in (
        (build_health_app(health), "/healthz", "ok"),
        (build_metrics_app(metrics.registry), "/metrics", "rljob_operator_build_info"),
    ):
        runner = await serve(app, 0)
        port = runner.addresses[0][1]
        for host in ["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]:
            status, text = await get_text(port, path, host)
            assert status == 200
            assert want in text
        await runner.cleanup()


async def test_idle_and_standby_are_healthy_a_stuck_loop_and_a_lost_wake_up_are_not(monkeypatch: pytest.MonkeyPatch):
    overdue = 0.0
    health = Health(compute_overdue_seconds=lambda: overdue)
    beating = asyncio.create_task(health.beat())
    await asyncio.sleep(0)
    assert health.find_problem() is None
    overdue = health_module.MAX_OVERDUE_SECONDS + 1
    assert "overdue by 301 s" in (health.find_problem() or "")
    overdue = 0.0
    now = health_module.time.monotonic() + health_module.MAX_HEARTBEAT_AGE_SECONDS + 1
    monkeypatch.setattr(health_module.time, "monotonic", lambda: now)
    assert "heartbeat" in (health.find_problem() or "")
    monkeypatch.undo()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)


async def test_an_unhealthy_process_says_why():
    runner = await serve(build_health_app(Health(compute_overdue_seconds=lambda: 1e6)), 0)
    status, text = await get_text(runner.addresses[0][1], "/healthz")
    assert (status, "overdue" in text) == (500, True)
    await runner.cleanup()


# --- events ------------------------------------------------------------------------------------------------------


class EventStore:
    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.error: KubeError | None = None

    async def create(self, document: dict[str, Any]) -> None:
        if self.error:
            raise self.error
        name = document["metadata"]["name"]
        if name in self.events:
            raise KubeError(409, "AlreadyExists", name, "POST events")
        self.events[name] = document

    async def get(self, resource: object, namespace: str, name: str) -> dict[str, Any] | None:
        return self.events.get(name)

    async def merge_patch(self, resource: object, namespace: str, name: str, patch: dict[str, Any]) -> None:
        self.events[name] |= patch


async def test_a_repeated_event_counts_up_and_another_message_is_another_event():
    store = EventStore()
    recorder = EventRecorder(store, "operator-1")  # type: ignore[arg-type]
    lost = Event(EventType.WARNING, "WorkerLost", "worker 1 is gone")
    for _ in range(3):
        await recorder.record("ns", "tiny", "u", lost)
    await recorder.record("ns", "tiny", "u", Event(EventType.WARNING, "WorkerLost", "worker 2 is gone"))
    assert sorted(event["count"] for event in store.events.values()) == [1, 3]


async def test_an_event_that_cannot_be_written_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture):
    store = EventStore()
    store.error = KubeError(403, "Forbidden", "namespace is terminating", "POST events")
    await EventRecorder(store, "i").record("ns", "tiny", "u", Event(EventType.NORMAL, "Running", "x"))  # type: ignore[arg-type]
    assert "namespace is terminating" in caplog.text


def test_an_event_is_bounded_and_points_at_the_job():
    document = build_event("ns", "tiny", "u", Event(EventType.NORMAL, "Running", "x" * 5000), "i" * 300, NOW)
    assert len(document["message"]) == 1024
    assert len(document["reportingInstance"]) == 128
    assert document["involvedObject"]["uid"] == "u"
    assert document["metadata"]["name"].startswith("tiny.")


# --- settings ----------------------------------------------------------------------------------------------------

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "POD_NAME": "rljob-0", "POD_NAMESPACE": "rljob-system"}


def test_flags_of_the_chart():
    settings = parse_settings(
        [
            "--namespace=a",
            "--namespace=b",
            "--lease-namespace=rljob-system",
            "--metrics-port=9000",
            "--cluster-access=Proxy",
            "--cluster-domain=corp.example",
            "--ip-family=Auto",
            "--log-format=json",
        ],
        {**IN_POD, "POD_IP": "fd00::7"},
    )
    assert settings.namespaces == ("a", "b")
    assert (settings.lease_namespace, settings.metrics_port, settings.health_port) == ("rljob-system", 9000, 8081)
    assert (settings.cluster_access, settings.cluster_domain) == (ClusterAccess.PROXY, "corp.example")
    assert settings.ip_family is IPFamily.IPV6
    assert settings.log_format is LogFormat.JSON
    assert settings.identity.startswith("rljob-0_")
    assert settings.render_options.operator_namespace == "rljob-system"


@pytest.mark.parametrize(
    ("pod_ips", "want_families", "want_family"),
    [
        ("10.0.0.1,fd00::1", (IPFamily.IPV4, IPFamily.IPV6), IPFamily.IPV4),
        ("fd00::1,10.0.0.1", (IPFamily.IPV6, IPFamily.IPV4), IPFamily.IPV6),
        ("fd00::1", (IPFamily.IPV6,), IPFamily.IPV6),
        ("", (), IPFamily.IPV4),
    ],
)
def test_families_of_the_pod_network_come_from_the_operators_own_pod(pod_ips, want_families, want_family):
    settings = parse_settings(["--all-namespaces"], {**IN_POD, "POD_IPS": pod_ips})
    assert settings.render_options.pod_ip_families == want_families
    assert settings.ip_family is want_family


def test_environment_stands_in_for_flags_and_flags_win():
    environment = {**IN_POD, "RLJOB_ALL_NAMESPACES": "true", "RLJOB_METRICS_PORT": "9100", "RLJOB_IP_FAMILY": "IPv6"}
    settings = parse_settings(["--metrics-port=9200"], environment)
    assert (settings.namespaces, settings.metrics_port, settings.ip_family) == ((), 9200, IPFamily.IPV6)


@pytest.mark.parametrize(
    ("argv", "environment", "want"),
    [
        ([], IN_POD, "say what to watch"),
        (["--all-namespaces", "--namespace=a"], IN_POD, "exclude each other"),
        (["--all-namespaces"], {}, "give --kubeconfig FILE"),
        (["--all-namespaces", "--catalogue=/nowhere.yaml"], IN_POD, "/nowhere.yaml"),
        (["--all-namespaces", "--ip-family=IPv5"], IN_POD, "invalid choice"),
        (["--all-namespaces", "--operator-pod-labels=app"], IN_POD, "is not key=value"),
        (["--all-namespaces", "--metrics-port=web"], IN_POD, "invalid int"),
        (["--all-namespaces", "--lease-seconds=5"], IN_POD, "for example 15, 10 and 2"),
    ],
)
def test_wrong_flags_are_named(
    argv: list[str], environment: dict[str, str], want: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        parse_settings(argv, environment)
    assert caught.value.code == 2
    assert want in capsys.readouterr().err


def test_kubeconfig_of_the_environment_is_used(tmp_path: Path):
    path = tmp_path / "config"
    settings = parse_settings(["--all-namespaces"], {"KUBECONFIG": str(path)})
    assert settings.kubeconfig == path


def test_kopf_only_watches():
    settings = build_kopf_settings(is_namespaced=True)
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.process.ultimate_exiting_timeout is None
    assert set(settings.watching.label_selectors.values()) == {"rljob.io/job"}
    assert settings.persistence.finalizer.startswith("rljob.io/")
    assert not build_kopf_settings(is_namespaced=False).scanning.disabled
