"""Whole runs with more models than the policy: PPO's critic, adapters, ReMax's greedy baseline, a reward model."""

import shutil

import pytest
import torch
from tr_run import finish, read_lines, read_weights, shared_ray, start, write_job
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1500)]

ONE_RANK = {"ranks_per_node": 1}


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory):
    with shared_ray(tmp_path_factory.mktemp("ray")) as (address, _):
        yield address


def run_to_end(environment, log):
    finish(start(environment, log), log, 0)


def read_steps(run):
    return [row for row in read_lines(run / "metrics.jsonl") if "reward_mean" in row]


@pytest.fixture(scope="module")
def ppo(assets, ray_address, tmp_path_factory):
    """Three steps: the first trains the critic alone."""
    run = tmp_path_factory.mktemp("ppo") / "whole"
    run_to_end(write_ppo(assets, run) | ray_address, run.with_suffix(".log"))
    return run


def write_ppo(assets, run):
    return write_job(
        assets,
        run,
        algorithm={"type": "PPO", "gae_lambda": 0.9, "kl": {"placement": "Reward", "coefficient": 0.01}},
        critic={"learning_rate": 1e-2, "warmup_steps": 1, "epochs_per_step": 2},
        training={"total_steps": 3},
        evaluation={"every_steps": 0, "before_training": False},
        checkpoint={"keep_last": 3},
        cluster=ONE_RANK,
    )


def test_the_critic_learns_first_and_the_policy_follows(ppo):
    steps = read_steps(ppo)
    assert [row["num_updates"] for row in steps] == [0, 2, 2]
    assert [row["num_critic_updates"] for row in steps] == [4, 4, 4]
    assert [row["critic_learning_rate"] for row in steps] == pytest.approx(
        [1e-2 * (1 - step / 3) for step in (1, 2, 3)]
    )
    assert all(row["value_loss"] > 0 for row in steps)
    # Values start at 0, so they explain nothing; four updates later they are not 0 any more.
    assert steps[0]["value_explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert steps[1]["value_explained_variance"] != pytest.approx(0.0, abs=1e-6)
    assert steps[0]["loss"] is None
    assert steps[1]["loss"] is not None


def test_ppo_resumes_as_if_nothing_had_happened(ppo, assets, ray_address, tmp_path):
    """Critic, head, its moments and its learning rate included: the steps after the first are the same."""
    run = tmp_path / "again"
    environment = write_ppo(assets, run)
    shutil.copytree(ppo, run, ignore=shutil.ignore_patterns("step-2", "step-3", "export", "*.jsonl", "latest"))
    for name in ("metrics.jsonl", "samples.jsonl"):
        shutil.copy(ppo / name, run / name)
    run_to_end(environment | ray_address, tmp_path / "again.log")
    assert "resumed from" in (tmp_path / "again.log").read_text()
    assert read_lines(run / "metrics.jsonl") == read_lines(ppo / "metrics.jsonl")
    assert read_lines(run / "samples.jsonl") == read_lines(ppo / "samples.jsonl")
    expected = read_weights(ppo / "export" / "step-3")
    for name, tensor in read_weights(run / "export" / "step-3").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def reward_model(assets, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(assets / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(directory)
    return directory


def test_remax_with_adapters_and_a_reward_model(assets, reward_model, ray_address, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    environment = write_job(
        assets,
        run,
        algorithm={"type": "ReMax"},
        lora={"rank": 4},
        reward={
            "functions": [
                {"type": "Model", "name": "judge", "path": str(reward_model), "weight": 0.5},
                {"type": "Python", "name": "format", "path": str(assets / "reward.py")},
            ]
        },
        training={"total_steps": 2, "mini_batch_prompts": 4},
        evaluation={"every_steps": 0, "before_training": False},
        cluster=ONE_RANK,
    )
    run_to_end(environment | ray_address, log)
    first, second = read_steps(run)
    assert first["num_baseline_samples"] == 4
    assert first["num_prompts_without_baseline"] == 0
    assert first["num_samples"] == 16
    means = first["reward_function_means"]
    assert first["reward_mean"] == pytest.approx(0.5 * means["judge"] + means["format"], rel=1e-5)
    # Adapters moved in the first step, and the engine has them: its log-probabilities are still the trainer's.
    assert first["gradient_norm"] > 0
    assert second["rollout_kl_mean"] < 1e-4
    # The reference is the base: nothing but the warm start's adapters is between them in the first step.
    assert first["kl_mean"] > 0
    exported, initial = read_weights(run / "export" / "step-2"), read_weights(assets / "model")
    assert set(exported) == set(initial)
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, initial[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    adapters = sum(path.stat().st_size for path in (run / "step-2" / "state").glob("*.distcp"))
    whole = sum(tensor.numel() * 4 for tensor in initial.values())
    # Adapters with two moments each are a fraction of the weights with theirs.
    assert adapters < 3 * whole / 2
