"""A tiny model, rows and settings shared by the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tr_families import LLAMA3_ROPE
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rljob_api.v1alpha1.algorithm import LossAggregation, PolicyLoss
from rljob_trainer.algorithms.policy_losses import PolicyLossOptions
from rljob_trainer.rows import TrainRow
from rljob_trainer.update import LossSettings

VOCABULARY_SIZE = 40


def save_tiny_model(directory: Path, **overrides: Any) -> Path:
    """A random Qwen2 (2 layers, 2 heads of 32, grouped KV, tied embeddings, two EOS ids)."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **overrides,
        }
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0)
    model.save_pretrained(directory)
    return directory


ARCHITECTURES = {
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "llama3-tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama3-untied": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
}


def save_architecture(directory: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny random model of one of `ARCHITECTURES`: 2 layers, 2 heads of 32, 1 key-value head, two EOS ids."""
    family, options = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.02,  # small logits: bfloat16 rounds them by less than the log-probabilities may differ
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.generation_config = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0)
    model.to(dtype).save_pretrained(directory)
    return directory


def save_byte_model(directory: Path) -> Path:
    """The same architecture with the quickstart's byte-level tokenizer, for tests that start from text."""
    from rljob_trainer.quickstart.model import build_tokenizer

    tokenizer = build_tokenizer()
    save_tiny_model(
        directory,
        vocab_size=len(tokenizer),
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id]).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_rows(num_rows: int = 12, seed: int = 0, old: bool = True, reference: bool = False) -> list[TrainRow]:
    """Rows of different lengths with random advantages and, on request, old and reference log-probabilities."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        length = int(rng.integers(1, 9))

        def noise(length: int = length) -> np.ndarray:
            return (-3 + 0.1 * rng.standard_normal(length)).astype(np.float32)

        rows.append(
            TrainRow(
                prompt_ids=rng.integers(3, 40, size=int(rng.integers(1, 7))).tolist(),
                response_ids=rng.integers(3, 40, size=length).tolist(),
                advantages=rng.standard_normal(length).astype(np.float32),
                rollout_log_probs=noise(),
                trainable=index % 5 != 4,
                old_log_probs=noise() if old else None,
                reference_log_probs=noise() if reference else None,
            )
        )
    return rows


def make_loss(**overrides: Any) -> LossSettings:
    """PPO clip with token mean and wide clipping."""
    values: dict[str, Any] = {
        "policy_loss": PolicyLoss.PPO_CLIP,
        "aggregation": LossAggregation.TOKEN_MEAN,
        "temperature": 0.8,
        "norm_tokens": 8,
        "options": PolicyLossOptions(clip_low=5.0, clip_high=5.0),
        **overrides,
    }
    return LossSettings(**values)


def assert_same_gradient(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to 1e-5 as a whole and tensor by tensor.

    Key biases cancel in the softmax: their gradient is the rounding of large terms, so a tensor is measured against at
    least a hundredth of the whole.
    """
    assert set(gradients) == set(expected)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    differences = {name: (gradient - expected[name]).norm() for name, gradient in gradients.items()}
    assert torch.stack(list(differences.values())).norm() <= 1e-5 * total
    for name, difference in differences.items():
        assert difference <= 1e-5 * torch.maximum(expected[name].norm(), 1e-2 * total), name
