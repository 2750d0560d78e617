"""The engine's environment by version (the table of versions was measured on the released packages)."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from render_cases import make_resolved

from rljob_api.engine_switches import MEMORY_CHECK_SPELLINGS, parse_engine_version
from rljob_api.v1alpha1 import Engine, Placement
from rljob_operator.render.engine_env import build_engine_environment
from rljob_operator.render.pod_template import build_pod_template
from rljob_operator.render.types import RenderOptions

OLD = "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"
NEW = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"


@pytest.mark.parametrize(
    ("version", "want_owned"),
    [
        ("0.4.6", {OLD: "True"}),
        ("0.5.5", {OLD: "True"}),
        ("0.5.6", {OLD: "True"}),
        ("0.5.6.post2", {OLD: "True"}),
        ("0.5.7rc1", {NEW: "0"}),
        ("0.5.7", {NEW: "0"}),
        ("0.5.16", {NEW: "0"}),
        ("0.5.23", {NEW: "0"}),
        ("0.6", {NEW: "0"}),
        ("0.6.0", {NEW: "0"}),
        ("1.0.0", {NEW: "0"}),
    ],
)
def test_sglang_memory_check_switch(version, want_owned):
    environment = build_engine_environment(Engine.SGLANG, version, Placement.COLOCATED)
    assert environment.owned == want_owned
    # Exactly one spelling reaches the pod, whatever the user set.
    assert set(environment.stripped) | set(want_owned) == set(MEMORY_CHECK_SPELLINGS)
    assert not set(environment.stripped) & set(want_owned)


def test_sglang_without_a_version_is_refused():
    with pytest.raises(ValueError, match=r"spec\.rollout\.engineVersion is empty.*0\.5\.16"):
        build_engine_environment(Engine.SGLANG, None, Placement.COLOCATED)


@pytest.mark.parametrize(
    ("version", "want"),
    [
        ("0.5.16", (0, 5, 16)),
        ("0.24.0", (0, 24, 0)),
        ("0.6", (0, 6, 0)),
        ("0.5.7.post1", (0, 5, 7)),
        ("1.2rc3", (1, 2, 0)),
    ],
)
def test_parse_engine_version(version, want):
    assert parse_engine_version(version) == want


@pytest.mark.parametrize("version", ["", "main", "v0.5.7", "5"])
def test_unreadable_versions_are_errors(version):
    with pytest.raises(ValueError, match=r"does not start with major\.minor"):
        parse_engine_version(version)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 999)))
def test_version_order_is_numeric(release):
    assert parse_engine_version(".".join(map(str, release))) == release


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.NATIVE])
def test_other_engines_get_no_sglang_variables(engine):
    environment = build_engine_environment(engine, None, Placement.COLOCATED)
    assert not [name for name in environment.owned | environment.defaults if name.startswith("SGL")]


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize(
    ("version", "want"), [("0.5.5", {OLD: "True"}), ("0.5.16", {NEW: "0"}), ("0.5.23", {NEW: "0"})]
)
@pytest.mark.parametrize("where", ["env", "podTemplate"])
def test_one_spelling_in_the_pod_whatever_the_user_sets(role, version, want, where):
    env = [{"name": name, "value": "user"} for name in MEMORY_CHECK_SPELLINGS]
    cluster = (
        {"env": env} if where == "env" else {"podTemplate": {"spec": {"containers": [{"name": "ray", "env": env}]}}}
    )
    resolved = make_resolved(
        rollout={"engine": "SGLang", "engineVersion": version}, cluster={"gpusPerNode": 2, "image": "image", **cluster}
    )
    pod = build_pod_template(resolved, role, 1, RenderOptions())
    got = {entry["name"]: entry["value"] for entry in pod.template["spec"]["containers"][0]["env"] if "value" in entry}
    assert {name: got[name] for name in MEMORY_CHECK_SPELLINGS if name in got} == want
    # Each of the user's four settings is named in a warning, with where it was set.
    warned = [finding for finding in pod.findings if finding.reason == "EnvironmentIgnored"]
    assert len(warned) == len(MEMORY_CHECK_SPELLINGS)
    prefix = "spec.cluster.env[" if where == "env" else "spec.cluster.podTemplate.spec.containers[ray].env["
    assert all(finding.path.startswith(prefix) for finding in warned)


def test_no_warning_when_the_user_sets_nothing():
    assert build_pod_template(make_resolved(), "worker", 1, RenderOptions()).findings == []
