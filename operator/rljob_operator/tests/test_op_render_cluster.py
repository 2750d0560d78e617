"""The RayCluster: KubeRay's checklist, resources, pods, ownership."""

import base64
import json

import pytest
from render_cases import UID, make_resolved

from rljob_api.contract import ResolvedJob
from rljob_operator.render import (
    OwnerRef,
    RenderError,
    collect_findings,
    list_cluster_object_references,
    render_cluster_objects,
)
from rljob_operator.render.config_map import compute_spec_hash, format_job_config
from rljob_operator.render.lifecycle import compute_pre_stop_deadline_seconds

OWNER = OwnerRef("job", UID)


def render(generation=1, **overrides):
    return render_cluster_objects(
        make_resolved(**overrides), owner=OWNER, cluster_generation=generation, auth_token="secret"
    )


def get_pods(cluster):
    return {
        "head": cluster["spec"]["headGroupSpec"]["template"],
        "worker": cluster["spec"]["workerGroupSpecs"][0]["template"],
    }


def test_every_object_is_owned_labelled_and_named_by_generation():
    for document in render(generation=7):
        metadata = document["metadata"]
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "rljob.io/v1alpha1",
                "kind": "RLJob",
                "name": "job",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert metadata["namespace"] == "team-a"
        assert metadata["labels"]["rljob.io/job"] == "job"
        assert metadata["labels"]["rljob.io/cluster-generation"] == "7"


def test_references_cover_exactly_what_is_rendered():
    rendered = {(document["apiVersion"], document["kind"], document["metadata"]["name"]) for document in render(3)}
    references = list_cluster_object_references("job", "team-a", 3)
    assert {(reference.api_version, reference.kind, reference.name) for reference in references} == rendered
    assert references[0].kind == "RayCluster", "the cluster goes first: its pods still need the rest"


def test_token_is_in_the_secret_only():
    secret, *others = render()
    assert base64.b64decode(secret["data"]["auth_token"]) == b"secret"
    assert "secret" not in json.dumps([other for other in others if other["kind"] == "RayCluster"]).replace(
        "secretKeyRef", ""
    )


def test_cluster_has_a_fixed_size_and_no_suspend():
    cluster = render(cluster={"nodes": 3, "gpusPerNode": 2})[-1]
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"], group["numOfHosts"]) == (3, 3, 3, 1)
    assert cluster["spec"]["enableInTreeAutoscaling"] is False
    assert cluster["spec"]["rayVersion"] == "2.60.0"
    # Kueue flips it; applying it again would fight over the field.
    assert "suspend" not in cluster["spec"]
    assert cluster["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"


def test_head_takes_no_work():
    params = render()[-1]["spec"]["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")


@pytest.mark.parametrize(("cpu", "want"), [("500m", "1"), ("2500m", "2"), ("16", "16")])
def test_worker_cpus_are_explicit_whole_numbers(cpu, want):
    cluster = render(cluster={"gpusPerNode": 2, "workerResources": {"cpu": cpu, "memory": "64Gi"}})[-1]
    assert cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] == want


def test_start_parameters_are_strings():
    """KubeRay's type is map[string]string; `false` would drop the flag, an integer the whole object."""
    spec = render()[-1]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        # Both places set would make the cluster invalid for KubeRay.
        assert "resources" not in group


def test_requests_equal_limits_and_gpus_are_on_workers_only():
    pods = get_pods(render(cluster={"gpusPerNode": 2, "gpuResourceName": "amd.com/gpu"})[-1])
    for role, template in pods.items():
        resources = template["spec"]["containers"][0]["resources"]
        assert resources["limits"] == resources["requests"]
        assert resources["limits"].get("amd.com/gpu") == ("2" if role == "worker" else None)


@pytest.mark.parametrize("role", ["head", "worker"])
def test_pod_basics(role):
    template = get_pods(render(cluster={"gpusPerNode": 2, "terminationGracePeriodSeconds": 90})[-1])[role]
    spec = template["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "--deadline-seconds=80" in container["lifecycle"]["preStop"]["exec"]["command"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts) >= {"/etc/rljob", "/dev/shm", "/var/lib/rljob"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert template["metadata"]["labels"]["rljob.io/role"] == role
    # KubeRay selects its head Service's pod by these; an own value would leave the Service empty.
    assert "app.kubernetes.io/name" not in template["metadata"]["labels"]


def test_shared_memory_and_object_store():
    cluster = render(cluster={"gpusPerNode": 2, "sharedMemory": "16Gi", "headResources": {"memory": "4Gi"}})[-1]
    pods = get_pods(cluster)
    sizes = {
        role: next(volume["emptyDir"]["sizeLimit"] for volume in template["spec"]["volumes"] if "emptyDir" in volume)
        for role, template in pods.items()
    }
    assert sizes == {"head": "1Gi", "worker": "16Gi"}
    spec = cluster["spec"]
    assert spec["workerGroupSpecs"][0]["rayStartParams"]["object-store-memory"] == str(8 * 1024**3)
    assert spec["headGroupSpec"]["rayStartParams"]["object-store-memory"] == str(512 * 1024**2)


@pytest.mark.parametrize(
    ("cluster", "want_path"),
    [
        ({"sharedMemory": "64Mi"}, "spec.cluster.sharedMemory"),
        ({"headResources": {"memory": "256Mi"}}, "spec.cluster.headResources.memory"),
    ],
)
def test_shared_memory_below_rays_smallest_object_store_is_refused(cluster, want_path):
    with pytest.raises(RenderError, match=r"object store alone needs 80 MiB; a value that works"):
        render(cluster={"gpusPerNode": 2, **cluster})
    findings = collect_findings(make_resolved(cluster={"gpusPerNode": 2, **cluster}))
    assert [finding.path for finding in findings] == [want_path]


@pytest.mark.parametrize(("gpus", "want"), [(2, True), (0, False)])
def test_only_gpu_jobs_ask_not_to_be_disrupted(gpus, want):
    overrides = {"cluster": {"gpusPerNode": gpus, "ranksPerNode": 2}}
    if not gpus:
        overrides["rollout"] = {"engine": "Native", "engineVersion": None}
    for template in get_pods(render(**overrides)[-1]).values():
        annotations = template["metadata"]["annotations"]
        assert ("karpenter.sh/do-not-disrupt" in annotations) is want
        assert annotations["argocd.argoproj.io/ignore-restart-policy"] == "true"


def test_job_needs_storage():
    resolved = make_resolved()
    storage = resolved.spec.checkpoint.storage.model_copy(update={"claim_name": None})
    checkpoint = resolved.spec.checkpoint.model_copy(update={"storage": storage})
    resolved = resolved.model_copy(update={"spec": resolved.spec.model_copy(update={"checkpoint": checkpoint})})
    assert [finding.path for finding in collect_findings(resolved)] == ["spec.checkpoint.storage"]


def test_host_path_storage_must_exist_already():
    pods = get_pods(render(checkpoint={"storage": {"hostPath": "/mnt/checkpoints"}})[-1])
    [volume] = [volume for volume in pods["worker"]["spec"]["volumes"] if volume["name"] == "rljob-storage"]
    assert volume["hostPath"] == {"path": "/mnt/checkpoints", "type": "Directory"}
    assert "fsGroup" not in pods["worker"]["spec"]["securityContext"]


def test_every_kind_of_volume():
    volumes = [
        {"name": "a", "mountPath": "/a", "claimName": "claim", "readOnly": True, "subPath": "x/y"},
        {"name": "b", "mountPath": "/b", "hostPath": "/srv/b"},
        {"name": "c", "mountPath": "/c", "configMapName": "config"},
        {"name": "d", "mountPath": "/d", "secretName": "secret"},
        {"name": "e", "mountPath": "/e", "emptyDir": {"sizeLimit": "10Gi"}},
    ]
    spec = get_pods(render(cluster={"gpusPerNode": 2, "volumes": volumes})[-1])["head"]["spec"]
    assert [volume for volume in spec["volumes"] if len(volume["name"]) == 1] == [
        {"name": "a", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "b", "hostPath": {"path": "/srv/b"}},
        {"name": "c", "configMap": {"name": "config"}},
        {"name": "d", "secret": {"secretName": "secret"}},
        {"name": "e", "emptyDir": {"sizeLimit": "10Gi"}},
    ]
    mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["a"] == {"name": "a", "mountPath": "/a", "subPath": "x/y", "readOnly": True}


def test_volume_with_a_name_of_ours_is_refused():
    volume = {"name": "rljob-config", "mountPath": "/x", "claimName": "c"}
    with pytest.raises(RenderError, match=r"spec\.cluster\.volumes\[0\]\.name: 'rljob-config'"):
        render(cluster={"gpusPerNode": 2, "volumes": [volume]})


def test_queue_name_becomes_kueues_label():
    assert (
        render(cluster={"gpusPerNode": 2, "queueName": "team"})[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        == "team"
    )


def test_foreign_trainer_gets_no_hook_of_ours():
    template = get_pods(render(trainer={"command": ["python", "-m", "verl.trainer.main_ppo"]})[-1])["head"]
    assert "lifecycle" not in template["spec"]["containers"][0]


def test_oversized_job_is_refused_before_the_api_server_does():
    parts = {f"arg{index}": "x" * 47_000 for index in range(20)}
    with pytest.raises(RenderError, match="at most 900000 fit into its ConfigMap"):
        render(rollout={"engine": "SGLang", "engineVersion": "0.5.16", "engineArgs": parts})


def test_spec_hash_follows_the_spec_and_nothing_else():
    resolved = make_resolved()
    retried = resolved.model_copy(update={"attempt": 5, "resume_floor_step": 40})
    assert compute_spec_hash(retried) == compute_spec_hash(resolved)
    assert compute_spec_hash(make_resolved(training={"totalSteps": 11})) != compute_spec_hash(resolved)


def test_null_engine_argument_survives_job_json():
    resolved = make_resolved()
    resolved.spec.rollout.engine_args["quantization"] = None
    assert ResolvedJob.model_validate_json(format_job_config(resolved)).spec.rollout.engine_args == {
        "quantization": None
    }


@pytest.mark.parametrize(("grace", "want"), [(300, 290), (30, 20), (15, 7), (1, 1)])
def test_hook_ends_before_the_grace_period(grace, want):
    deadline = compute_pre_stop_deadline_seconds(grace)
    assert deadline == want
    assert deadline <= grace
