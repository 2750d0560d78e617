"""What reaches the Ray container's environment."""

import pytest
from render_cases import make_resolved

from rljob_operator.render.pod_template import build_pod_template
from rljob_operator.render.types import RenderOptions


def render_environment(role="worker", **overrides):
    pod = build_pod_template(make_resolved(**overrides), role, 1, RenderOptions())
    entries = pod.template["spec"]["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names)), "a name twice: the last would win silently"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}, pod.findings


def test_user_env_wins_over_a_default():
    env = [{"name": "NCCL_DEBUG", "value": "INFO"}]
    environment, findings = render_environment(cluster={"gpusPerNode": 2, "env": env})
    assert environment["NCCL_DEBUG"] == "INFO"
    assert findings == []


def test_user_reference_replaces_a_default_value():
    reference = {"configMapKeyRef": {"name": "nccl", "key": "debug"}}
    environment, _ = render_environment(
        cluster={"gpusPerNode": 2, "env": [{"name": "NCCL_DEBUG", "valueFrom": reference}]}
    )
    assert environment["NCCL_DEBUG"] == reference


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "POD_IP", "POD_IPS", "RLJOB_CONFIG"])
def test_owned_names_are_restored_with_a_warning(name):
    plain, _ = render_environment()
    environment, findings = render_environment(cluster={"gpusPerNode": 2, "env": [{"name": name, "value": "disabled"}]})
    assert environment[name] == plain[name]
    assert [(finding.severity, finding.reason, finding.path) for finding in findings] == [
        ("Warning", "EnvironmentIgnored", "spec.cluster.env[0].name")
    ]


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "FQ_RAY_IP", "RAY_AUTH_TOKEN_PATH", "RAY_CLUSTER_NAME"])
def test_names_of_kuberay_are_removed_with_a_warning(name):
    environment, findings = render_environment(cluster={"gpusPerNode": 2, "env": [{"name": name, "value": "x"}]})
    assert name not in environment
    assert [finding.path for finding in findings] == ["spec.cluster.env[0].name"]


@pytest.mark.parametrize("name", ["RAY_REDIS_ADDRESS", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"])
def test_names_that_make_kuberay_refuse_the_cluster_are_errors(name):
    _, findings = render_environment(role="head", cluster={"gpusPerNode": 2, "env": [{"name": name, "value": "1"}]})
    assert [(finding.severity, finding.path) for finding in findings] == [("Error", "spec.cluster.env[0].name")]


@pytest.mark.parametrize(
    ("engine", "value", "want"),
    [
        ("SGLang", "expandable_segments:True", None),
        ("SGLang", "expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:128"),
        ("VLLM", "max_split_size_mb:128, expandable_segments:True", "max_split_size_mb:128"),
        ("SGLang", "max_split_size_mb:128", "max_split_size_mb:128"),
        ("VLLM", "Expandable_Segments: true", None),
        ("SGLang", "expandable_segments:False", "expandable_segments:False"),
        ("Native", "expandable_segments:True", "expandable_segments:True"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("placement", ["Colocated", "Separate"])
def test_expandable_segments_never_meet_an_engine_that_cannot_have_them(engine, value, want, name, placement):
    version = {"SGLang": "0.5.16", "VLLM": "0.24.0", "Native": None}[engine]
    ranks = {"ranksPerNode": 1} if placement == "Separate" else {}
    environment, findings = render_environment(
        rollout={"engine": engine, "engineVersion": version, "placement": placement},
        cluster={"gpusPerNode": 2, "env": [{"name": name, "value": value}], **ranks},
    )
    assert environment.get(name) == want
    assert [finding.reason for finding in findings] == (["AllocatorConfIncompatible"] if want != value else [])


def test_pod_ip_is_defined_before_it_is_used():
    pod = build_pod_template(make_resolved(), "worker", 1, RenderOptions())
    entries = pod.template["spec"]["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    users = [name for name, entry in zip(names, entries, strict=True) if "$(POD_IP)" in entry.get("value", "")]
    assert users == ["SGLANG_HOST_IP"]
    assert names.index("POD_IP") < names.index("SGLANG_HOST_IP")


@pytest.mark.parametrize(
    ("role", "gpus", "want_hidden"), [("head", 2, True), ("worker", 2, False), ("head", 0, True), ("worker", 0, True)]
)
def test_pods_without_gpus_see_no_device_of_the_node(role, gpus, want_hidden):
    environment, _ = render_environment(role=role, cluster={"gpusPerNode": gpus, "ranksPerNode": 2})
    assert ("CUDA_VISIBLE_DEVICES" in environment) is want_hidden
    assert environment.get("NVIDIA_VISIBLE_DEVICES") == ("void" if want_hidden else None)


def test_amd_head_hides_amd_devices():
    environment, _ = render_environment(role="head", cluster={"gpusPerNode": 2, "gpuResourceName": "amd.com/gpu"})
    assert environment["HIP_VISIBLE_DEVICES"] == ""
    assert "ROCR_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(
    ("cpu", "ranks", "want"), [("500m", 1, "1"), ("2", 2, "1"), ("12", 4, "3"), ("7", 2, "3"), ("1", 4, "1")]
)
def test_threads_per_rank(cpu, ranks, want):
    environment, _ = render_environment(
        rollout={"engine": "Native", "engineVersion": None},
        cluster={"gpusPerNode": 0, "ranksPerNode": ranks, "workerResources": {"cpu": cpu, "memory": "8Gi"}},
    )
    assert environment["OMP_NUM_THREADS"] == want


@pytest.mark.parametrize(("source", "want"), [("/models/m", "1"), ("Qwen/Qwen3-8B", None)])
def test_hub_is_offline_only_for_mounted_weights(source, want):
    environment, _ = render_environment(model={"source": source})
    assert environment.get("HF_HUB_OFFLINE") == want


def test_ray_waits_for_the_checkpoint_when_it_stops_a_job():
    environment, _ = render_environment(role="head", cluster={"gpusPerNode": 2, "terminationGracePeriodSeconds": 77})
    assert environment["RAY_JOB_STOP_WAIT_TIME_S"] == "77"
