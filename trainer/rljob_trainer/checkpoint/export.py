"""Export of the policy in Hugging Face format."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rljob_trainer.checkpoint.files import sync_directory
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.policy import load_config
from rljob_trainer.models.sharding import clean_parameter_name


def export_policy(
    target: Path, weights: dict[str, torch.Tensor], *, source: str, revision: str | None, dtype: torch.dtype
) -> None:
    """Write config, weights, tokenizer and generation settings; the directory appears complete or not at all.

    Args:
        target: final directory, replaced if it exists.
        weights: full float32 parameters by `PolicyModel` name.
        source: model the run started from (config and tokenizer).
        revision: its revision.
        dtype: of the exported weights.

    Raises:
        CheckpointError: the storage is full or not writable.
    """
    model = AutoModelForCausalLM.from_config(load_config(source, revision), dtype=dtype)
    state = {clean_parameter_name(name): tensor.to(dtype) for name, tensor in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    if unexpected or set(missing) - tied:
        raise CheckpointError(
            f"export to {target}: weights do not fit the model: missing {missing}, extra {unexpected}"
        )
    model.tie_weights()
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source, revision=revision).save_pretrained(temporary)
        with contextlib.suppress(OSError):  # the source may have no generation_config.json
            GenerationConfig.from_pretrained(source, revision=revision).save_pretrained(temporary)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"export to {target} failed: {error}") from error
