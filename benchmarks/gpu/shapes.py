"""Model shapes of the GPU benchmarks: real sizes, random weights."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen2Config

NO_TOKEN = 10**6
"""End-of-sequence id outside of every vocabulary: responses always reach their length limit."""


def build_config(name: str) -> Any:
    """The config of a shape.

    Raises:
        KeyError: an unknown name.
    """
    common: dict[str, Any] = {"bos_token_id": None, "eos_token_id": NO_TOKEN, "pad_token_id": None}
    qwen: dict[str, Any] = common | {
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "architectures": ["Qwen2ForCausalLM"],
    }
    configs = {
        "qwen2-0.5b": lambda: Qwen2Config(
            **qwen, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14
        ),
        "qwen2-1.5b": lambda: Qwen2Config(
            **qwen, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12
        ),
        "llama3.1-8b": lambda: LlamaConfig(
            **common,
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500_000.0,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        ),
        "tiny": lambda: Qwen2Config(
            **common,
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
        ),
    }
    return configs[name]()
