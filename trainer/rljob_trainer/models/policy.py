"""Loading a Hugging Face causal LM as a policy that maps packs to log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_api.v1alpha1.model import DType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.log_probs import DEFAULT_HEAD_OPTIONS, HeadOptions, compute_entropy, compute_log_probs
from rljob_trainer.models.packed_attention import ATTENTION_NAME
from rljob_trainer.models.packed_batch import EXACT_LAYOUT, PackedBatch
from rljob_trainer.models.sequence_parallel import SequenceGroup, take_own_part

PREFIX = "causal_lm."
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}

TORCH_DTYPES: dict[DType, torch.dtype] = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


class PolicyModel(nn.Module):
    """A causal LM whose forward returns log-probabilities and entropies of the response tokens of a pack."""

    def __init__(self, causal_lm: nn.Module, head_options: HeadOptions = DEFAULT_HEAD_OPTIONS) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.head_options = head_options
        self.keep_gathered = False
        """See `models.sharding.iterate_micro_batches`."""
        self.pack_layout = EXACT_LAYOUT
        """How packs for this model are built."""
        self.sequence_group: SequenceGroup | None = None
        """Ranks that share the tokens of a pack."""
        self._softcap: float | None = getattr(causal_lm.config, "final_logit_softcapping", None)
        self.blocks = find_blocks(causal_lm)
        """Decoder blocks in order: the units of sharding, gathering and recomputation."""

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float,
        with_entropy_gradient: bool = False,
        statistic: Callable[[Tensor], Tensor] = compute_entropy,
    ) -> tuple[Tensor, Tensor]:
        """(log_probs_R, entropy_R), float32. All parameters are used here, inside the sharded root's forward.

        `statistic`: another function of the tempered logits in place of the entropy.
        """
        causal_lm: Any = self.causal_lm
        own = take_own_part(batch, self.sequence_group)
        output = causal_lm.base_model(
            input_ids=own.input_ids_1n,
            position_ids=own.position_ids_1n,
            use_cache=False,
            packing=batch.packing,
            **own.attention_arguments,
        )
        hidden_RE = output.last_hidden_state.squeeze(0)[own.head_index_r]
        log_probs_R, statistic_R = compute_log_probs(
            hidden_RE,
            own.labels_r,
            self._head,
            temperature=temperature,
            with_entropy_gradient=with_entropy_gradient,
            statistic=statistic,
            options=self.head_options,
        )
        return own.join(log_probs_R), own.join(statistic_R)

    def _head(self, hidden_CE: Tensor) -> Tensor:
        causal_lm: Any = self.causal_lm
        logits_CV: Tensor = causal_lm.get_output_embeddings()(hidden_CE)
        return logits_CV if self._softcap is None else self._softcap * torch.tanh(logits_CV / self._softcap)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Decoder blocks of a Hugging Face model, in order; to be called before sharding, which renames the classes."""
    names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    return [module for module in model.modules() if type(module).__name__ in names]


def load_config(source: str, revision: str | None = None, *, field: str = "spec.model.source") -> Any:
    """The model's config.

    Raises:
        ConfigurationError: the directory is missing or not a model, or its architecture cannot be packed exactly.
    """
    directory = Path(source)
    # A hub id is `owner/name` at most; anything else is a path, and must not be looked up on the network.
    if (source.startswith(("/", ".")) or source.count("/") > 1) and not directory.is_dir():
        siblings = sorted(entry.name for entry in directory.parent.iterdir())[:10] if directory.parent.is_dir() else []
        raise ConfigurationError(
            f"{field}: directory {source!r} does not exist"
            + (f"; beside it are {', '.join(siblings)}" if siblings else "; neither does its parent")
            + "; give a directory with config.json, weights and tokenizer"
        )
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigurationError(
            f"{field}: {source!r} cannot be read as a Hugging Face model ({error}); "
            "give a directory with config.json, weights and tokenizer"
        ) from error
    layer_types = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if layer_types:
        raise ConfigurationError(
            f"{field}: {source!r} has layers of type {sorted(layer_types)}, whose state would leak between packed "
            "sequences; use a model with full or sliding-window attention only"
        )
    if getattr(config, "logit_scale", None) not in (None, 1.0) or getattr(config, "logits_scaling", None) not in (
        None,
        1.0,
    ):
        raise ConfigurationError(
            f"{field}: {source!r} scales its logits, which the chunked head does not reproduce; use another "
            "architecture"
        )
    return config


def load_causal_lm(
    source: str,
    revision: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = ATTENTION_NAME,
    field: str = "spec.model.source",
) -> Any:
    """The model on the CPU, in eval mode (dropout would break the importance ratio), with all weights in `dtype`.

    Raises:
        ConfigurationError: weights are missing or do not fit the config.
    """
    config = load_config(source, revision, field=field)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{field}: weights of {source!r} cannot be loaded: {error}") from error
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    missing = sorted(set(report["missing_keys"]) - tied)
    if missing:
        # transformers would initialise them at random and only warn.
        raise ConfigurationError(
            f"{field}: weights of {source!r} lack {len(missing)} tensors, for example {missing[0]!r}; "
            "the checkpoint does not belong to this config.json"
        )
    return model.eval()


def find_stop_token_ids(source: str, revision: str | None, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a response: generation_config (often several), config and tokenizer (TRL PR 7039)."""
    from transformers import GenerationConfig

    found: set[int] = set()
    config = load_config(source, revision)
    try:
        generation: Any = GenerationConfig.from_pretrained(source, revision=revision)
    except OSError:
        generation = None  # the file is optional
    for ids in (
        getattr(generation, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    if not found:
        raise ConfigurationError(
            f"spec.model.source: {source!r} names no end-of-sequence token; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))
