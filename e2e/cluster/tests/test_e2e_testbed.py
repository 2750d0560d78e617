"""The test cluster itself: KubeRay makes a Ray cluster of our images, and a job finds the mounted environment.

Needs a cluster made by ``cluster.py up``; its family is ``RLJOB_E2E_IP_FAMILY`` (IPv4 by default).
"""

import json
import os
import time
import urllib.error
import urllib.request

import pytest

from testcluster import jobpods, lifecycle
from testcluster.addons import CHECKPOINT_CLAIM
from testcluster.config import JOB_NAMESPACE, OPERATOR_NAMESPACE, IPFamily, cluster_config, url_host
from testcluster.errors import ClusterError, wait_until
from testcluster.images import JOB_USER_ID, RAY_IMAGE
from testcluster.kubectl import apply, kubectl
from testcluster.processes import kill_and_wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAME = "testbed"
READY_DEADLINE_SECONDS = 300
JOB_DEADLINE_SECONDS = 300
JOB = """python -c "
import os, socket, ray, torch, rljob_api, rljob_trainer
ray.init()
node = ray.get(ray.remote(lambda: socket.gethostname()).options(num_cpus=1).remote())
open('/var/lib/rljob/testbed', 'w').write('written by uid %d' % os.getuid())
print('torch', torch.__version__, torch.__file__)
print('ran on', node)
print('lookup', socket.getaddrinfo('kubernetes.default.svc.cluster.local', 443)[0][4][0])
"
"""


@pytest.fixture(scope="module")
def config():
    config = cluster_config(os.environ.get("RLJOB_E2E_IP_FAMILY", "IPv4"))
    if os.geteuid() != 0 or not config.kubeconfig.exists():
        pytest.skip(f"no cluster {config.name}: make one with `cluster.py up --ip-family {config.family}` as root")
    return config


def _pod():
    container = {
        "name": "ray",
        "image": RAY_IMAGE,
        "imagePullPolicy": "Never",
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": value} for name, value in jobpods.environment_variables().items()),
        ],
        "volumeMounts": [*jobpods.environment_mounts(), {"name": "state", "mountPath": "/var/lib/rljob"}],
        "resources": {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
    }
    claim = {"name": "state", "persistentVolumeClaim": {"claimName": CHECKPOINT_CLAIM}}
    return {"spec": {"containers": [container], "volumes": [*jobpods.environment_volumes(), claim]}}


def _ray_cluster(family):
    common = {"node-ip-address": "$POD_IP", "num-cpus": "1", "object-store-memory": "100000000"}
    dashboard_host = "::" if family is IPFamily.IPV6 else "0.0.0.0"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": NAME, "namespace": JOB_NAMESPACE},
        "spec": {
            "rayVersion": "2.60.0",
            "headGroupSpec": {
                "rayStartParams": {**common, "num-cpus": "0", "dashboard-host": dashboard_host},
                "template": _pod(),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": 1,
                    "minReplicas": 1,
                    "maxReplicas": 1,
                    "rayStartParams": common,
                    "template": _pod(),
                }
            ],
        },
    }


@pytest.fixture(scope="module")
def head(config):
    """Address of a ready Ray cluster's head pod."""
    start = time.monotonic()
    apply(config, [_ray_cluster(config.family)])
    try:
        kubectl(
            config,
            *("-n", JOB_NAMESPACE, "wait", f"raycluster/{NAME}"),
            *("--for=condition=RayClusterProvisioned", f"--timeout={READY_DEADLINE_SECONDS}s"),
            timeout_seconds=READY_DEADLINE_SECONDS + 10,
        )
        document = json.loads(kubectl(config, "-n", JOB_NAMESPACE, "get", "raycluster", NAME, "-o", "json"))
        print(f"RayCluster ready after {time.monotonic() - start:.0f} s")
        yield document["status"]["head"]["podIP"]
    except ClusterError:
        print(kubectl(config, "-n", JOB_NAMESPACE, "describe", "pods", check=False))
        raise
    finally:
        kubectl(config, "-n", JOB_NAMESPACE, "delete", "raycluster", NAME, "--wait", timeout_seconds=120)


def _ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return json.load(answer)


def test_every_component_serves(config):
    lines = lifecycle.status(config)
    assert [line.problem for line in lines] == [""] * 9


def test_a_second_up_changes_nothing(config):
    before = {line.name: line.pid for line in lifecycle.status(config)}
    lifecycle.up(config)
    assert {line.name: line.pid for line in lifecycle.status(config)} == before


def test_up_repairs_what_died(config):
    before = {line.name: line.pid for line in lifecycle.status(config)}
    died = {"coredns", "kubelet"}
    kill_and_wait([before[name] for name in died])
    assert {line.name for line in lifecycle.status(config) if line.problem == "not running"} == died
    lifecycle.up(config)
    after = {line.name: line.pid for line in lifecycle.status(config)}
    assert {name for name in after if after[name] != before[name]} == died


def test_job_runs_on_the_worker_with_the_mounted_environment(config, head):
    jobs = f"http://{url_host(head)}:8265/api/jobs/"
    submission = _ask(jobs, {"entrypoint": JOB, "submission_id": f"testbed-{time.time_ns()}"})["submission_id"]

    def ended():
        try:
            status = _ask(jobs + submission)["status"]
        except urllib.error.URLError as error:
            return f"{jobs}: {error}"
        return None if status in {"SUCCEEDED", "FAILED", "STOPPED"} else status

    wait_until(f"job {submission}", ended, JOB_DEADLINE_SECONDS, poll_seconds=1)
    log = _ask(f"{jobs}{submission}/logs")["logs"]
    print(log)
    assert _ask(jobs + submission)["status"] == "SUCCEEDED", log
    assert "/opt/rljob-test/site-packages/torch/" in log
    assert f"ran on {NAME}-workers-worker-" in log
    assert f"lookup {config.addresses.kubernetes_service}" in log
    written = config.run_dir / "volumes" / JOB_NAMESPACE / CHECKPOINT_CLAIM / "testbed"
    assert written.read_text() == f"written by uid {JOB_USER_ID}"


def test_kubectl_reads_a_pods_log_and_runs_a_command_in_it(config, head):
    query = ("get", "pods", "-l", "ray.io/node-type=head", "-o", "jsonpath={.items[0].metadata.name}")
    pod = kubectl(config, "-n", JOB_NAMESPACE, *query)
    assert "Ray runtime started" in kubectl(config, "-n", JOB_NAMESPACE, "logs", pod)
    assert kubectl(config, "-n", JOB_NAMESPACE, "exec", pod, "--", "id", "-u").strip() == str(JOB_USER_ID)


def test_operator_namespace_refuses_a_pod_that_is_not_restricted(config):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "loose", "namespace": OPERATOR_NAMESPACE},
        "spec": {"containers": [{"name": "c", "image": RAY_IMAGE, "imagePullPolicy": "Never"}]},
    }
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        apply(config, [pod])


def test_audit_log_names_the_writers(config):
    events = [json.loads(line) for line in config.audit_log.read_text().splitlines()]
    writers = {event["user"]["username"] for event in events if event["verb"] in {"create", "patch", "update"}}
    assert {"rljob-e2e:admin", "rljob-e2e:kuberay-operator"} <= writers
    assert {event["level"] for event in events} == {"Metadata"}
