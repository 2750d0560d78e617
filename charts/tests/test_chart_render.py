"""What the chart renders, with the real helm."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_tools import CHART, REPOSITORY

from rljob_api.catalogue import DEFAULT_CATALOGUE, load_catalogue
from rljob_api.names import LABEL_JOB, RAY_DASHBOARD_PORT, TRAINER_PORT

Render = Callable[..., list[dict[str, Any]]]
GOLDEN = Path(__file__).parent / "golden" / "default.yaml"
VALUES_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
SELECTOR_KEYS = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    found = [item for item in of_kind(objects, kind) if name is None or item["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {[item['metadata']['name'] for item in found]}"
    return found[0]


def iterate_pod_specs(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for item in objects:
        if item["kind"] == "Pod":
            yield item["spec"]
        elif "template" in item.get("spec", {}):
            yield item["spec"]["template"]["spec"]


def values_arguments(path: Path | None) -> list[str]:
    return [] if path is None else ["--values", str(path)]


every_values_file = pytest.mark.parametrize(
    "values_file", [None, *VALUES_FILES], ids=lambda path: "default" if path is None else path.stem
)


def test_default_render_is_the_golden_one(render: Render) -> None:
    objects = render("--set", "dashboards.enabled=false,crds.enabled=false")
    text = yaml.safe_dump_all(objects, sort_keys=False)
    if os.environ.get("RLJOB_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "run `make golden` and look at the difference"


@every_values_file
def test_lint_strict(run_helm: Callable[..., subprocess.CompletedProcess[str]], values_file: Path | None) -> None:
    result = run_helm("lint", "--strict", str(CHART), *values_arguments(values_file))
    assert result.returncode == 0, result.stdout + result.stderr


@every_values_file
def test_objects_are_valid_kubernetes(render: Render, values_file: Path | None) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for item in render(*values_arguments(values_file)):
        if item["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # no schema of the Prometheus operator's kinds here; the tests below look at them
        kubernetes_validate.validate(item, "1.36", strict=True)


@every_values_file
def test_two_renders_are_equal(render: Render, values_file: Path | None) -> None:
    arguments = values_arguments(values_file)
    assert render(*arguments) == render(*arguments, cached=False)


def test_templates_do_not_look_at_the_cluster_clock_or_dice() -> None:
    forbidden = re.compile(r"\b(lookup|now|rand[A-Z]\w*|genCA|genSelfSignedCert|uuidv4|getHostByName)\b")
    for path in (CHART / "templates").rglob("*"):
        if path.is_file():
            assert not forbidden.search(path.read_text()), path


@every_values_file
def test_names_namespaces_and_labels(render: Render, values_file: Path | None) -> None:
    cluster_scoped = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    seen = set()
    for item in render(*values_arguments(values_file)):
        metadata = item["metadata"]
        key = (item["kind"], metadata.get("namespace"), metadata["name"])
        assert key not in seen
        seen.add(key)
        assert ("namespace" in metadata) == (item["kind"] not in cluster_scoped), key
        labels = metadata["labels"]
        assert labels["helm.sh/chart"] == "rljob-0.1.0"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert set(labels) >= SELECTOR_KEYS
        assert None not in labels.values()
        assert {} not in metadata.values(), f"{key} has an empty map: a permanent difference in GitOps tools"


@every_values_file
def test_every_pod_meets_the_restricted_level(render: Render, values_file: Path | None) -> None:
    for pod in iterate_pod_specs(render(*values_arguments(values_file))):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == 65532
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is True
        assert pod["enableServiceLinks"] is False
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names)), "server-side apply refuses a variable that is there twice"


def test_two_replicas_with_a_budget_by_default_and_none_for_a_single_replica(render: Render) -> None:
    objects = render()
    assert one(objects, "Deployment")["spec"]["replicas"] == 2
    assert one(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert not of_kind(render("--set", "replicas=1"), "PodDisruptionBudget")


@every_values_file
def test_selectors_select_the_operator_pods(render: Render, values_file: Path | None) -> None:
    objects = render(*values_arguments(values_file))
    template = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    selectors = [one(objects, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors += [item["spec"]["selector"]["matchLabels"] for item in of_kind(objects, "PodDisruptionBudget")]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in of_kind(objects, "NetworkPolicy")]
    selectors += [item["spec"]["selector"] for item in of_kind(objects, "Service")]
    selectors += [
        item["spec"]["selector"]["matchLabels"]
        for item in of_kind(objects, "PodMonitor")
        if not item["metadata"]["name"].endswith("-jobs")
    ]
    for selector in selectors:
        assert set(selector) == SELECTOR_KEYS, "a selector must not change with an upgrade"
        assert selector.items() <= template


def test_a_pod_label_cannot_break_the_selector(render: Render) -> None:
    objects = render("--set", r"podLabels.app\.kubernetes\.io/component=mine")
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "operator"


def test_all_namespaces_mean_cluster_roles_and_listed_ones_mean_roles(render: Render) -> None:
    objects = render()
    assert one(objects, "ClusterRole", "rljob")
    assert "--all-namespaces" in one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]

    objects = render("--values", str(CHART / "ci/namespaced-values.yaml"))
    assert {item["metadata"]["name"] for item in of_kind(objects, "ClusterRole")} == {
        "rljob-admin",
        "rljob-edit",
        "rljob-view",
    }
    assert not of_kind(objects, "ClusterRoleBinding")
    roles = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in of_kind(objects, "Role")}
    assert roles >= {("team-a", "rljob"), ("team-b", "rljob"), ("rljob-system", "rljob-lease")}
    arguments = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:2] == ["--namespace=team-a", "--namespace=team-b"]
    assert "--all-namespaces" not in arguments


@every_values_file
def test_rbac_grants_no_wildcard_and_no_secret_listing(render: Render, values_file: Path | None) -> None:
    for item in render(*values_arguments(values_file)):
        for rule in item.get("rules", []):
            assert not any("*" in rule[key] for key in ("apiGroups", "resources", "verbs")), item["metadata"]["name"]
            if "secrets" in rule["resources"]:
                assert not {"list", "watch", "deletecollection"} & set(rule["verbs"])


def grants(objects: list[dict[str, Any]], group: str, resource: str) -> set[str]:
    """Verbs of the operator's roles on a resource."""
    rules = [
        rule
        for item in objects
        if item["metadata"]["name"] in ("rljob", "rljob-lease")
        for rule in item.get("rules", [])
        if group in rule["apiGroups"] and resource in rule["resources"]
    ]
    return {verb for rule in rules for verb in rule["verbs"]}


def test_every_kind_the_operator_touches_is_granted(render: Render) -> None:
    kube = pytest.importorskip("rljob_operator.adapters.kube")
    for values in ((), ("--values", str(CHART / "ci/namespaced-values.yaml"))):
        objects = render(*values)
        for resource in (kube.RLJOBS, kube.RAY_CLUSTERS, kube.PODS):  # watched by kopf
            assert grants(objects, resource.group, resource.plural) >= {"list", "watch"}
        for resource in (kube.RAY_CLUSTERS, kube.SECRETS, kube.CONFIG_MAPS, kube.NETWORK_POLICIES):
            # A server-side apply that creates needs both.
            assert grants(objects, resource.group, resource.plural) >= {"create", "patch", "delete"}
        assert grants(objects, "", kube.EVENTS.plural) == {"get", "create", "patch"}
        assert grants(objects, kube.LEASES.group, kube.LEASES.plural) == {"get", "create", "update"}
        assert grants(objects, "rljob.io", "rljobs/status") == {"patch"}


def test_the_operator_cannot_write_a_spec(render: Render) -> None:
    assert grants(render(), "rljob.io", "rljobs") == {"get", "list", "watch", "delete"}


def parse_operator_settings(objects: list[dict[str, Any]], tmp_path: Path, pod_ips: str = "fd00::1") -> Any:
    """The operator's own reading of the rendered arguments and environment, in a pod with these addresses."""
    settings = pytest.importorskip("rljob_operator.settings")
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text(one(objects, "ConfigMap", "rljob-catalogue")["data"]["catalogue.yaml"])
    container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    arguments = [
        argument.replace("$(POD_NAMESPACE)", "rljob-system").replace("/etc/rljob/catalogue.yaml", str(catalogue))
        for argument in container["args"]
    ]
    fields = {
        "metadata.namespace": "rljob-system",
        "metadata.name": "rljob-0",
        "status.podIP": pod_ips.split(",")[0],
        "status.podIPs": pod_ips,
    }
    environment = {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }
    return settings.parse_settings(arguments, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", **environment})


@every_values_file
def test_the_operator_understands_its_arguments(render: Render, values_file: Path | None, tmp_path: Path) -> None:
    objects = render(*values_arguments(values_file))
    settings = parse_operator_settings(objects, tmp_path)
    template = one(objects, "Deployment")["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert ports == {"metrics": settings.metrics_port, "health": settings.health_port}
    assert settings.lease_namespace == "rljob-system"
    assert (settings.lease_times.lease_seconds, settings.lease_times.renew_deadline_seconds) == (15, 10)
    assert settings.ip_family.value == "IPv6", "from POD_IPS"
    assert settings.catalogue == DEFAULT_CATALOGUE
    options = settings.render_options
    assert options.operator_namespace == "rljob-system"
    assert options.operator_pod_labels.items() <= template["metadata"]["labels"].items()
    assert options.operator_pod_labels, "the job's NetworkPolicy admits the operator's pods by these"
    assert options.monitoring_namespace_labels == {"kubernetes.io/metadata.name": "monitoring"}


def test_job_network_policies_can_be_switched_off(render: Render, tmp_path: Path) -> None:
    objects = render("--set", "jobs.networkPolicy=false")
    assert parse_operator_settings(objects, tmp_path).render_options.network_policy is False


def test_the_operator_knows_both_families_of_dual_stack_pods(render: Render, tmp_path: Path) -> None:
    settings = parse_operator_settings(render(), tmp_path, pod_ips="10.0.0.1,fd00::1")
    assert settings.ip_family.value == "IPv4"
    assert [family.value for family in settings.render_options.pod_ip_families] == ["IPv4", "IPv6"]
    assert not settings.render_options.uses_pod_proxy
    proxied = parse_operator_settings(render("--set", "clusterAccess=Proxy"), tmp_path)
    assert proxied.render_options.uses_pod_proxy


@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_the_operator_takes_the_lease_times_at_the_bounds_of_the_schema(
    render: Render, tmp_path: Path, bound: str
) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["lease"]["properties"]
    arguments = [f"--set=lease.{name}={field[bound]}" for name, field in schema.items()]
    times = parse_operator_settings(render(*arguments), tmp_path).lease_times
    assert [times.lease_seconds, times.renew_deadline_seconds, times.retry_seconds] == [
        schema[name][bound] for name in ("durationSeconds", "renewDeadlineSeconds", "retrySeconds")
    ]


def test_proxy_access_alone_may_proxy(render: Render) -> None:
    def may_proxy(*arguments: str) -> bool:
        return bool(grants(render(*arguments), "", "pods/proxy"))

    assert not may_proxy()
    assert may_proxy("--set", "clusterAccess=Proxy")


@every_values_file
def test_bindings_name_roles_and_accounts_that_exist(render: Render, values_file: Path | None) -> None:
    objects = render(*values_arguments(values_file))
    roles = {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects}
    accounts = {item["metadata"]["name"] for item in of_kind(objects, "ServiceAccount")} | {"existing"}
    for binding in of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding"):
        reference = binding["roleRef"]
        namespace = binding["metadata"].get("namespace") if reference["kind"] == "Role" else None
        assert (reference["kind"], namespace, reference["name"]) in roles
        assert binding["subjects"][0]["name"] in accounts
        assert binding["subjects"][0]["namespace"] == "rljob-system"


def test_the_definition_is_kept_unless_told_otherwise(render: Render) -> None:
    crd = one(render(), "CustomResourceDefinition")
    assert crd["metadata"]["name"] == "rljobs.rljob.io"
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    source = yaml.safe_load((REPOSITORY / "crds/rljob.io_rljobs.yaml").read_text())
    assert crd["spec"] == source["spec"]
    gone = one(render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in gone["metadata"].get("annotations", {})
    assert not of_kind(render("--set", "crds.enabled=false"), "CustomResourceDefinition")


def test_default_catalogue_is_the_one_in_the_code(render: Render) -> None:
    objects = render()
    config_map = one(objects, "ConfigMap", "rljob-catalogue")
    assert load_catalogue(config_map["data"]["catalogue.yaml"]) == DEFAULT_CATALOGUE


def test_a_new_catalogue_rolls_the_pods(render: Render) -> None:
    def checksum(*arguments: str) -> str:
        template = one(render(*arguments), "Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/catalogue"])

    assert checksum() == checksum("--set", "replicas=1")
    assert checksum() != checksum(
        "--set-json",
        'imageCatalogue=[{"engine": "Native", "image": "registry.example/native:2", "rayVersion": "2.60.0"}]',
    )


def test_digest_wins_over_tag(render: Render) -> None:
    def image(*arguments: str) -> str:
        return str(one(render(*arguments), "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"])

    assert image() == "ghcr.io/rljob/operator:0.1.0"
    assert image("--set", "image.tag=1.2.3") == "ghcr.io/rljob/operator:1.2.3"
    digest = "sha256:" + "a" * 64
    assert image("--set", f"image.tag=1.2.3,image.digest={digest}") == f"ghcr.io/rljob/operator@{digest}"


def test_monitors_render_only_when_on(render: Render) -> None:
    assert not of_kind(render(), "PodMonitor")
    assert not of_kind(render(), "PrometheusRule")
    objects = render("--values", str(CHART / "ci/monitoring-values.yaml"))
    assert one(objects, "PodMonitor", "rljob")["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert one(objects, "PrometheusRule")["spec"]["groups"]


def test_job_monitor_selects_rendered_ray_pods_once_per_port(render: Render) -> None:
    objects = render("--values", str(CHART / "ci/monitoring-values.yaml"))
    monitor = one(objects, "PodMonitor", "rljob-jobs")["spec"]
    assert monitor["namespaceSelector"] == {"any": True}
    assert monitor["selector"]["matchLabels"] == {"ray.io/is-ray-node": "yes"}
    assert monitor["selector"]["matchExpressions"] == [{"key": LABEL_JOB, "operator": "Exists"}]
    ports = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
    assert ports == ["rljob", "metrics"], "one target for each port, and none twice"
    assert monitor["podMetricsEndpoints"][0]["honorLabels"] is True

    objects = render("--values", str(CHART / "ci/monitoring-values.yaml"), "--set", "watchNamespaces={a,b}")
    assert one(objects, "PodMonitor", "rljob-jobs")["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_network_policy_allows_what_the_operator_needs(render: Render) -> None:
    policy = one(render("--set", "networkPolicy.enabled=true"), "NetworkPolicy")["spec"]
    egress_ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert egress_ports >= {53, 443, 6443, RAY_DASHBOARD_PORT, TRAINER_PORT}
    metrics = next(rule for rule in policy["ingress"] if rule["ports"] == [{"port": "metrics"}])
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in metrics["from"]


def test_dashboard_config_map_is_what_the_sidecar_looks_for(render: Render) -> None:
    objects = render("--values", str(CHART / "ci/monitoring-values.yaml"))
    config_map = one(objects, "ConfigMap", "rljob-dashboard-rljob")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["namespace"] == "monitoring"
    assert config_map["metadata"]["annotations"] == {"grafana_folder": "RL"}
    text = config_map["data"]["rljob.json"]
    assert json.loads(text) == json.loads((CHART / "files/dashboards/rljob.json").read_text())
    # Client-side apply copies the object into an annotation of at most 262,144 bytes.
    assert len(text) < 200_000
    assert not [
        item
        for item in of_kind(render("--set", "dashboards.enabled=false"), "ConfigMap")
        if "dashboard" in item["metadata"]["name"]
    ]


def test_long_release_names_stay_within_limits(render: Render) -> None:
    for item in render("--values", str(CHART / "ci/monitoring-values.yaml"), name="r" * 53):
        assert len(item["metadata"]["name"]) <= 63
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63


def test_notes_warn_about_risky_values(run_helm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    def notes(*arguments: str) -> str:
        result = run_helm(
            "install", "rljob", str(CHART), "--namespace", "x", "--dry-run=client", "--hide-secret", *arguments
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.partition("NOTES:")[2]

    assert "WARNING" not in notes()
    assert "deletes the definition" in notes("--set", "crds.keep=false")
    assert "crds.enabled is false" in notes("--set", "crds.enabled=false")
    assert "nothing follows" in notes("--set", "replicas=0")
    assert "rbac.create is false" in notes("--set", "rbac.create=false")
    assert "jobs.networkPolicy is false" in notes("--set", "jobs.networkPolicy=false")
    assert "jobs.operatorCidrs is empty" in notes("--set", "clusterAccess=Proxy")
    assert "WARNING" not in notes("--set", "clusterAccess=Proxy,jobs.operatorCidrs={10.0.0.0/24}")


def test_chart_metadata(render: Render) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"]
    assert chart["kubeVersion"].endswith("-0"), "without -0 a vendor's pre-release version (v1.36.1-eks...) is refused"
    definitions = yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])
    crd = one(render(), "CustomResourceDefinition")
    assert [(item["name"], item["kind"], item["version"]) for item in definitions] == [
        (crd["metadata"]["name"], crd["spec"]["names"]["kind"], version["name"]) for version in crd["spec"]["versions"]
    ]
    images = [item["image"] for item in yaml.safe_load(chart["annotations"]["artifacthub.io/images"])]
    assert images == [one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]]
