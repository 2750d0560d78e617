"""Tiny random models of every family that the documentation names."""

from __future__ import annotations

from typing import Any, Final

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 41,  # prime: no world size divides it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": None,
}
LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def build_qwen2(tied: bool) -> Any:
    """Qwen2: biases in the attention's input projections."""
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied))


def build_qwen3(tied: bool) -> Any:
    """Qwen3: norms of queries and keys, and a head size of its own."""
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=tied))


def build_llama3(tied: bool) -> Any:
    """Llama 3: scaled rotary frequencies."""
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=tied))


FAMILIES: Final = {"qwen2": build_qwen2, "qwen3": build_qwen3, "llama3": build_llama3}
