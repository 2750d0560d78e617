"""A tiny Qwen2 model with its tokenizer and chat template, in Hugging Face format, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

PAD: Final = "<pad>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SYSTEM: Final = "<|system|>"
END: Final = "<|end|>"
SPECIAL_TOKENS: Final = (PAD, SYSTEM, USER, ASSISTANT, END)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MERGES: Final = ((" ", "+"), (" ", "-"), (" ", "="))
"""The operators of the task are one token with the space before them."""

HIDDEN_SIZE: Final = 64
NUM_LAYERS: Final = 2
NUM_HEADS: Final = 2
INTERMEDIATE_SIZE: Final = 192
MAX_POSITIONS: Final = 64
INITIALIZER_RANGE: Final = 0.08
"""The usual 0.02 suits wide models; at width 64 it makes the warm start four times as long (measured)."""


def build_tokenizer() -> Any:
    """A byte-level Qwen2 tokenizer with 256 bytes and three merges: every text decodes to itself, every digit is a
    token. (AutoTokenizer loads Qwen2's own pre-tokenizer for Qwen2 models, whatever tokenizer.json says.)"""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    def spell(text: str) -> str:
        """Byte-level spelling: a space is a printable character there."""
        return str(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])

    merges = [(spell(left), spell(right)) for left, right in _MERGES]
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    return Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def build_model(tokenizer: Any, seed: int) -> Any:
    """A randomly initialised Qwen2ForCausalLM (about 110 thousand parameters) that fits the tokenizer."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def save_model(directory: Path, seed: int) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    from transformers.utils import logging

    tokenizer = build_tokenizer()
    logging.disable_progress_bar()
    build_model(tokenizer, seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        # safetensors makes its file for the owner only; the pods run as another user.
        path.chmod(0o644)
