"""Jobs for the render tests, and the schemas they are checked against."""

import copy
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.protocols
import yaml

from rljob_api.catalogue import DEFAULT_CATALOGUE
from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.load import load_documents, parse_job
from rljob_api.resolve import resolve_job
from rljob_api.targets import Target
from rljob_api.v1alpha1 import IPFamily, RLJob
from rljob_operator.render import OwnerRef, RenderOptions, render_cluster_objects

GOLDEN = Path(__file__).parent / "golden"
UID = "5f0c0c9e-6a43-4a3c-9f0b-0d6f7f3a1b2c"
OPTIONS = RenderOptions(
    operator_namespace="rljob-system",
    operator_pod_labels={"app.kubernetes.io/name": "rljob"},
    monitoring_namespace_labels={"kubernetes.io/metadata.name": "monitoring"},
)
CASE_OPTIONS = {
    "ipv6-secondary-vllm": replace(OPTIONS, pod_ip_families=(IPFamily.IPV4, IPFamily.IPV6)),
}
"""Cases of other installations."""
KUBERAY_CRD = "ray.io_rayclusters.yaml"
KUBERAY_MODULE = "pkg/mod/github.com/ray-project/kuberay/ray-operator@v1.6.2/config/crd/bases"


def load_case(name: str) -> tuple[RLJob | None, list[Finding]]:
    [document] = load_documents((GOLDEN / f"{name}.job.yaml").read_text())
    return parse_job(document)


def resolve_case(name: str) -> ResolvedJob:
    job, _ = load_case(name)
    assert job is not None
    return resolve(job)


def resolve(job: RLJob) -> ResolvedJob:
    family = job.spec.network.ip_family
    return resolve_job(
        job,
        uid=UID,
        catalogue=DEFAULT_CATALOGUE,
        target=Target.KUBERNETES,
        ip_family=IPFamily.IPV4 if family is IPFamily.AUTO else family,
    )


def render_case(name: str) -> list[dict[str, Any]]:
    resolved = resolve_case(name)
    return render_cluster_objects(
        resolved,
        owner=OwnerRef(resolved.name, resolved.uid),
        cluster_generation=3,
        auth_token="token",
        options=get_options(name),
    )


def get_options(name: str) -> RenderOptions:
    return CASE_OPTIONS.get(name, OPTIONS)


def make_resolved(**overrides: dict[str, Any]) -> ResolvedJob:
    """A small valid job with fields of its sections replaced, for example `cluster={"nodes": 2}`."""
    document: dict[str, Any] = {
        "apiVersion": "rljob.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "namespace": "team-a"},
        "spec": {
            "model": {"source": "/models/m"},
            "data": {"train": ["/data/train.jsonl"]},
            "reward": {"functions": [{"type": "GSM8K"}]},
            "rollout": {"engine": "SGLang", "engineVersion": "0.5.16"},
            "training": {"totalSteps": 10},
            "checkpoint": {"storage": {"claimName": "checkpoints"}},
            "cluster": {"nodes": 1, "gpusPerNode": 2},
        },
    }
    for section, fields in overrides.items():
        document["spec"][section] = {**document["spec"].get(section, {}), **fields}
    job, findings = parse_job(document)
    assert job is not None, [finding.format() for finding in findings]
    return resolve(job)


def find_kuberay_crd() -> Path | None:
    """The RayCluster CRD of the supported KubeRay, from the test binaries or the Go module cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rljob/bin/envtest/crds"
    gopath = Path(os.environ.get("GOPATH", Path.home() / "go"))
    for folder in (cache, gopath / KUBERAY_MODULE):
        if (folder / KUBERAY_CRD).is_file():
            return folder / KUBERAY_CRD
    return None


@functools.cache
def make_strict_validator(crd_path: Path) -> jsonschema.protocols.Validator:
    """Validator of RayCluster v1 that refuses unknown fields, as server-side apply does."""
    crd = yaml.load(crd_path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # 1.4 MB
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    # Pods in CRDs keep `metadata` open.
    for key in ("metadata",):
        schema["properties"][key] = {"type": "object"}
    _close(schema)
    return jsonschema.Draft202012Validator(schema)


def _close(schema: dict[str, Any]) -> None:
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    properties = schema.get("properties")
    if properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for nested in (properties or {}).values():
        _close(nested)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            _close(schema[key])
