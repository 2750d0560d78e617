"""Valid and supported are two verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.findings import Severity
from rljob_api.schema_paths import find_field
from rljob_api.supported import FEATURES, find_unsupported, list_supported
from rljob_api.testing import make_job

NATIVE: dict[str, Any] = {"rollout.engine": "Native", "cluster": {"gpusPerNode": 0, "ranksPerNode": 2}}
USES: dict[tuple[str, str], dict[str, Any]] = {
    ("spec.algorithm.dynamicSampling", "enabled"): {"algorithm.dynamicSampling": {"enabled": True}},
    ("spec.algorithm.overlongPenalty", "set"): {"algorithm.overlongPenalty": {"bufferTokens": 100}},
    ("spec.algorithm.maskTruncated", "true"): {"algorithm.maskTruncated": True},
    ("spec.critic", "set"): {"critic": {}},
    ("spec.model.lora", "set"): {"model.lora": {"rank": 8}},
    ("spec.model.gradientCheckpointing", "Always"): {"model.gradientCheckpointing": "Always"},
    ("spec.rollout.placement", "Separate"): {"rollout.placement": "Separate"},
    ("spec.rollout.overSample", "more than 1"): {"rollout.overSample": 1.5},
    ("spec.training.sequenceParallelSize", "more than 1"): {"training.sequenceParallelSize": 2},
    ("spec.training.offload.parameters", "true"): {"training.offload.parameters": True},
    ("spec.training.offload.optimizer", "true"): {"training.offload.optimizer": True},
    ("spec.checkpoint.exportEverySteps", "more than 0"): {"checkpoint.exportEverySteps": 5},
    ("spec.tracking.tensorboard", "true"): {"tracking.tensorboard": True},
    ("spec.tracking.wandb", "set"): {"tracking.wandb": {"project": "x"}},
    ("spec.tracking.mlflow", "set"): {"tracking.mlflow": {"trackingUri": "http://x"}},
    ("spec.cluster.queueName", "set"): {"cluster.queueName": "rl"},
    ("spec.trainer", "set"): {"trainer": {"command": ["x"]}},
}


def make_use(path: str, value: str) -> dict[str, Any]:
    """Changes that ask for a feature; values of enums are their own."""
    if path == "spec.reward.functions[].type":
        return {"reward.functions": [{"type": value}]}
    return USES.get((path, value), {path.removeprefix("spec."): value})


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: f"{feature.path}-{feature.value}")
def test_every_row_of_the_table_is_recognised(feature: Any) -> None:
    spec = make_job({**NATIVE, **make_use(feature.path, feature.value)}).spec
    assert feature.is_used(spec)
    findings = [finding for finding in find_unsupported(spec) if finding.path == feature.path]
    assert len(findings) == (0 if feature.built else 1)
    for finding in findings:
        assert finding.reason == "NotSupportedYet"
        assert finding.severity is Severity.WARNING
        assert feature.alternative in finding.message


def test_rows_are_distinct_and_name_real_fields() -> None:
    assert len({(feature.path, feature.value) for feature in list_supported()}) == len(FEATURES)
    for feature in FEATURES:
        assert find_field(feature.path.replace("[]", "").split(".")) is not None, feature.path


def test_the_smallest_local_job_is_supported() -> None:
    assert find_unsupported(make_job(NATIVE).spec) == []


def test_presets_count_by_what_they_stand_for() -> None:
    """`type: PPO` asks for GAE without naming it."""
    (gae,) = [feature for feature in FEATURES if feature.value == "GAE"]
    assert gae.is_used(make_job({**NATIVE, "algorithm.type": "PPO"}).spec)
    assert not gae.is_used(make_job({**NATIVE, "algorithm": {"type": "PPO", "advantageEstimator": "GRPO"}}).spec)
