"""A user's pod template over ours: merge rules, conflicts, refusals."""

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from render_cases import make_resolved

from rljob_operator.render.merge import merge_mapping
from rljob_operator.render.pod_template import build_pod_template
from rljob_operator.render.types import RenderOptions


def render_pod(role="worker", template=None, **cluster):
    fields = {"gpusPerNode": 2, **cluster}
    if template is not None:
        fields["podTemplate"] = template
    return build_pod_template(make_resolved(cluster=fields), role, 1, RenderOptions())


def get_ray(pod):
    return pod.template["spec"]["containers"][0]


def describe(pod):
    return [(str(finding.severity), finding.reason, finding.path) for finding in pod.findings]


@pytest.mark.parametrize(
    ("name", "base", "patch", "want"),
    [
        ("scalars are replaced", {"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ("mappings merge", {"m": {"a": 1}}, {"m": {"b": 2}}, {"m": {"a": 1, "b": 2}}),
        ("null deletes", {"m": {"a": 1, "b": 2}}, {"m": {"a": None}}, {"m": {"b": 2}}),
        ("null of an absent key is nothing", {"a": 1}, {"b": None}, {"a": 1}),
        ("null inside a new mapping is kept out of lists only", {}, {"args": ["x"]}, {"args": ["x"]}),
        ("other lists are replaced", {"command": ["a", "b"]}, {"command": ["c"]}, {"command": ["c"]}),
        (
            "named items merge in place and new ones follow",
            {"containers": [{"name": "ray", "image": "a"}, {"name": "side", "image": "b"}]},
            {"containers": [{"name": "new", "image": "c"}, {"name": "ray", "tty": True}]},
            {
                "containers": [
                    {"name": "ray", "image": "a", "tty": True},
                    {"name": "side", "image": "b"},
                    {"name": "new", "image": "c"},
                ]
            },
        ),
        (
            "$patch: delete removes an item",
            {"volumes": [{"name": "a"}, {"name": "b"}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": [{"name": "b"}]},
        ),
        (
            "mounts merge by path",
            {"volumeMounts": [{"name": "a", "mountPath": "/x"}]},
            {"volumeMounts": [{"name": "b", "mountPath": "/x"}]},
            {"volumeMounts": [{"name": "b", "mountPath": "/x"}]},
        ),
        (
            "an env value replaces a reference",
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "value": "1"}]},
        ),
        (
            "an env reference replaces a value",
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
        ),
    ],
)
def test_merge(name, base, patch, want):
    before = copy.deepcopy((base, patch))
    merged, findings = merge_mapping(base, patch, "p")
    assert merged == want
    assert findings == []
    assert (base, patch) == before


@pytest.mark.parametrize(
    ("patch", "want_path"),
    [
        ({"containers": [{"image": "x"}]}, "p.containers[0].name"),
        ({"containers": [{"name": "a"}, {"name": "a"}]}, "p.containers[1].name"),
        ({"containers": ["ray"]}, "p.containers[0].name"),
        ({"containers": {"name": "ray"}}, "p.containers"),
        ({"securityContext": "privileged"}, "p.securityContext"),
        ({"$patch": "replace"}, "p.$patch"),
        ({"args": "x"}, "p.args"),
    ],
)
def test_merge_refuses_what_it_cannot_place(patch, want_path):
    base = {"containers": [{"name": "ray"}], "securityContext": {}, "args": ["a"]}
    _, findings = merge_mapping(base, patch, "p")
    assert [(str(finding.severity), finding.path) for finding in findings] == [("Error", want_path)]


keys = st.sampled_from(["a", "b", "c"])
flat = st.dictionaries(keys, st.integers(), max_size=3)
mappings = st.dictionaries(keys, st.integers() | flat | st.dictionaries(keys, flat, max_size=2), max_size=3)
# The machine may be busy; how fast examples are drawn says nothing about the merge.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(mappings)
def test_merging_twice_changes_nothing_more(patch):
    once, _ = merge_mapping({}, patch, "p")
    twice, _ = merge_mapping(once, patch, "p")
    assert twice == once


@patient
@given(mappings)
def test_empty_patch_is_the_identity(base):
    assert merge_mapping(base, {}, "p") == (base, [])


def test_user_command_lifecycle_init_containers_and_security_pass_byte_for_byte():
    lifecycle = {"preStop": {"exec": {"command": ["/bin/sh", "-c", "sleep 5"]}}}
    command = ["bash", "-lc", "source nccl-env.sh; exec ${KUBERAY_GEN_RAY_START_CMD}"]
    init = {
        "name": "tune",
        "image": "busybox",
        "command": ["sh", "-c", "sysctl -w x=1"],
        "securityContext": {"privileged": True},
    }
    template = {
        "spec": {
            "initContainers": [init],
            "containers": [
                {"name": "ray", "command": command, "lifecycle": lifecycle, "securityContext": {"privileged": True}}
            ],
        }
    }
    pod = render_pod(template=template)
    ray = get_ray(pod)
    assert ray["command"] == command
    assert ray["lifecycle"]["preStop"] == lifecycle["preStop"]
    assert ray["securityContext"]["privileged"] is True
    assert pod.template["spec"]["initContainers"] == [init]
    assert ("Warning", "TemplateConflict", "spec.cluster.podTemplate.spec.containers[ray].lifecycle") in describe(pod)


def test_fixed_name_is_dropped_with_a_warning():
    """With a fixed metadata.name only one worker could ever be created."""
    pod = render_pod(template={"metadata": {"name": "worker", "labels": {"team": "a"}, "annotations": {"x": "y"}}})
    assert "name" not in pod.template["metadata"]
    assert pod.template["metadata"]["labels"]["team"] == "a"
    assert pod.template["metadata"]["annotations"]["x"] == "y"
    assert describe(pod) == [("Warning", "FieldDropped", "spec.cluster.podTemplate.metadata.name")]


@pytest.mark.parametrize("label", ["rljob.io/job", "ray.io/cluster", "app.kubernetes.io/name", "rljob.io/role"])
def test_selector_labels_cannot_be_changed(label):
    plain = render_pod().template["metadata"]["labels"]
    pod = render_pod(template={"metadata": {"labels": {label: "mine"}}})
    assert pod.template["metadata"]["labels"].get(label) == plain.get(label)
    assert describe(pod) == [("Warning", "FieldDropped", f"spec.cluster.podTemplate.metadata.labels[{label}]")]


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ({"nodeSelector": {"a": "b"}}, ("UnknownField", "spec.cluster.podTemplate.nodeSelector")),
        ({"spec": []}, ("InvalidType", "spec.cluster.podTemplate.spec")),
        ({"spec": {"containers": "x"}}, ("InvalidType", "spec.cluster.podTemplate.spec.containers")),
        (
            {"spec": {"containers": [{"name": "ray-worker", "tty": True}]}},
            ("InvalidValue", "spec.cluster.podTemplate.spec.containers[0].name"),
        ),
        (
            {"spec": {"containers": [{"name": "ray", "$patch": "delete"}]}},
            ("InvalidValue", "spec.cluster.podTemplate.spec.containers"),
        ),
        (
            {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}},
            ("GPUsDisagree", "spec.cluster.podTemplate.spec.containers[ray].resources.limits[nvidia.com/gpu]"),
        ),
        (
            {"spec": {"containers": [{"name": "ray", "env": [{"name": "RAY_AUTH_MODE", "value": "disabled"}]}]}},
            ("Reserved", "spec.cluster.podTemplate.spec.containers[0].env[0].name"),
        ),
    ],
)
def test_refused_templates(template, want):
    assert [row[1:] for row in describe(render_pod(template=template)) if row[0] == "Error"] == [want]


def test_gpus_on_the_head_are_refused():
    pod = render_pod(
        role="head",
        headPodTemplate={"spec": {"containers": [{"name": "ray", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}},
    )
    assert describe(pod) == [
        (
            "Error",
            "GPUsDisagree",
            "spec.cluster.headPodTemplate.spec.containers[ray].resources.limits[nvidia.com/gpu]",
        )
    ]


def test_same_gpu_amount_written_as_a_number_is_fine():
    resources = {"limits": {"nvidia.com/gpu": 2}, "requests": {"nvidia.com/gpu": "2"}}
    pod = render_pod(workerPodTemplate={"spec": {"containers": [{"name": "ray", "resources": resources}]}})
    assert pod.findings == []


@pytest.mark.parametrize(
    ("spec", "want_path"),
    [
        ({"restartPolicy": "Always"}, "restartPolicy"),
        ({"enableServiceLinks": True}, "enableServiceLinks"),
        ({"terminationGracePeriodSeconds": 5}, "terminationGracePeriodSeconds"),
        ({"hostNetwork": True}, "hostNetwork"),
    ],
)
def test_risky_fields_are_passed_with_a_warning(spec, want_path):
    pod = render_pod(template={"spec": spec})
    [(field, value)] = spec.items()
    assert pod.template["spec"][field] == value
    assert describe(pod) == [("Warning", "TemplateConflict", f"spec.cluster.podTemplate.spec.{want_path}")]


@pytest.mark.parametrize(("extra", "want"), [({}, "ClusterFirstWithHostNet"), ({"dnsPolicy": "Default"}, "Default")])
def test_host_network_keeps_cluster_dns(extra, want):
    pod = render_pod(template={"spec": {"hostNetwork": True, **extra}})
    assert pod.template["spec"]["dnsPolicy"] == want


@pytest.mark.parametrize(
    ("labels", "want_warning"),
    [
        ({"ray.io/node-type": "worker"}, True),
        ({"ray.io/node-type": "worker", "rljob.io/job": "job"}, False),
        ({"ray.io/cluster": "job-1"}, False),
        ({"app": "mine"}, False),
    ],
)
@pytest.mark.parametrize("kind", ["required", "preferred"])
def test_anti_affinity_that_repels_other_jobs(labels, want_warning, kind):
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    rule = term if kind == "required" else {"weight": 1, "podAffinityTerm": term}
    affinity = {"podAntiAffinity": {f"{kind}DuringSchedulingIgnoredDuringExecution": [rule]}}
    pod = render_pod(template={"spec": {"affinity": affinity}})
    assert [row[1] for row in describe(pod)] == (["AntiAffinityNotScopedToJob"] if want_warning else [])


def test_role_template_wins_over_the_common_one():
    pod = render_pod(
        template={"spec": {"priorityClassName": "low", "nodeSelector": {"a": "1"}}},
        workerPodTemplate={"spec": {"priorityClassName": "high"}},
    )
    assert pod.template["spec"]["priorityClassName"] == "high"
    assert pod.template["spec"]["nodeSelector"] == {"a": "1"}
    head = render_pod(
        "head", {"spec": {"priorityClassName": "low"}}, workerPodTemplate={"spec": {"priorityClassName": "high"}}
    )
    assert head.template["spec"]["priorityClassName"] == "low"


def test_own_shared_memory_volume_is_kept():
    template = {
        "spec": {
            "containers": [{"name": "ray", "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}]}],
            "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "100Gi"}}],
        }
    }
    mounts = [
        mount for mount in get_ray(render_pod(template=template))["volumeMounts"] if mount["mountPath"] == "/dev/shm"
    ]
    assert mounts == [{"name": "dshm", "mountPath": "/dev/shm"}]


def test_security_can_be_relaxed_for_an_image_that_needs_root():
    pod = render_pod(template={"spec": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}})
    assert pod.template["spec"]["securityContext"]["runAsUser"] == 0
    assert pod.template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
