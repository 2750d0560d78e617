"""Golden renders: every object the operator creates for typical jobs, compared with checked-in YAML.

`RLJOB_UPDATE_GOLDEN=1 pytest .../test_op_render_golden.py` rewrites the files; read the diff before committing it.
"""

import os
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from render_cases import find_kuberay_crd, get_options, load_case, make_strict_validator, render_case, resolve_case

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Severity
from rljob_api.rules import check_job
from rljob_operator.cli.yaml_output import format_documents
from rljob_operator.render import OwnerRef, collect_findings, render_cluster_objects, render_submission
from rljob_operator.render.lifecycle import read_pre_stop_script

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name.removesuffix(".job.yaml") for path in GOLDEN.glob("*.job.yaml"))
KUBERNETES_VERSION = "1.36"


def dump_golden(name: str) -> str:
    resolved = resolve_case(name)
    objects = render_case(name)
    for document in objects:
        if document["kind"] == "ConfigMap":
            # Both have tests of their own; here they would change with every field of the API.
            document["data"] = dict.fromkeys(document["data"], "...")
        if document["kind"] == "RayCluster":
            document["metadata"]["annotations"]["rljob.io/spec-hash"] = "..."
    documents = [
        *objects,
        {"submission": render_submission(resolved, attempt=2, submission_id="uid-2", resume_floor_step=40)},
        {"findings": [finding.format() for finding in collect_findings(resolved, get_options(name))]},
    ]
    return format_documents(documents)


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    path = GOLDEN / f"{name}.golden.yaml"
    got = dump_golden(name)
    if os.environ.get("RLJOB_UPDATE_GOLDEN"):
        path.write_text(got)
    want = path.read_text()
    assert list(yaml.safe_load_all(got)) == list(yaml.safe_load_all(want))
    assert got == want


def test_all_required_cases_are_there():
    assert {
        "one-node-tp2-sglang-0516",
        "two-nodes-tp16-sglang",
        "ipv6-sglang",
        "ipv6-secondary-vllm",
        "separate-sglang",
        "sglang-0505",
        "sglang-0523",
        "vllm-024",
        "native-cpu-quickstart",
    } <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_ray_cluster_matches_kuberay_schema(name):
    crd_path = find_kuberay_crd()
    if crd_path is None:
        pytest.skip("no KubeRay CRDs: neither the built test binaries nor the Go module cache have them")
    [cluster] = [document for document in render_case(name) if document["kind"] == "RayCluster"]
    make_strict_validator(crd_path).validate(cluster)


def test_strict_schema_finds_a_typo():
    """The check above can fail: server-side apply refuses unknown fields, so does the strict schema."""
    crd_path = find_kuberay_crd()
    if crd_path is None:
        pytest.skip("no KubeRay CRDs: neither the built test binaries nor the Go module cache have them")
    [cluster] = [document for document in render_case(CASES[0]) if document["kind"] == "RayCluster"]
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["nodeSelectr"] = {}
    with pytest.raises(jsonschema.ValidationError, match="nodeSelectr"):
        make_strict_validator(crd_path).validate(cluster)


@pytest.mark.parametrize("name", CASES)
def test_built_in_kinds_match_kubernetes_schema(name):
    documents = [document for document in render_case(name) if document["kind"] != "RayCluster"]
    assert [document["kind"] for document in documents] == ["Secret", "ConfigMap", "NetworkPolicy"]
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_pod_templates_match_kubernetes_schema(name):
    [cluster] = [document for document in render_case(name) if document["kind"] == "RayCluster"]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {**pod["metadata"], "name": "pod"}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_job_config_is_the_resolved_job(name):
    resolved = resolve_case(name)
    [config_map] = [document for document in render_case(name) if document["kind"] == "ConfigMap"]
    assert ResolvedJob.model_validate_json(config_map["data"]["job.json"]) == resolved
    assert config_map["data"]["prestop.py"] == read_pre_stop_script()


@pytest.mark.parametrize("name", CASES)
def test_rendering_is_deterministic_and_does_not_touch_its_input(name):
    resolved = resolve_case(name)
    before = resolved.model_dump()
    first, second = render_case(name), render_case(name)
    assert first == second
    assert resolved.model_dump() == before


def test_input_files_are_valid_jobs():
    for name in CASES:
        job, findings = load_case(name)
        assert job is not None
        assert [finding.format() for finding in findings + check_job(job) if finding.severity is Severity.ERROR] == []


def test_render_refuses_generation_zero():
    resolved = resolve_case(CASES[0])
    with pytest.raises(ValueError, match="cluster_generation is 0"):
        render_cluster_objects(resolved, owner=OwnerRef("a", "b"), cluster_generation=0, auth_token="t")
    with pytest.raises(ValueError, match="auth_token is empty"):
        render_cluster_objects(resolved, owner=OwnerRef("a", "b"), cluster_generation=1, auth_token="")
