"""Strict parsing: every mistake is named with its path and a value that works."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.findings import Severity
from rljob_api.load import parse_job
from rljob_api.testing import REMOVE, make_document

UNKNOWN, MISSING, TYPE, VALUE = "UnknownField", "MissingField", "InvalidType", "InvalidValue"
RULES_PATH = "spec.failurePolicy.rules[0].onReason"


@pytest.mark.parametrize(
    ("changes", "want_path", "want_reason", "want_texts"),
    [
        # Unknown keys
        ({"rollout.tensorParalelSize": 2}, "spec.rollout.tensorParalelSize", UNKNOWN, ["tensorParallelSize?"]),
        (
            {"rollout.tensor_parallel_size": 2},
            "spec.rollout.tensor_parallel_size",
            UNKNOWN,
            ["tensorParallelSize"],
        ),
        ({"rollout.nodes": 2}, "spec.rollout.nodes", UNKNOWN, ["nodes belongs to spec.cluster.nodes"]),
        ({"cluster.nodeSelector": {}}, "spec.cluster.nodeSelector", UNKNOWN, ["known here: nodes, gpusPerNode"]),
        ({"spec.algoritm": {}}, "spec.algoritm", UNKNOWN, ["did you mean algorithm?"]),
        ({"reward.functions": [{"type": "GSM8K", "wait": 1}]}, "spec.reward.functions[0].wait", UNKNOWN, []),
        # Missing keys
        ({"model.source": REMOVE}, "spec.model.source", MISSING, ["required", "Qwen/Qwen3-8B"]),
        ({"data": REMOVE}, "spec.data", MISSING, ["required"]),
        ({"metadata": REMOVE}, "metadata", MISSING, ["required"]),
        ({"model.source": None}, "spec.model.source", MISSING, ["required"]),
        # Types
        (
            {"rollout.samplesPerPrompt": True},
            "spec.rollout.samplesPerPrompt",
            TYPE,
            ["true is not an integer", "8"],
        ),
        ({"rollout.temperature": False}, "spec.rollout.temperature", TYPE, ["false is not a number"]),
        (
            {"rollout.samplesPerPrompt": "many"},
            "spec.rollout.samplesPerPrompt",
            TYPE,
            ['"many" is not an integer'],
        ),
        ({"rollout.samplesPerPrompt": 2.5}, "spec.rollout.samplesPerPrompt", TYPE, ["2.5 is not an integer"]),
        ({"suspend": "yes"}, "spec.suspend", TYPE, ["use true or false"]),
        ({"suspend": 1}, "spec.suspend", TYPE, ["use true or false"]),
        ({"suspend": "true"}, "spec.suspend", TYPE, ["use true or false"]),
        ({"cluster.env": [{"name": "A", "value": 0}]}, "spec.cluster.env[0].value", TYPE, ['quote it: "0"']),
        ({"cluster.env": [{"name": "A", "value": True}]}, "spec.cluster.env[0].value", TYPE, ['"true"']),
        ({"cluster.image": 3.11}, "spec.cluster.image", TYPE, ['quote it: "3.11"']),
        ({"data.train": "/data/a.jsonl"}, "spec.data.train", TYPE, ["is not a list", "["]),
        ({"rollout": [1]}, "spec.rollout", TYPE, ["[1] is not a mapping"]),
        ({"cluster.workerResources": {"cpu": True}}, "spec.cluster.workerResources.cpu", TYPE, ["true"]),
        # Values
        ({"algorithm.type": "grpo"}, "spec.algorithm.type", VALUE, ["did you mean GRPO?", "DrGRPO"]),
        ({"algorithm.type": 3}, "spec.algorithm.type", VALUE, ["3 is not known", "GRPO"]),
        ({"rollout.topP": 1.5}, "spec.rollout.topP", VALUE, ["1.5", "more than 0 and at most 1", "1.0"]),
        ({"rollout.memoryFraction": 1}, "spec.rollout.memoryFraction", VALUE, ["less than 1", "0.6"]),
        ({"training.promptsPerStep": 0}, "spec.training.promptsPerStep", VALUE, ["1 or more"]),
        ({"training.miniBatchPrompts": -1}, "spec.training.miniBatchPrompts", VALUE, ["1 or more"]),
        ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds", VALUE, ["1 or more"]),
        ({"data.train": []}, "spec.data.train", VALUE, ["at least 1 entries", "/data/train.jsonl"]),
        ({"model.source": ""}, "spec.model.source", VALUE, ["at least 1 characters"]),
        ({"data.promptField": "x" * 129}, "spec.data.promptField", VALUE, ["at most 128 characters"]),
        ({"cluster.sharedMemory": "16Gb"}, "spec.cluster.sharedMemory", VALUE, ['"16Gb"', "16Gi"]),
        ({"cluster.sharedMemory": "-1"}, "spec.cluster.sharedMemory", VALUE, ["16Gi"]),
        ({"rollout.engineVersion": "latest"}, "spec.rollout.engineVersion", VALUE, ["0.5.16"]),
        (
            {"failurePolicy.rules": [{"onReason": "Oom", "action": "Retry"}]},
            "spec.failurePolicy.rules[0].onReason",
            VALUE,
            ["NumericalError"],
        ),
        # Envelope
        ({"apiVersion": "rljob.io/v1"}, "apiVersion", VALUE, ["rljob.io/v1alpha1"]),
        ({"kind": "RayJob"}, "kind", VALUE, ["use RLJob"]),
        ({"kind": REMOVE}, "kind", MISSING, ["RLJob"]),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], want_path: str, want_reason: str, want_texts: list[str]) -> None:
    job, findings = parse_job(make_document(changes))
    assert job is None
    assert [finding.path for finding in findings] == [want_path]
    (finding,) = findings
    assert finding.reason == want_reason
    assert finding.severity is Severity.ERROR
    for text in want_texts:
        assert text in finding.message


def test_all_mistakes_are_named_at_once() -> None:
    _, findings = parse_job(make_document({"rollout.topP": 7, "rollout.topK": 5, "training.totalSteps": "x"}))
    assert {finding.path for finding in findings} == {
        "spec.rollout.topP",
        "spec.rollout.topK",
        "spec.training.totalSteps",
    }


@pytest.mark.parametrize(
    ("path", "value", "want"),
    [
        ("training.learningRate", "1e-6", 1e-6),
        ("training.learningRate", 1, 1.0),
        ("training.promptsPerStep", "64", 64),
        ("training.promptsPerStep", "6.4e1", 64),
        ("training.promptsPerStep", 64.0, 64),
    ],
)
def test_numbers_written_as_text_are_numbers(path: str, value: object, want: float) -> None:
    job, findings = parse_job(make_document({path: value}))
    assert findings == []
    assert job is not None
    field = {"training.learningRate": job.spec.training.learning_rate}.get(path, job.spec.training.prompts_per_step)
    assert field == want
    assert type(field) is type(want)


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "", " ", "0x10", "1,5"])
def test_text_that_is_no_number_stays_wrong(value: str) -> None:
    job, findings = parse_job(make_document({"training.learningRate": value}))
    assert job is None
    assert findings[0].path == "spec.training.learningRate"


def test_an_out_of_range_number_in_text_gets_the_range() -> None:
    _, findings = parse_job(make_document({"training.learningRate": "7"}))
    assert [finding.reason for finding in findings] == ["InvalidValue"]
    assert "at most 1" in findings[0].message


def test_integers_are_quantities() -> None:
    job, _ = parse_job(make_document({"cluster.workerResources": {"cpu": 4, "memory": "16Gi"}}))
    assert job is not None
    assert job.spec.cluster.worker_resources.cpu == "4"


def test_null_is_an_absent_field_as_for_the_api_server() -> None:
    changes = {"checkpoint.everySteps": None, "evaluation": None, "tracking": None, "cluster": None, "model.lora": None}
    job, findings = parse_job(make_document(changes))
    assert findings == []
    assert job is not None
    assert job.spec.checkpoint.every_steps == 20
    assert job.spec.cluster.nodes == 1


def test_a_status_of_a_newer_version_still_loads() -> None:
    status = {"phase": "Running", "attempt": 2, "newField": {"a": 1}, "progress": {"step": 7, "flops": 1}}
    job, findings = parse_job(make_document({"status": status}))
    assert findings == []
    assert job is not None
    assert job.status is not None
    assert job.status.progress is not None
    assert (job.status.attempt, job.status.progress.step) == (2, 7)


def test_free_form_maps_are_kept_as_they_are() -> None:
    template = {"spec": {"nodeSelector": {"a": "1"}, "hostNetwork": None}}
    job, findings = parse_job(make_document({"cluster.podTemplate": template, "rollout.engineArgs": {"x": [1, "1"]}}))
    assert findings == []
    assert job is not None
    assert job.spec.cluster.pod_template == template
    assert job.spec.rollout.engine_args == {"x": [1, "1"]}


def test_a_job_too_large_for_its_children_is_refused() -> None:
    _, findings = parse_job(make_document({"cluster.podTemplate": {"spec": {"x": "y" * 1_100_000}}}))
    assert [finding.path for finding in findings] == ["spec"]
    assert "ConfigMap" in findings[0].message


def test_long_values_are_shortened_in_messages() -> None:
    _, findings = parse_job(make_document({"algorithm.type": "x" * 5000}))
    assert len(findings[0].message) < 500


def test_the_document_is_not_changed() -> None:
    document = make_document({"training.learningRate": "1e-6", "evaluation": None})
    before = repr(document)
    parse_job(document)
    assert repr(document) == before


@pytest.mark.parametrize(
    ("value", "want"),
    [(float("nan"), "finite"), (float("-inf"), "finite"), (b"x", "bytes"), ({1: 2}, "key 1"), ({"a": {3}}, "set")],
)
def test_what_is_not_json_is_named(value: Any, want: str) -> None:
    job, findings = parse_job(make_document({"rollout.engineArgs": {"x": [value]}}))
    assert job is None
    assert findings[0].path.startswith("spec.rollout.engineArgs.x[0]")
    assert want in findings[0].message
