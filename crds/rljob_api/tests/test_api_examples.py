"""The examples say what the scripts they come from say, and pass the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.findings import Severity
from rljob_api.load import load_documents, parse_job
from rljob_api.resolve import compute_layout
from rljob_api.rules import Target, check_job
from rljob_api.supported import find_unsupported
from rljob_api.testing import list_schema_violations
from rljob_api.v1alpha1 import RLJob

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.yaml"))
NUM_GSM8K_TRAIN_ROWS = 7473
QWEN2_7B = {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768}
QWEN3_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960}
LLAMA31_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def load(name: str) -> RLJob:
    path = next(path for path in EXAMPLES if path.name == name)
    (document,) = load_documents(path.read_text(encoding="utf-8"))
    job, findings = parse_job(document)
    assert job is not None, [finding.format() for finding in findings]
    return job


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    documents = load_documents(path.read_text(encoding="utf-8"))
    assert documents
    for document in documents:
        assert list_schema_violations(document) == []
        job, findings = parse_job(document)
        assert job is not None, [finding.format() for finding in findings]
        storage = job.spec.checkpoint.storage
        target = Target.KUBERNETES if storage.claim_name or storage.host_path else Target.LOCAL
        assert [f.format() for f in check_job(job, target=target) if f.severity is Severity.ERROR] == []


def test_the_single_node_ppo_script() -> None:
    job = load("gsm8k-ppo-verl-equivalent.yaml")
    spec = job.spec
    assert (spec.model.source, spec.algorithm.type, spec.rollout.engine) == ("Qwen/Qwen2-7B-Instruct", "PPO", "SGLang")
    assert (spec.cluster.nodes, spec.cluster.gpus_per_node, spec.rollout.tensor_parallel_size) == (1, 4, 2)
    assert (spec.training.prompts_per_step, spec.training.mini_batch_prompts) == (4096, 64)
    assert (spec.training.micro_batch_sequences, spec.training.total_epochs) == (4, 15)
    assert (spec.data.max_prompt_tokens, spec.rollout.max_response_tokens) == (4096, 4096)
    assert (spec.training.learning_rate, spec.critic and spec.critic.learning_rate) == (1e-6, 1e-5)
    assert (spec.rollout.memory_fraction, spec.evaluation.every_steps) == (0.8, 10)
    assert spec.training.offload.parameters
    assert spec.training.offload.optimizer
    assert not spec.evaluation.before_training
    assert compute_layout(spec).num_engines == 2
    findings = check_job(job, model_config=QWEN2_7B, num_train_rows=NUM_GSM8K_TRAIN_ROWS)
    assert [finding.path for finding in findings] == ["spec.training.promptsPerStep"]
    assert "3377 (45%) unused" in findings[0].message


def test_the_two_node_ppo_script_with_its_micro_batch_corrected() -> None:
    job = load("gsm8k-ppo-two-nodes.yaml")
    assert job.spec.model.source == "meta-llama/Llama-3.1-8B-Instruct"
    layout = compute_layout(job.spec)
    assert (layout.num_nodes, layout.world_size, layout.tensor_parallel_size, layout.num_engines) == (2, 16, 16, 1)
    findings = check_job(job, model_config=LLAMA31_8B)
    assert [(finding.severity, finding.path) for finding in findings] == [
        (Severity.WARNING, "spec.rollout.tensorParallelSize")
    ]
    job.spec.training.micro_batch_sequences = 16
    errors = [finding for finding in check_job(job, model_config=LLAMA31_8B) if finding.severity is Severity.ERROR]
    assert [finding.path for finding in errors] == ["spec.training.microBatchSequences"]
    assert "= 4 sequences per rank; use 1, 2, 4, or miniBatchPrompts 256 or 512" in errors[0].message


def test_the_grpo_script() -> None:
    job = load("gsm8k-grpo.yaml")
    spec = job.spec
    assert (spec.model.source, spec.algorithm.type, spec.rollout.engine) == ("Qwen/Qwen3-8B", "GRPO", "VLLM")
    assert (spec.training.prompts_per_step, spec.training.mini_batch_prompts) == (1024, 256)
    assert (spec.rollout.samples_per_prompt, spec.rollout.tensor_parallel_size) == (5, 2)
    assert (spec.cluster.gpus_per_node, spec.rollout.memory_fraction) == (8, 0.6)
    assert (spec.data.max_prompt_tokens, spec.training.learning_rate, spec.training.total_epochs) == (512, 1e-6, 15)
    assert check_job(job, model_config=QWEN3_8B, num_train_rows=NUM_GSM8K_TRAIN_ROWS) == []


@pytest.mark.parametrize("name", ["gsm8k-grpo.yaml", "gsm8k-ppo-verl-equivalent.yaml", "gsm8k-ppo-two-nodes.yaml"])
def test_what_is_not_built_is_said_and_nothing_else(name: str) -> None:
    assert {finding.reason for finding in find_unsupported(load(name).spec)} <= {"NotSupportedYet"}


@pytest.mark.parametrize("name", ["gsm8k-ppo-verl-equivalent.yaml", "gsm8k-ppo-two-nodes.yaml", "quickstart-ppo.yaml"])
def test_the_critic_of_the_ppo_scripts_is_built(name: str) -> None:
    spec = load(name).spec
    assert spec.critic is not None
    paths = {finding.path for finding in find_unsupported(spec)}
    assert not {path for path in paths if path.startswith(("spec.critic", "spec.algorithm"))}
