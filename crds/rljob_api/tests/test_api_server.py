"""A real API server takes the CRD, fills the defaults, and refuses bad jobs with the right words."""

from __future__ import annotations

import functools
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.findings import has_errors
from rljob_api.load import load_documents, parse_job
from rljob_api.rules import check_job
from rljob_api.testing import make_document
from rljob_api.v1alpha1 import RLJobSpec
from rljob_operator.testing.envtest import Envtest
from rljob_operator.testing.envtest_fixtures import envtest  # noqa: F401 - fixture

pytestmark = pytest.mark.integration

COLLECTION = "/apis/rljob.io/v1alpha1/namespaces/default/rljobs"
RULE_CASES = [
    entry
    for path in sorted((Path(__file__).parent / "rules").glob("*.yaml"))
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
]


@dataclass(frozen=True)
class Answer:
    """Status code, the object or the refusal's message, and the fields it blames."""

    code: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))

    @property
    def fields(self) -> set[str]:
        return {cause["field"] for cause in self.body.get("details", {}).get("causes", [])}


@functools.cache
def make_context(ca_path: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ca_path))


def send(server: Envtest, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One call, refusals included: `Envtest.request` raises, and the refusal is what is tested here."""
    request = urllib.request.Request(
        server.server + path,
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"Authorization": f"Bearer {server.token}", "Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=60, context=make_context(server.ca_path)) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.load(error))


def create(server: Envtest, document: dict[str, Any], *, validation: str = "Strict", dry_run: bool = True) -> Answer:
    document = json.loads(json.dumps(document))
    document["metadata"].pop("namespace", None)
    query = f"fieldValidation={validation}" + ("&dryRun=All" if dry_run else "")
    return send(server, "POST", f"{COLLECTION}?{query}", document)


def test_the_server_takes_the_crd_without_complaint(envtest: Envtest) -> None:  # noqa: F811
    crd = envtest.request("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.rljob.io")
    conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"
    assert crd["status"]["acceptedNames"]["shortNames"] == ["rlj"]


def test_the_server_fills_the_defaults_of_the_types(envtest: Envtest) -> None:  # noqa: F811
    document = make_document()
    answer = create(envtest, document)
    assert answer.code == 201, answer.message
    assert RLJobSpec.model_validate(answer.body["spec"]) == RLJobSpec.model_validate(document["spec"])
    job, findings = parse_job(answer.body)
    assert job is not None
    assert findings == []
    assert check_job(job) == []


EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("gsm8k-*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_server_takes_the_examples(envtest: Envtest, path: Path) -> None:  # noqa: F811
    for document in load_documents(path.read_text(encoding="utf-8")):
        answer = create(envtest, document)
        assert answer.code == 201, answer.message


REFUSED = yaml.safe_load((Path(__file__).parent / "server_refuses.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["says"])
def test_apply_refuses_a_bad_job(envtest: Envtest, case: dict[str, Any]) -> None:  # noqa: F811
    changes, field, text = case["job"], case.get("field"), case["says"]
    answer = create(envtest, make_document(changes))
    assert answer.code == 422, answer.message
    assert text in answer.message
    assert field is None or field in answer.fields
    job, findings = parse_job(make_document(changes))
    assert has_errors(findings) or (job is not None and has_errors(check_job(job))), "the CLI must refuse it as well"


def test_apply_names_an_unknown_field(envtest: Envtest) -> None:  # noqa: F811
    changes = {"rollout.tensorParalelSize": 2, "cluster.nodeSelector": {"a": "b"}}
    answer = create(envtest, make_document(changes))
    assert answer.code == 400
    assert 'unknown field "spec.rollout.tensorParalelSize"' in answer.message
    assert 'unknown field "spec.cluster.nodeSelector"' in answer.message


def test_without_validation_unknown_fields_are_pruned_and_free_form_ones_kept(envtest: Envtest) -> None:  # noqa: F811
    changes = {"rollout": {"tensorParalelSize": 2, "engineArgs": {"a": {"b": [1]}}}}
    answer = create(envtest, make_document(changes), validation="Ignore")
    assert answer.code == 201
    assert "tensorParalelSize" not in answer.body["spec"]["rollout"]
    assert answer.body["spec"]["rollout"]["tensorParallelSize"] == 1
    assert answer.body["spec"]["rollout"]["engineArgs"] == {"a": {"b": [1]}}


def list_accepted_documents() -> list[Any]:
    """Every repaired job of the rules' cases that no other rule refuses."""
    accepted = []
    for case in RULE_CASES:
        document = make_document({**case["bad"], **case["fix"]})
        job, _ = parse_job(document)
        assert job is not None
        if not has_errors(check_job(job)):
            accepted.append(pytest.param(document, id=f"{case['rule']}-{case['path']}"))
    return accepted


@pytest.mark.parametrize("document", list_accepted_documents())
def test_the_server_never_refuses_what_the_rules_accept(envtest: Envtest, document: dict[str, Any]) -> None:  # noqa: F811
    """A stricter CEL rule would refuse at apply what `rljob validate` calls good."""
    answer = create(envtest, document)
    assert answer.code == 201, answer.message


def test_applying_a_file_twice_changes_nothing(envtest: Envtest) -> None:  # noqa: F811
    document = make_document({"cluster.workerResources": {"cpu": 4, "memory": "16Gi"}, "cluster.sharedMemory": "1Gi"})
    document["metadata"].pop("namespace")
    path = f"{COLLECTION}/{document['metadata']['name']}?fieldManager=kubectl&force=true"
    generations = [
        envtest.request("PATCH", path, document, content_type="application/apply-patch+yaml")["metadata"]["generation"]
        for _ in range(2)
    ]
    envtest.request("DELETE", path.partition("?")[0])
    assert generations == [1, 1]


def test_columns_show_progress(envtest: Envtest) -> None:  # noqa: F811
    document = make_document({"metadata.name": "columns"})
    created = create(envtest, document, dry_run=False)
    assert created.code == 201, created.message
    status = {"phase": "Running", "attempt": 2, "progress": {"step": 7, "rewardMean": 0.5, "tokensPerSecond": 1234.5}}
    path = f"{COLLECTION}/columns"
    envtest.request("PATCH", f"{path}/status", {"status": status}, content_type="application/merge-patch+json")
    table = send(envtest, "GET", path, Accept="application/json;as=Table;v=v1;g=meta.k8s.io").body
    envtest.request("DELETE", path)
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Phase", "Step", "Reward", "Tok/s", "Attempt", "Age"]
    assert table["rows"][0]["cells"][:6] == ["columns", "Running", 7, 0.5, 1234.5, 2]
