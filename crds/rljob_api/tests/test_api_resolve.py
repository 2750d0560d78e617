"""Derived defaults and job.json."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.catalogue import DEFAULT_CATALOGUE, Catalogue, CatalogueError, load_catalogue
from rljob_api.contract import ResolvedJob
from rljob_api.quantity import format_bytes, parse_quantity
from rljob_api.resolve import compute_layout, compute_shared_memory, count_drawn_prompts, resolve_job, resolve_spec
from rljob_api.targets import Target
from rljob_api.testing import make_job
from rljob_api.v1alpha1 import Engine, IPFamily, RLJobSpec

SEPARATE: dict[str, Any] = {"rollout.placement": "Separate", "cluster.ranksPerNode": 6}


def resolve(changes: dict[str, Any] | None = None, target: Target = Target.KUBERNETES) -> RLJobSpec:
    return resolve_spec(make_job(changes).spec, DEFAULT_CATALOGUE, target)


@pytest.mark.parametrize(("prompts", "factor", "drawn"), [(7, 1.0, 7), (10, 1.1, 11), (64, 1.25, 80), (3, 1.5, 5)])
def test_over_sampling_starts_more_prompts(prompts: int, factor: float, drawn: int) -> None:
    spec = make_job({"training.promptsPerStep": prompts, "rollout.overSample": factor}).spec
    assert count_drawn_prompts(spec) == drawn


def look_up(spec: RLJobSpec, path: str) -> Any:
    value: Any = spec.model_dump(mode="json", exclude_none=True)
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else value[int(part)]
        if value is None:
            return None
    return value


@pytest.mark.parametrize(
    ("changes", "path", "want"),
    [
        ({}, "training.miniBatchPrompts", 128),
        ({"training.miniBatchPrompts": 32}, "training.miniBatchPrompts", 32),
        ({}, "training.microBatchTokens", 8192),
        ({"rollout.maxResponseTokens": 30_000}, "training.microBatchTokens", 30_512),
        ({"training.microBatchSequences": 4}, "training.microBatchTokens", None),
        ({}, "cluster.ranksPerNode", 8),
        ({"cluster": {"gpusPerNode": 0, "ranksPerNode": 3}}, "cluster.ranksPerNode", 3),
        ({"training.seed": 7}, "data.shuffleSeed", 7),
        ({"training.seed": 7, "data.shuffleSeed": 0}, "data.shuffleSeed", 0),
        ({}, "rollout.engineVersion", "0.5.16"),
        ({"rollout.engine": "VLLM"}, "rollout.engineVersion", "0.24.0"),
        ({"rollout.engine": "Native"}, "rollout.engineVersion", None),
        ({"rollout.engine": "VLLM"}, "cluster.image", "ghcr.io/rljob/trainer-vllm:0.1.0"),
        ({"cluster.image": "own:1"}, "cluster.image", "own:1"),
        ({"cluster.image": "own:1"}, "cluster.rayVersion", "2.60.0"),
        ({"cluster.image": "own:1", "rollout.engineVersion": "0.5.5"}, "rollout.engineVersion", "0.5.5"),
        ({}, "cluster.headResources", {"cpu": "2", "memory": "8Gi", "ephemeralStorage": "10Gi"}),
        (
            {"cluster.headResources.memory": "4Gi"},
            "cluster.headResources",
            {"cpu": "2", "memory": "4Gi", "ephemeralStorage": "10Gi"},
        ),
        (
            {"cluster.gpusPerNode": 4},
            "cluster.workerResources",
            {"cpu": "48", "memory": "512Gi", "ephemeralStorage": "50Gi"},
        ),
        (
            {"cluster": {"gpusPerNode": 0, "ranksPerNode": 2}},
            "cluster.workerResources",
            {"cpu": "4", "memory": "16Gi", "ephemeralStorage": "10Gi"},
        ),
        ({"cluster": {"gpusPerNode": 0, "ranksPerNode": 2}}, "cluster.sharedMemory", "4Gi"),
        ({}, "cluster.sharedMemory", "64Gi"),
        ({"cluster.sharedMemory": "1Gi"}, "cluster.sharedMemory", "1Gi"),
        ({}, "critic", None),
        ({"algorithm.type": "PPO"}, "critic.source", "Qwen/Qwen3-8B"),
        ({"algorithm.type": "PPO", "training.epochsPerStep": 2}, "critic.epochsPerStep", 2),
        ({"algorithm.type": "PPO", "critic": {"source": "/critic"}}, "critic.source", "/critic"),
        ({}, "reference", None),
        ({"algorithm.kl.placement": "Loss"}, "reference.source", "Qwen/Qwen3-8B"),
        ({"model.lora": {"rank": 16}}, "model.lora.alpha", 32.0),
        ({}, "reward.functions.0.name", "gsm8k"),
        (
            {"reward.functions": [{"type": "GSM8K"}, {"type": "GSM8K"}, {"type": "GSM8K", "name": "gsm8k"}]},
            "reward.functions.0.name",
            "gsm8k-2",
        ),
        (
            {"reward.functions": [{"type": "GSM8K"}, {"type": "GSM8K"}, {"type": "GSM8K", "name": "gsm8k"}]},
            "reward.functions.1.name",
            "gsm8k-3",
        ),
        ({"reward.functions": [{"type": "Python", "path": "/r.py"}]}, "reward.functions.0.function", "score"),
        ({}, "algorithm.policyLoss", "PPOClip"),
        ({}, "rollout.maxStalenessSteps", 0),
        ({}, "algorithm.rolloutCorrection.level", "None"),
        (SEPARATE, "rollout.maxStalenessSteps", 1),
        ({**SEPARATE, "rollout.maxStalenessSteps": 0}, "rollout.maxStalenessSteps", 0),
        # Samples of older weights are corrected unless somebody says otherwise.
        (SEPARATE, "algorithm.rolloutCorrection.level", "Token"),
        (SEPARATE, "algorithm.rolloutCorrection.truncation", 2.0),
        ({**SEPARATE, "rollout.maxStalenessSteps": 0}, "algorithm.rolloutCorrection.level", "None"),
        ({**SEPARATE, "algorithm.rolloutCorrection.level": "None"}, "algorithm.rolloutCorrection.level", "None"),
        (
            {**SEPARATE, "algorithm.rolloutCorrection.level": "Sequence"},
            "algorithm.rolloutCorrection.level",
            "Sequence",
        ),
        # The ratio to the engine's log-probabilities is the correction, except where the loss has no ratio.
        (
            {**SEPARATE, "algorithm.rolloutCorrection.bypassOldLogProbs": True},
            "algorithm.rolloutCorrection.level",
            "None",
        ),
        (
            {**SEPARATE, "algorithm": {"type": "GPG", "rolloutCorrection": {"bypassOldLogProbs": True}}},
            "algorithm.rolloutCorrection.level",
            "Token",
        ),
        (
            {**SEPARATE, "cluster": {"gpusPerNode": 0, "ranksPerNode": 2}},
            "algorithm.rolloutCorrection.level",
            "Token",
        ),
    ],
)
def test_derived_defaults(changes: dict[str, Any], path: str, want: Any) -> None:
    assert look_up(resolve(changes), path) == want


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        SEPARATE,
        {"algorithm.type": "PPO"},
        {"rollout.engine": "Native", "cluster": {"gpusPerNode": 0, "ranksPerNode": 2}},
    ],
)
def test_resolving_is_idempotent_and_does_not_touch_its_input(changes: dict[str, Any], target: Target) -> None:
    job = make_job(changes)
    before = job.model_dump_json()
    once = resolve_spec(job.spec, DEFAULT_CATALOGUE, target)
    assert resolve_spec(once, DEFAULT_CATALOGUE, target) == once
    assert job.model_dump_json() == before


def test_a_local_run_gets_no_pods() -> None:
    spec = resolve({"rollout.engine": "Native"}, Target.LOCAL)
    assert spec.cluster.image is None
    assert spec.cluster.worker_resources.cpu is None
    assert spec.rollout.engine_version is None


def test_the_resolved_job_survives_json() -> None:
    job = resolve_job(
        make_job({"cluster.nodes": 2, "rollout.tensorParallelSize": 16}),
        uid="1234",
        catalogue=DEFAULT_CATALOGUE,
        target=Target.KUBERNETES,
        ip_family=IPFamily.IPV6,
        attempt=3,
        resume_floor_step=40,
    )
    assert ResolvedJob.model_validate_json(job.model_dump_json()) == job
    assert ResolvedJob.model_validate_json(job.model_dump_json(exclude_none=True)) == job
    assert (job.name, job.namespace, job.uid) == ("gsm8k-grpo", "research", "1234")
    assert (job.attempt, job.resume_floor_step, job.server.port) == (3, 40, 8090)
    assert (job.layout.world_size, job.layout.num_engines, job.layout.num_nodes) == (16, 1, 2)
    assert (job.engine, job.engine_version, job.ip_family) == (Engine.SGLANG, "0.5.16", IPFamily.IPV6)
    assert job.paths.run_directory == "/var/lib/rljob/research/gsm8k-grpo"


@pytest.mark.parametrize(
    ("changes", "target", "directory", "want"),
    [
        ({"checkpoint.storage.path": "team-a/"}, Target.KUBERNETES, None, "/var/lib/rljob/team-a/research/gsm8k-grpo"),
        ({"metadata.namespace": None}, Target.KUBERNETES, None, "/var/lib/rljob/default/gsm8k-grpo"),
        ({}, Target.LOCAL, None, "runs/gsm8k-grpo"),
        ({"checkpoint.storage.path": "out/x"}, Target.LOCAL, None, "out/x"),
        ({"checkpoint.storage.path": "out/x"}, Target.LOCAL, "/tmp/y", "/tmp/y"),
    ],
)
def test_run_directories(changes: dict[str, Any], target: Target, directory: str | None, want: str) -> None:
    job = resolve_job(
        make_job({**changes, "rollout.engine": "Native"}),
        uid="u",
        catalogue=DEFAULT_CATALOGUE,
        target=target,
        ip_family=IPFamily.IPV4,
        run_directory=directory,
    )
    assert job.paths.run_directory == want
    assert job.engine_version is None


def test_a_cluster_needs_a_decided_address_family() -> None:
    with pytest.raises(ValueError, match="IPv4 or IPv6"):
        resolve_job(make_job(), uid="u", catalogue=DEFAULT_CATALOGUE, target=Target.KUBERNETES, ip_family=IPFamily.AUTO)


@pytest.mark.parametrize(
    ("changes", "world_size", "engine_gpus", "num_engines"),
    [
        ({}, 8, 0, 8),
        (SEPARATE, 6, 2, 2),
        ({**SEPARATE, "rollout.tensorParallelSize": 2}, 6, 2, 1),
        ({**SEPARATE, "cluster.nodes": 2, "rollout.tensorParallelSize": 4}, 12, 2, 1),
        ({**SEPARATE, "cluster.ranksPerNode": 1}, 1, 7, 7),
        # On CPUs nothing is split: an engine for each tensor parallel group of ranks.
        ({**SEPARATE, "cluster": {"gpusPerNode": 0, "ranksPerNode": 2}}, 2, 0, 2),
        # Not separate: GPUs without a rank have no engine either.
        ({"cluster.ranksPerNode": 6}, 6, 0, 6),
    ],
)
def test_ranks_and_engines(changes: dict[str, Any], world_size: int, engine_gpus: int, num_engines: int) -> None:
    layout = compute_layout(make_job(changes).spec)
    assert (layout.world_size, layout.num_engines) == (world_size, num_engines)
    assert layout.engine_gpus_per_node == engine_gpus
    assert layout.engine_slots_per_node == (engine_gpus or layout.ranks_per_node)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({**SEPARATE, "rollout.tensorParallelSize": 3}, "3 does not divide the 2 GPUs of the engines"),
        ({"rollout.placement": "Separate"}, "ranksPerNode: must be less than gpusPerNode \\(8\\)"),
        ({"rollout.tensorParallelSize": 3}, "3 does not divide the 8 ranks"),
        ({"cluster.gpusPerNode": 0}, "ranksPerNode: required"),
    ],
)
def test_impossible_layouts(changes: dict[str, Any], want: str) -> None:
    with pytest.raises(ValueError, match=want):
        compute_layout(make_job(changes).spec)


def test_an_engine_version_without_image_names_what_there_is() -> None:
    with pytest.raises(CatalogueError, match=r"no image with SGLang 0\.5\.5; it has 0\.5\.16.*spec\.cluster\.image"):
        resolve({"rollout.engineVersion": "0.5.5"})


def test_catalogues() -> None:
    catalogue = load_catalogue(
        "- {engine: SGLang, image: 'a:1', engineVersion: 0.5.23, rayVersion: 2.60.0}\n"
        "- {engine: SGLang, image: 'a:0', engineVersion: 0.5.5}\n"
    )
    assert catalogue.find(Engine.SGLANG).image == "a:1"
    assert catalogue.find(Engine.SGLANG, "0.5.5").image == "a:0"
    with pytest.raises(CatalogueError, match="no image with Native; it has images with SGLang"):
        catalogue.find(Engine.NATIVE)
    assert load_catalogue(DEFAULT_CATALOGUE.model_dump_json()) == DEFAULT_CATALOGUE


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("- {engine: SGLang, image: x}", "engineVersion is required for SGLang"),
        ("- {engine: SGLang, image: x, engineVersion: 0.5.16, tag: y}", r"entries\.0\.tag"),
        ("entries: []", "entries"),
        ("{", "not YAML"),
        ("3", "catalogue"),
    ],
)
def test_bad_catalogues_are_named(text: str, want: str) -> None:
    with pytest.raises(CatalogueError, match=want):
        load_catalogue(text)


def test_the_default_catalogue_has_every_engine() -> None:
    assert {entry.engine for entry in DEFAULT_CATALOGUE.entries} == set(Engine)
    assert isinstance(DEFAULT_CATALOGUE, Catalogue)


@pytest.mark.parametrize(
    ("text", "want"),
    [("16Gi", 16 * 2**30), ("500m", 0.5), ("1.5k", 1500), ("2", 2), ("1E", 10**18), ("0.5Mi", 2**19), ("1M", 10**6)],
)
def test_quantities(text: str, want: float) -> None:
    assert parse_quantity(text) == want


@pytest.mark.parametrize("text", ["", "16Gb", "-1", "1e3", "Gi", " 1", "1 Gi", "1.Gi"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="16Gi"):
        parse_quantity(text)


@given(st.integers(min_value=1, max_value=2**60))
def test_bytes_survive_formatting(num_bytes: int) -> None:
    assert parse_quantity(format_bytes(num_bytes)) == num_bytes


@given(st.integers(min_value=4, max_value=2**40).map(lambda mebibytes: f"{mebibytes}Mi"))
def test_shared_memory_is_at_most_a_quarter(memory: str) -> None:
    shared = parse_quantity(compute_shared_memory(memory))
    assert 0 < shared <= parse_quantity(memory) / 4
    assert shared <= 64 * 2**30
