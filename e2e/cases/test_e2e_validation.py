"""Bad input is refused before a pod exists, with the field path in the message."""

from __future__ import annotations

import pytest
from conftest import pods, wait_for_condition
from jobs import make_job
from kubectl import KubectlError, condition

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("case", "patch", "words"),
    [
        ("unknown field", {"rollout": {"tensorParalelSize": 2}}, ["tensorParalelSize"]),
        ("wrong type", {"training": {"promptsPerStep": "many"}}, ["promptsPerStep"]),
        ("tensor parallel size that does not divide", {"rollout": {"tensorParallelSize": 3}}, ["tensorParallelSize"]),
        ("GRPO with one sample per prompt", {"rollout": {"samplesPerPrompt": 1}}, ["samplesPerPrompt"]),
    ],
)
@pytest.mark.smoke
def test_kubectl_apply_refuses(settings, kubectl, case, patch, words):
    with pytest.raises(KubectlError) as refusal:
        kubectl.apply(make_job(settings, "refused", total_steps=2, **patch))
    assert all(word in str(refusal.value) for word in words), case
    assert kubectl.get("rljob", "refused") is None


@pytest.mark.parametrize("name", ["n" * 41, "dotted.name", "7b-grpo"])
def test_names_that_kuberay_would_refuse_are_refused_here(settings, kubectl, name):
    with pytest.raises(KubectlError, match=r"metadata\.name|40|DNS|name"):
        kubectl.apply(make_job(settings, name, total_steps=2))


def test_a_feature_that_is_not_built_is_refused_before_a_pod_exists(settings, kubectl, submit):
    name = "not-supported"
    submit(make_job(settings, name, total_steps=2, cluster={"gangScheduler": "KAI"}))
    job = wait_for_condition(kubectl, name, "Failed", timeout_seconds=60)
    failed = condition(job, "Failed")
    assert "spec.cluster.gangScheduler" in failed["message"]
    assert "NotSupportedYet" in failed["message"]
    assert condition(job, "Validated")["status"] == "False"
    assert not pods(kubectl, name)
    assert not kubectl.list("rayclusters", f"rljob.io/job={name}")
