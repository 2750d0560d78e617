"""Every rule with a job it refuses (or warns about) and the same job made right by what its message says.

The cases are in rules/<module>.yaml, in the words of a manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.findings import Finding, Severity
from rljob_api.rules import RULES, RuleContext, Target, check_job
from rljob_api.testing import make_job

RULE_OF_NAME = {rule.__name__: rule for rule in RULES}
LLAMA_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}


@dataclass(frozen=True)
class Case:
    """A bad job, the finding wanted, and the change that makes it good."""

    rule: str
    bad: dict[str, Any]
    path: str
    says: list[str]
    fix: dict[str, Any]
    severity: str = "Error"
    modelConfig: dict[str, Any] | None = None
    numTrainRows: int | None = None
    target: str = "Kubernetes"

    def run(self, changes: dict[str, Any]) -> list[Finding]:
        """What the rule says about the changed job."""
        context = RuleContext(
            job=make_job(changes),
            model_config=self.modelConfig,
            num_train_rows=self.numTrainRows,
            target=Target(self.target),
        )
        return list(RULE_OF_NAME[self.rule](context))


CASES = [
    Case(**entry)
    for path in sorted((Path(__file__).parent / "rules").glob("*.yaml"))
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
]


def name_case(case: Case) -> str:
    return f"{case.rule}-{case.path}"


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_a_rule_names_field_value_and_what_works(case: Case) -> None:
    findings = case.run(case.bad)
    assert [finding.path for finding in findings] == [case.path], [finding.format() for finding in findings]
    (finding,) = findings
    assert finding.severity == case.severity
    for text in case.says:
        assert text in finding.message


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_what_the_message_says_works(case: Case) -> None:
    findings = case.run({**case.bad, **case.fix})
    assert findings == [], [finding.format() for finding in findings]


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == set(RULE_OF_NAME)
    assert len(RULE_OF_NAME) == len(RULES)


def test_a_plain_job_has_no_findings() -> None:
    assert check_job(make_job(), model_config=LLAMA_8B, num_train_rows=12_800) == []


@pytest.mark.parametrize(
    ("changes", "model_config"),
    [
        # The vendor's documented layout: each of the 8 KV heads on two ranks.
        ({"rollout.tensorParallelSize": 16, "cluster.nodes": 2}, LLAMA_8B),
        ({"rollout.tensorParallelSize": 8}, {"num_attention_heads": 32, "num_key_value_heads": 4}),
        # 56 sequences on 8 ranks.
        ({"training.promptsPerStep": 8, "rollout.samplesPerPrompt": 7}, None),
        ({"rollout.samplesPerPrompt": 1, "algorithm.type": "PPO"}, None),
        ({"rollout.maxResponseTokens": 40_000}, {"max_position_embeddings": 32768, "rope_scaling": {"factor": 4}}),
    ],
)
def test_valid_layouts_that_naive_validators_refuse(
    changes: dict[str, Any], model_config: dict[str, Any] | None
) -> None:
    findings = check_job(make_job(changes), model_config=model_config)
    assert [finding for finding in findings if finding.severity is Severity.ERROR] == []


def test_a_job_back_from_the_api_server_has_no_more_findings_than_the_file() -> None:
    """The server fills defaults; a rule that asks whether a field was written would warn about each of them."""
    job = make_job()
    filled = type(job).model_validate(job.model_dump(mode="json", exclude_none=True))
    assert filled.spec.algorithm.kl.model_fields_set > job.spec.algorithm.kl.model_fields_set
    assert check_job(filled) == []


def test_local_runs_need_no_volume() -> None:
    job = make_job({"checkpoint.storage": {"path": "/tmp/runs"}})
    assert check_job(job, target=Target.LOCAL) == []
    assert check_job(job, target=Target.KUBERNETES) != []


def test_errors_come_first() -> None:
    changes = {"rollout": {"topP": 0.5, "tensorParallelSize": 3, "samplesPerPrompt": 1}}
    severities = [finding.severity for finding in check_job(make_job(changes))]
    assert severities == sorted(severities, key=lambda severity: severity is not Severity.ERROR)
    assert set(severities) == {Severity.ERROR, Severity.WARNING}
