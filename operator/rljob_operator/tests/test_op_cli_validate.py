"""`rljob validate`, `render` and `version`."""

import json
import subprocess
import sys

import pytest
import yaml
from cli_cases import REPOSITORY, make_cluster_job, run_cli, write_job
from click.testing import CliRunner

from rljob_api.contract import ResolvedJob
from rljob_operator.cli.main import main


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)


def test_valid_job(tmp_path):
    result = invoke("validate", write_job(tmp_path, make_cluster_job()))
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path}/job.yaml: tiny: valid\n"


@pytest.mark.parametrize(
    ("overrides", "want_path", "want_words"),
    [
        ({"rollout": {"tensorParalelSize": 2}}, "spec.rollout.tensorParalelSize", "tensorParallelSize"),
        ({"training": {"totalSteps": "many"}}, "spec.training.totalSteps", "many"),
        ({"cluster": {"nodes": 3}, "rollout": {"tensorParallelSize": 2}}, "spec.rollout.tensorParallelSize", "3"),
        ({"rollout": {"samplesPerPrompt": 1}}, "spec.rollout.samplesPerPrompt", "2"),
    ],
)
def test_errors_name_field_value_and_what_works(tmp_path, overrides, want_path, want_words):
    result = invoke("validate", "--output", "json", write_job(tmp_path, make_cluster_job(**overrides)))
    assert result.exit_code == 1
    [job] = json.loads(result.stdout)["jobs"]
    assert job["valid"] is False
    errors = [finding for finding in job["findings"] if finding["severity"] == "Error"]
    assert want_path in [finding["path"] for finding in errors]
    assert any(want_words in finding["message"] for finding in errors)


def test_text_output_shows_the_same_findings(tmp_path):
    result = invoke("validate", write_job(tmp_path, make_cluster_job(rollout={"samplesPerPrompt": 1})))
    assert result.exit_code == 1
    first, *lines = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path}/job.yaml: tiny: invalid (1 error")
    assert any(line.startswith("  error    spec.rollout.samplesPerPrompt: ") for line in lines)


def test_square_brackets_are_not_markup(tmp_path):
    document = make_cluster_job(data={"train": ["[red]x[/red]"]}, rollout={"[bold]": 1})
    result = invoke("validate", write_job(tmp_path, document))
    assert "spec.rollout.[bold]" in result.stdout


def test_unbuilt_features_are_warnings_here(tmp_path):
    document = make_cluster_job(rollout={"engine": "SGLang"}, cluster={"gpusPerNode": 2, "ranksPerNode": 2})
    result = invoke("validate", "--output", "json", write_job(tmp_path, document))
    [job] = json.loads(result.stdout)["jobs"]
    reasons = {finding["reason"]: finding["severity"] for finding in job["findings"]}
    if "NotSupportedYet" in reasons:
        assert reasons["NotSupportedYet"] == "Warning"
    assert result.exit_code == 0


def test_long_name_is_an_error_before_any_object_exists(tmp_path):
    document = make_cluster_job()
    document["metadata"]["name"] = "x" * 41
    result = invoke("validate", write_job(tmp_path, document))
    assert result.exit_code == 1
    assert "metadata.name" in result.stdout
    assert "40" in result.stdout


def test_several_files_and_documents(tmp_path):
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}}
    bad = make_cluster_job(rollout={"samplesPerPrompt": 1})
    both = write_job(tmp_path, [make_cluster_job(), config_map, bad], "both.yaml")
    good = write_job(tmp_path, make_cluster_job(), "good.yaml")
    result = invoke("validate", "--output", "json", both, good)
    assert result.exit_code == 1
    jobs = json.loads(result.stdout)["jobs"]
    assert [(job["source"], job["valid"]) for job in jobs] == [(str(both), True), (str(both), False), (str(good), True)]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "is empty, no document of kind RLJob"),
        ("kind: ConfigMap\n", "has ConfigMap, no document of kind RLJob"),
        ("a: [1\n", "not YAML"),
        ("kind: RLJob\nkind: RLJob\n", "there twice"),
        ("- 1\n", "not a mapping"),
        ("kind: RLJob\n", "apiVersion"),
    ],
)
def test_files_that_hold_no_usable_job(tmp_path, text, want):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    result = invoke("validate", path)
    assert result.exit_code == 1
    assert want in result.stdout


def test_standard_input(tmp_path):
    result = invoke("validate", "-", stdin=yaml.safe_dump(make_cluster_job()))
    assert (result.exit_code, result.stdout) == (0, "-: tiny: valid\n")


@pytest.mark.parametrize(
    "arguments", [["validate"], ["validate", "missing.yaml"], ["validate", "--output", "xml", "-"]]
)
def test_wrong_usage_is_exit_code_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(*arguments, stdin="").exit_code == 2


def test_model_config_extends_the_checks(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_attention_heads": 6, "num_key_value_heads": 2}))
    document = make_cluster_job(
        rollout={"engine": "SGLang", "tensorParallelSize": 4}, cluster={"gpusPerNode": 4, "ranksPerNode": 4}
    )
    path = write_job(tmp_path, document)
    assert invoke("validate", path).exit_code == 0
    result = invoke("validate", "--model-config", config, path)
    assert result.exit_code == 1
    assert "spec.rollout.tensorParallelSize" in result.stdout
    # A model's directory will do.
    assert invoke("validate", "--model-config", tmp_path, path).exit_code == 1


def test_unreadable_model_config_is_wrong_usage(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = invoke("validate", "--model-config", tmp_path / "config.json", write_job(tmp_path, make_cluster_job()))
    assert result.exit_code == 2
    assert "--model-config" in result.stderr


def test_catalogue_decides_the_image(tmp_path):
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text("entries: [{engine: Native, image: 'registry.example/mine:1'}]\n")
    result = invoke("render", "--catalogue", catalogue, write_job(tmp_path, make_cluster_job()))
    assert result.exit_code == 0
    cluster = list(yaml.safe_load_all(result.stdout))[-1]
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry.example/mine:1"
    catalogue.write_text("entries: []\n")
    assert invoke("render", "--catalogue", catalogue, tmp_path / "job.yaml").exit_code == 2


@pytest.mark.parametrize("name", ["gsm8k-grpo", "gsm8k-ppo-verl-equivalent", "gsm8k-ppo-two-nodes"])
def test_examples_validate_and_render(name):
    path = REPOSITORY / "examples" / f"{name}.yaml"
    assert invoke("validate", path).exit_code == 0
    result = invoke("render", path)
    assert result.exit_code == 0
    assert [document["kind"] for document in yaml.safe_load_all(result.stdout)][-1] == "RayCluster"


def test_render_prints_what_the_operator_would_create(tmp_path):
    path = write_job(tmp_path, make_cluster_job())
    result = invoke("render", "--cluster-generation", "4", "--ip-family", "IPv6", path)
    assert result.exit_code == 0
    secret, config_map, policy, cluster = yaml.safe_load_all(result.stdout)
    assert [document["metadata"]["name"] for document in (secret, config_map, policy, cluster)] == [
        "tiny-4-auth",
        "tiny-4-config",
        "tiny-4",
        "tiny-4",
    ]
    resolved = ResolvedJob.model_validate_json(config_map["data"]["job.json"])
    assert resolved.spec.training.mini_batch_prompts == 4
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "::"
    # Anchors would be valid YAML, but not what anybody wants to read.
    assert "&id" not in result.stdout


def test_render_of_a_bad_job_prints_no_object(tmp_path):
    result = invoke("render", write_job(tmp_path, make_cluster_job(rollout={"samplesPerPrompt": 1})))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "spec.rollout.samplesPerPrompt" in result.stderr


def test_render_says_what_the_template_would_not_get(tmp_path):
    job = make_cluster_job(cluster={"podTemplate": {"spec": {"containers": [{"name": "worker", "tty": True}]}}})
    result = invoke("render", write_job(tmp_path, job))
    assert result.exit_code == 1
    assert "the Ray container is called 'ray'" in result.stderr


def test_version_in_both_forms():
    text = invoke("version").stdout
    data = json.loads(invoke("version", "--output", "json").stdout)
    assert data["supported"]["kuberay"] == ">=1.6.2"
    assert set(data["supported"]["engines"]) == {"SGLang", "VLLM", "Native"}
    for part in (data["rljob"], data["api"], data["supported"]["ray"], data["supported"]["engines"]["SGLang"]):
        assert part in text


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "--help"], ["run", "--help"], ["version"]])
def test_commands_load_no_client_and_no_trainer(arguments, tmp_path):
    """Quick start: neither kopf nor the Kubernetes client nor torch nor Ray is imported."""
    code = (
        "import sys\n"
        "from rljob_operator.cli.main import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "bad = {'kopf', 'kubernetes', 'aiohttp', 'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_help_needs_no_model_of_the_api(tmp_path):
    result = run_cli("--help", cwd=tmp_path)
    assert result.returncode == 0
    for command in ("validate", "render", "run", "version"):
        assert command in result.stdout
    assert run_cli("frobnicate", cwd=tmp_path).returncode == 2
