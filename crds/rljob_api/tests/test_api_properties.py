"""Properties over everything the schema accepts: round trips, rules that never crash, jobs that resolve."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.catalogue import DEFAULT_CATALOGUE
from rljob_api.contract import ResolvedJob
from rljob_api.findings import has_errors
from rljob_api.load import parse_job
from rljob_api.resolve import resolve_job
from rljob_api.rules import Target, check_job
from rljob_api.supported import find_unsupported
from rljob_api.testing import get_schema, list_schema_violations, make_document
from rljob_api.v1alpha1 import IPFamily, RLJobStatus

names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
EDGES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def build_values(node: dict[str, Any], path: str) -> st.SearchStrategy[Any]:
    """Values that a schema accepts: every bound is hit now and then."""
    if node.get("x-kubernetes-int-or-string"):
        return st.one_of(st.integers(0, 10**6), st.sampled_from(["500m", "1.5Gi", "16Gi", "3"]))
    if "enum" in node:
        return st.sampled_from(node["enum"])
    match node["type"]:
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(node["minimum"], node.get("maximum", 2**40))
        case "number":
            return st.floats(
                node.get("minimum", -1e9),
                node.get("maximum", 1e9),
                exclude_min=node.get("exclusiveMinimum", False),
                exclude_max=node.get("exclusiveMaximum", False),
                allow_nan=False,
                allow_infinity=False,
            )
        case "string":
            if "pattern" in node:
                pattern = node["pattern"].replace("^/", "^/[a-z]*$") if node["pattern"] == "^/" else node["pattern"]
                return st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True).filter(
                    lambda text: node.get("minLength", 0) <= len(text) <= node.get("maxLength", 10**6)
                )
            return st.text(
                st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]),
                min_size=node.get("minLength", 0),
                max_size=min(node["maxLength"], 12) if "maxLength" in node else 12,
            )
        case "array":
            keys = node.get("x-kubernetes-list-map-keys")
            return st.lists(
                build_values(node["items"], f"{path}[]"),
                min_size=node.get("minItems", 0),
                max_size=max(node.get("minItems", 0), 2),
                unique_by=(lambda item: tuple(item[key] for key in keys)) if keys else None,
            )
        case _:
            if "properties" not in node:
                return st.dictionaries(names, st.one_of(names, st.integers(0, 9)), max_size=2)
            required = set(node.get("required", []))
            return st.fixed_dictionaries(
                {name: build_values(node["properties"][name], f"{path}.{name}") for name in sorted(required)},
                optional={
                    name: build_values(child, f"{path}.{name}")
                    for name, child in node["properties"].items()
                    if name not in required
                },
            )


SPECS = build_values(get_schema()["properties"]["spec"], "spec")
STATUSES = build_values(get_schema()["properties"]["status"], "status")


@EDGES
@given(spec=SPECS)
def test_what_the_schema_accepts_the_types_accept_and_dump_back(spec: dict[str, Any]) -> None:
    document = {**make_document(), "spec": spec}
    job, findings = parse_job(document)
    assert job is not None, [finding.format() for finding in findings]
    dumped = job.model_dump(mode="json", exclude_none=True)
    assert list_schema_violations(dumped) == []
    again, _ = parse_job(dumped)
    assert again == job


@EDGES
@given(status=STATUSES)
def test_statuses_survive_the_round_trip(status: dict[str, Any]) -> None:
    model = RLJobStatus.model_validate(status)
    dumped = model.model_dump(mode="json", exclude_none=True)
    assert list_schema_violations({**make_document(), "status": dumped}) == []
    assert RLJobStatus.model_validate(dumped) == model


@EDGES
@given(spec=SPECS, target=st.sampled_from(Target), num_rows=st.none() | st.integers(0, 10**4))
def test_no_valid_job_crashes_the_rules(spec: dict[str, Any], target: Target, num_rows: int | None) -> None:
    job, _ = parse_job({**make_document(), "spec": spec})
    assert job is not None
    config = {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    for finding in [
        *check_job(job, model_config=config, num_train_rows=num_rows, target=target),
        *find_unsupported(job.spec),
    ]:
        assert finding.path.startswith("spec")
        assert finding.message


SMALL_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "algorithm.type": st.sampled_from(["GRPO", "PPO", "DAPO", "GSPO", "ReinforcePlusPlus"]),
        "rollout.engine": st.sampled_from(["SGLang", "VLLM", "Native"]),
        "rollout.tensorParallelSize": st.integers(1, 16),
        "rollout.samplesPerPrompt": st.integers(1, 9),
        "training.promptsPerStep": st.integers(1, 64),
        "training.miniBatchPrompts": st.integers(1, 64),
        "training.microBatchSequences": st.integers(1, 16),
        "training.sequenceParallelSize": st.integers(1, 4),
        "cluster.nodes": st.integers(1, 3),
        "cluster.gpusPerNode": st.integers(0, 8),
        "cluster.ranksPerNode": st.integers(1, 8),
    },
)


@settings(max_examples=400, deadline=None)
@given(changes=SMALL_CHANGES)
def test_a_job_without_errors_resolves_to_sizes_that_fit(changes: dict[str, Any]) -> None:
    job, _ = parse_job(make_document(changes))
    assert job is not None
    if has_errors(check_job(job)):
        return
    resolved = resolve_job(job, uid="u", catalogue=DEFAULT_CATALOGUE, target=Target.KUBERNETES, ip_family=IPFamily.IPV4)
    layout, training = resolved.layout, resolved.spec.training
    num_sequences = training.prompts_per_step * resolved.spec.rollout.samples_per_prompt
    assert layout.num_engines * layout.tensor_parallel_size == layout.world_size
    assert layout.world_size == layout.num_nodes * layout.ranks_per_node
    assert num_sequences % layout.world_size == 0
    assert training.mini_batch_prompts is not None
    assert training.prompts_per_step % training.mini_batch_prompts == 0
    assert (training.micro_batch_tokens is None) != (training.micro_batch_sequences is None)
    assert ResolvedJob.model_validate_json(resolved.model_dump_json(exclude_none=True)) == resolved
    assert not has_errors(check_job(job.model_copy(update={"spec": resolved.spec}))), "its own output is valid"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = st.sampled_from(
    [
        "spec",
        "spec.model",
        "spec.data.train",
        "spec.reward.functions",
        "spec.cluster",
        "spec.cluster.env",
        "metadata",
        "status",
        "spec.rollout.topP",
        "spec.training.totalSteps",
        "spec.cluster.volumes",
        "spec.algorithm.type",
        "spec.suspend",
        "spec.cluster.workerResources",
        "spec.rollout.engineArgs",
        "spec.failurePolicy.rules",
    ]
)


@settings(max_examples=300, deadline=None)
@given(path=PATHS, value=JSON)
def test_no_document_crashes_the_parser(path: str, value: Any) -> None:
    document = make_document({path: value})
    job, findings = parse_job(document)
    assert (job is None) == bool(findings)
    for finding in findings:
        assert finding.path.split("[")[0].split(".")[0] in ("spec", "metadata", "status")
