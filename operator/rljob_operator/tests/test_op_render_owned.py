"""What a pod template patch cannot take away: a null in it (a YAML key without a value) removes nothing of ours."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from render_cases import make_resolved

from rljob_operator.render.environment import build_owned_entries
from rljob_operator.render.pod_template import build_pod_template
from rljob_operator.render.types import RenderOptions

# The machine may be busy; how fast examples are drawn says nothing about the merge.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
RAY = "spec.cluster.podTemplate.spec.containers[ray]"
OWNED_MOUNTS = ("/etc/rljob", "/dev/shm", "/var/lib/rljob")
OWNED_VOLUMES = ("rljob-config", "shared-mem", "rljob-storage")


def render_pod(template, role="worker", **cluster):
    fields = {"gpusPerNode": 2, "podTemplate": template, **cluster}
    return build_pod_template(make_resolved(cluster=fields), role, 1, RenderOptions())


def get_ray(pod):
    return pod.template["spec"]["containers"][0]


def describe(pod):
    return [(str(finding.severity), finding.reason, finding.path) for finding in pod.findings]


def get_owned(pod):
    """What no patch may change: selector labels, the operator's environment, job.json and storage."""
    template, ray = pod.template, get_ray(pod)
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    return {
        "labels": {key: value for key, value in template["metadata"]["labels"].items() if key.startswith("rljob.io/")},
        "env": {entry["name"]: entry for entry in ray["env"] if entry["name"] in OWNED_NAMES},
        "mounts": sorted(m["mountPath"] for m in ray["volumeMounts"] if m["mountPath"] in OWNED_MOUNTS),
        "volumes": [volumes[name] for name in OWNED_VOLUMES],
    }


PLAIN = render_pod({})
OWNED_NAMES = {entry["name"] for entry in build_owned_entries("job-1-auth")} | {
    entry["name"] for entry in get_ray(PLAIN)["env"] if "MEMORY" in entry["name"]
}


def ray_patch(**fields):
    return {"spec": {"containers": [{"name": "ray", **fields}]}}


def test_the_owned_part_is_what_it_is_meant_to_be():
    owned = get_owned(PLAIN)
    assert len(owned["labels"]) == 4
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "POD_IP", "RLJOB_CONFIG"} < set(owned["env"])
    assert any(name.startswith("SGL") for name in owned["env"])
    assert owned["mounts"] == sorted(OWNED_MOUNTS)
    assert PLAIN.findings == []


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ({"metadata": {"labels": None}}, [("FieldDropped", "spec.cluster.podTemplate.metadata.labels")]),
        ({"metadata": {"annotations": None}}, [("FieldDropped", "spec.cluster.podTemplate.metadata.annotations")]),
        (ray_patch(env=None), [("EnvironmentIgnored", f"{RAY}.env")]),
        (ray_patch(env=[{"name": "NODE_NAME", "$patch": "delete"}]), [("EnvironmentIgnored", f"{RAY}.env")]),
        (
            ray_patch(env=[{"name": "NODE_NAME", "valueFrom": None}]),
            [("EnvironmentIgnored", f"{RAY}.env[NODE_NAME].name")],
        ),
        (ray_patch(volumeMounts=None), [("FieldDropped", f"{RAY}.volumeMounts")]),
        (
            ray_patch(volumeMounts=[{"mountPath": "/etc/rljob", "$patch": "delete"}]),
            [("FieldDropped", f"{RAY}.volumeMounts")],
        ),
        (ray_patch(volumeMounts=[{"mountPath": "/dev/shm", "name": None}]), [("FieldDropped", f"{RAY}.volumeMounts")]),
        ({"spec": {"volumes": None}}, [("FieldDropped", "spec.cluster.podTemplate.spec.volumes")]),
        (
            {"spec": {"volumes": [{"name": "rljob-storage", "$patch": "delete"}]}},
            [("FieldDropped", "spec.cluster.podTemplate.spec.volumes")],
        ),
        (
            {"spec": {"volumes": [{"name": "rljob-config", "configMap": None}]}},
            [("FieldDropped", "spec.cluster.podTemplate.spec.volumes")],
        ),
    ],
)
def test_a_null_removes_nothing_of_the_operators_and_is_said(template, want):
    """A YAML key without a value (`labels:`) is a null: the operator would then not even see the pods."""
    pod = render_pod(template)
    assert get_owned(pod) == get_owned(PLAIN)
    assert pod.template["metadata"]["annotations"] == PLAIN.template["metadata"]["annotations"]
    assert [(reason, path) for _, reason, path in describe(pod)] == want
    assert {severity for severity, _, _ in describe(pod)} == {"Warning"}


def test_owned_entries_that_were_removed_come_first():
    """`$(POD_IP)` in a later entry resolves only after POD_IP is defined."""
    pod = render_pod(ray_patch(env=None), workerPodTemplate=ray_patch(env=[{"name": "MINE", "value": "$(POD_IP)"}]))
    names = [entry["name"] for entry in get_ray(pod)["env"]]
    assert names.index("POD_IP") < names.index("MINE")
    assert "PYTHONUNBUFFERED" not in names, "a default is the user's to remove"


def test_null_labels_of_a_role_remove_what_the_common_template_added_and_nothing_else():
    common = {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}}
    nulls = {"metadata": {"labels": None, "annotations": None}}
    pod = render_pod(common, workerPodTemplate=nulls)
    assert pod.template["metadata"] == PLAIN.template["metadata"]
    assert [path for _, _, path in describe(pod)] == [
        "spec.cluster.workerPodTemplate.metadata.labels",
        "spec.cluster.workerPodTemplate.metadata.annotations",
    ]


def test_an_annotation_of_ours_can_be_removed_by_its_name():
    pod = render_pod({"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": None}}})
    assert "karpenter.sh/do-not-disrupt" not in pod.template["metadata"]["annotations"]
    assert pod.findings == []


def test_volumes_of_the_job_that_are_still_mounted_are_put_back_with_ours():
    data = {"name": "data", "mountPath": "/data", "claimName": "corpus"}
    pod = render_pod({"spec": {"volumes": None}}, volumes=[data])
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}} in pod.template["spec"]["volumes"]
    assert "data" in pod.findings[0].message


@pytest.mark.parametrize("containers", [None, []])
@pytest.mark.parametrize("role_patch", [{}, {"spec": {"nodeSelector": {"a": "b"}}}])
def test_templates_without_containers_are_refused(containers, role_patch):
    pod = render_pod({"spec": {"containers": containers}}, workerPodTemplate=role_patch)
    errors = [path for severity, _, path in describe(pod) if severity == "Error"]
    want = "workerPodTemplate" if role_patch else "podTemplate"
    assert errors == ([f"spec.cluster.{want}.spec.containers"] if containers is None else [])


def nullable(strategy):
    return st.none() | strategy


some_text = st.sampled_from(["a", "b"])
label_names = st.sampled_from(["team", "rljob.io/job", "rljob.io/job-uid", "rljob.io/role", "ray.io/cluster"])
env_names = st.sampled_from(["MINE", *sorted(OWNED_NAMES)])
env_items = st.fixed_dictionaries(
    {"name": env_names},
    optional={
        "value": nullable(some_text),
        "valueFrom": nullable(st.just({"fieldRef": {"fieldPath": "metadata.uid"}})),
        "$patch": st.just("delete"),
    },
)
mount_items = st.fixed_dictionaries(
    {"mountPath": st.sampled_from([*OWNED_MOUNTS, "/mine"])},
    optional={"name": nullable(st.sampled_from(["mine", "shared-mem"])), "$patch": st.just("delete")},
)
volume_items = st.fixed_dictionaries(
    {"name": st.sampled_from([*OWNED_VOLUMES, "mine"])},
    optional={"configMap": st.none(), "emptyDir": st.none(), "$patch": st.just("delete")},
)
patches = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                "labels": nullable(st.dictionaries(label_names, nullable(some_text), max_size=3)),
                "annotations": nullable(st.dictionaries(some_text, nullable(some_text), max_size=2)),
                "name": nullable(some_text),
            },
        ),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": nullable(
                    st.lists(
                        st.fixed_dictionaries(
                            {"name": st.sampled_from(["ray", "side"])},
                            optional={
                                "image": some_text,
                                "env": nullable(st.lists(env_items, max_size=3)),
                                "volumeMounts": nullable(st.lists(mount_items, max_size=3)),
                                "$patch": st.just("delete"),
                            },
                        ),
                        max_size=2,
                    )
                ),
                "volumes": nullable(st.lists(volume_items, max_size=3)),
            },
        ),
    },
)


@patient
@given(patches, patches)
def test_no_accepted_patch_changes_what_is_the_operators(common, for_workers):
    pod = render_pod(common, workerPodTemplate=for_workers)
    if any(severity == "Error" for severity, _, _ in describe(pod)):
        return
    owned, want = get_owned(pod), get_owned(PLAIN)
    assert owned["labels"] == want["labels"]
    assert owned["env"] == want["env"]
    assert owned["mounts"] == want["mounts"]
    names = [entry["name"] for entry in get_ray(pod)["env"]]
    assert len(names) == len(set(names))
    used = {mount["name"] for mount in get_ray(pod)["volumeMounts"] if mount["mountPath"] in OWNED_MOUNTS}
    assert used - {"mine"} <= {volume["name"] for volume in pod.template["spec"]["volumes"]}
