"""Whole runs of `python -m rljob_trainer` on GPUs with SGLang: every algorithm family and layout for a few steps."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tr_gpu import ENGINE_ARGS, needs_gpus
from tr_run import finish, read_lines, read_weights, start, write_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, *needs_gpus(1, "sglang")]

NUM_STEPS = 3
ONE_GPU = {"gpus_per_node": 1, "ranks_per_node": 1}
TWO_GPUS = {"gpus_per_node": 2, "ranks_per_node": 2}
RUNS = {
    "grpo": {},
    "ppo with a critic": {
        "algorithm": {"type": "PPO", "kl": {"placement": "Reward", "coefficient": 0.01}},
        "critic": {"learning_rate": 1e-3},
    },
    "adapters": {"lora": {"rank": 4}},
    "offloaded to the host": {"training": {"offload": {"parameters": True, "optimizer": True}}},
    "optimizer offloaded": {"training": {"offload": {"optimizer": True}}},
}
RUNS_ON_TWO_GPUS = {
    "two ranks, two engines": {},
    "one engine of two ranks": {"rollout": {"tensor_parallel_size": 2}},
    "ranks that share a pack": {"training": {"sequence_parallel_size": 2}},
    "ppo, one engine of two ranks, offloaded": {
        "algorithm": {"type": "PPO", "kl": {"placement": "Reward", "coefficient": 0.01}},
        "critic": {"learning_rate": 1e-3},
        "rollout": {"tensor_parallel_size": 2},
        "training": {"offload": {"parameters": True, "optimizer": True}},
    },
}


def write_gpu_job(assets, run, cluster, sections, compile="Auto"):
    """The job of the CPU tests (warm start, KL in the loss, evaluation, a checkpoint in each step) on GPUs."""
    given = {name: dict(values) for name, values in sections.items()}
    rollout = {
        "engine": "SGLang",
        "memory_fraction": 0.5,
        "max_concurrent_samples": 64,
        "samples_per_prompt": 8,
        "max_response_tokens": 24,
        "engine_args": ENGINE_ARGS,
    } | given.pop("rollout", {})
    # One update per rollout: what is left between the engine's log-probabilities and the ranks' is their disagreement.
    training = {"total_steps": NUM_STEPS, "learning_rate": 1e-3, "mini_batch_prompts": 4} | given.pop("training", {})
    return write_job(
        assets,
        run,
        dtype="BFloat16",
        compile=compile,
        data={"max_prompt_tokens": 32, "validation": [str(assets / "validation.jsonl")]},
        rollout=rollout,
        training=training,
        cluster=cluster,
        **given,
    )


def run_to_end(assets, tmp_path, cluster, sections):
    """Metrics of the steps, and the log."""
    run, log = tmp_path / "run", tmp_path / "run.log"
    result = finish(start(write_gpu_job(assets, run, cluster, sections), log), log, 0)
    assert result.progress.progress.step == NUM_STEPS
    steps = [row for row in read_lines(run / "metrics.jsonl") if "reward_mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["num_samples"] == 32
        assert math.isfinite(row["loss"])
        assert row["gradient_norm"] > 0
        # The engine samples from the very distribution that is trained, after every hand-over.
        assert 0 <= row["rollout_kl_mean"] < 2e-3, json.dumps(row)
    exported, initial = read_weights(run / "export" / f"step-{NUM_STEPS}"), read_weights(assets / "model")
    assert set(exported) == set(initial)
    assert any(not torch.equal(exported[name], initial[name].bfloat16().float()) for name in exported)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in exported.values())
    return steps, log.read_text()


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_on_one_gpu(name, assets, tmp_path):
    steps, text = run_to_end(assets, tmp_path, ONE_GPU, RUNS[name])
    assert "rank 0: memory plan per GPU" in text
    if "critic" in name:
        assert all(row["value_loss"] > 0 for row in steps)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(2)) for name in RUNS_ON_TWO_GPUS])
def test_a_whole_run_on_two_gpus(name, assets, tmp_path):
    _, text = run_to_end(assets, tmp_path, TWO_GPUS, RUNS_ON_TWO_GPUS[name])
    assert "rank 1: memory plan per GPU" in text
