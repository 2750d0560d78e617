"""The generated CRD: structural, small, the same as the types."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rljob_api.crdgen.__main__ import OUTPUTS, main
from rljob_api.crdgen.cel import RULES_OF_MODEL
from rljob_api.crdgen.crd import MAX_CRD_BYTES, build_crd, render_crd
from rljob_api.crdgen.schema import SchemaError, build_structural_schema
from rljob_api.names import NAME_PATTERN
from rljob_api.testing import make_document
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.base import ApiModel

ROOT = Path(__file__).resolve().parents[3]
CRD = build_crd()
SCHEMA: dict[str, Any] = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
FREE_FORM = {
    "spec.rollout.engineArgs",
    "spec.cluster.podTemplate",
    "spec.cluster.headPodTemplate",
    "spec.cluster.workerPodTemplate",
    "spec.cluster.env[].valueFrom",
    "spec.cluster.envFrom[]",
    "spec.trainer.env[].valueFrom",
}


def walk(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")


NODES = [(path, node) for section in ("spec", "status") for path, node in walk(SCHEMA["properties"][section], section)]


def test_the_checked_in_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_check_names_a_stale_file_and_writing_repairs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crds" / "rljob_api").mkdir(parents=True)
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert "crds/rljob.io_rljobs.yaml" in capsys.readouterr().err
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()) == sorted(
        OUTPUTS
    )


def test_a_wrong_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path)])


def test_it_is_small_enough_for_client_side_apply() -> None:
    size = len(render_crd().encode())
    assert size < MAX_CRD_BYTES / 2
    assert yaml.safe_load(render_crd()) == CRD
    assert "&id" not in render_crd()


def test_names_and_columns() -> None:
    names = CRD["spec"]["names"]
    assert (names["kind"], names["shortNames"], names["categories"]) == ("RLJob", ["rlj"], ["rl"])
    version = CRD["spec"]["versions"][0]
    assert [column["name"] for column in version["additionalPrinterColumns"]] == [
        "Phase",
        "Step",
        "Reward",
        "Tok/s",
        "Attempt",
        "Age",
    ]
    assert all("priority" not in column for column in version["additionalPrinterColumns"])
    assert version["subresources"] == {"status": {}}
    known = {f".{path}" for path, _ in NODES} | {".metadata.creationTimestamp"}
    assert {column["jsonPath"] for column in version["additionalPrinterColumns"]} <= known


@pytest.mark.parametrize(("path", "node"), NODES, ids=[path for path, _ in NODES])
def test_the_schema_is_structural_and_bounded(path: str, node: dict[str, Any]) -> None:
    for forbidden in ("$ref", "$defs", "title", "nullable", "const", "uniqueItems", "examples", "oneOf", "allOf"):
        assert forbidden not in node
    name = path.rpartition(".")[2].rstrip("[]")
    assert re.fullmatch(r"[a-z][a-zA-Z0-9]*", name), "camelCase"
    assert node.get("default", 0) is not None
    if not path.endswith("[]") and path != "spec":
        assert node["description"], "every field says what it is"
    if node.get("x-kubernetes-int-or-string"):
        assert "type" not in node
        assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        return
    assert "anyOf" not in node
    match node["type"]:
        case "string":
            assert {"enum", "maxLength", "format"} & set(node), "bounded"
        case "integer":
            assert isinstance(node["minimum"], int)
            assert node["format"] in ("int32", "int64")
        case "number":
            assert isinstance(node.get("exclusiveMinimum", False), bool)
            if path.startswith("spec"):
                assert "maximum" in node
        case "array":
            assert node["maxItems"] <= 256
            assert node["x-kubernetes-list-type"] in ("atomic", "map")
            for key in node.get("x-kubernetes-list-map-keys", []):
                assert key in node["items"]["required"]
        case "object":
            free_form = node.get("x-kubernetes-preserve-unknown-fields", False)
            assert free_form == (path in FREE_FORM), "free-form only at the named places"
            assert free_form or node["properties"]
            assert "additionalProperties" not in node
        case "boolean":
            pass
        case other:
            pytest.fail(f"unexpected type {other}")
    if "pattern" in node:
        re.compile(node["pattern"])
        assert not re.search(r"\(\?[=!<]|\\[1-9]", node["pattern"]), "RE2 has no look-around and no backreferences"


def test_every_rule_is_attached_where_its_fields_are() -> None:
    attached = [rule for _, node in NODES for rule in node.get("x-kubernetes-validations", [])]
    wanted = [rule.to_schema() for name, rules in RULES_OF_MODEL.items() if name != "EnvVar" for rule in rules]
    env_rules = [rule.to_schema() for rule in RULES_OF_MODEL["EnvVar"]]
    assert all(rule in attached for rule in [*wanted, *env_rules])
    for path, node in NODES:
        for rule in node.get("x-kubernetes-validations", []):
            target: Any = node
            for part in rule.get("fieldPath", "").split(".")[1:]:
                assert part in target["properties"], f"{path}: {rule['fieldPath']}"
                target = target["properties"][part]
    assert SCHEMA["x-kubernetes-validations"][1]["rule"] == f"self.metadata.name.matches('{NAME_PATTERN}')"


def test_status_has_no_defaults() -> None:
    """The API server would write them into every status."""
    assert [path for path, node in NODES if path.startswith("status") and "default" in node] == []


def fill_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server does: parents before children, absent keys only."""
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                fill_defaults(value[name], child)
    elif isinstance(value, list):
        for item in value:
            fill_defaults(item, schema.get("items", {}))
    return value


RICH: dict[str, Any] = {
    "critic": {},
    "reference": {},
    "model.lora": {"rank": 4},
    "algorithm": {
        "type": "PPO",
        "kl": {"placement": "Loss"},
        "dynamicSampling": {},
        "overlongPenalty": {"bufferTokens": 1},
    },
    "warmStart": {"supervised": {"data": ["/w"], "steps": 3}},
    "tracking": {"wandb": {"project": "p"}, "mlflow": {"trackingUri": "http://m"}},
    "trainer": {"command": ["x"], "env": [{"name": "A"}]},
    "cluster": {"volumes": [{"name": "v", "mountPath": "/v", "emptyDir": {}}], "env": [{"name": "A", "value": "1"}]},
    "failurePolicy": {"rules": [{"onReason": "HeadLost", "action": "Fail"}]},
}


@pytest.mark.parametrize("changes", [{}, RICH], ids=["small", "rich"])
def test_defaults_of_the_server_are_those_of_the_types(changes: dict[str, Any]) -> None:
    document = make_document(changes)
    by_types = RLJobSpec.model_validate(document["spec"])
    by_server = RLJobSpec.model_validate(fill_defaults(copy.deepcopy(document["spec"]), SCHEMA["properties"]["spec"]))
    assert by_server == by_types
    assert by_server.model_dump_json() == by_types.model_dump_json()


def test_undefined_statistics_are_absent() -> None:
    document = make_document({"status": {"progress": {"step": 3}}})
    job = RLJob.model_validate(document)
    assert job.status is not None
    status = job.status.model_copy(
        update={"progress": type(job.status.progress).model_validate({"step": 3, "klMean": float("nan")})}  # type: ignore[union-attr]
    )
    dumped = status.model_dump(mode="json", exclude_none=True)
    assert dumped["progress"] == {"step": 3}


def test_types_without_a_structural_form_are_refused() -> None:
    class Node(ApiModel):
        """A tree."""

        children: list[Node] = []

    class Union(ApiModel):
        """Two types."""

        value: int | str = 1

    class Table(ApiModel):
        """A typed map."""

        values: dict[str, int] = {}

    Node.model_rebuild(_types_namespace={"Node": Node})
    for model, want in ((Node, "contains itself"), (Union, "union"), (Table, "maps")):
        with pytest.raises(SchemaError, match=want):
            build_structural_schema(model, {})


def test_kubernetes_own_model_accepts_the_crd() -> None:
    kubernetes_models = pytest.importorskip("kubernetes.client.models", reason="the operator extra is not installed")
    model = kubernetes_models.V1CustomResourceDefinition
    assert issubclass(model, BaseModel), "strict models since kubernetes 37"
    assert model.model_validate(CRD).spec.group == "rljob.io"
