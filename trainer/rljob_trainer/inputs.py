"""What a run reads before any process is started: model facts, prompts, demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from rljob_api.contract import ResolvedJob
from rljob_api.resolve import count_drawn_prompts
from rljob_trainer.data import (
    PromptDataset,
    PromptRow,
    PromptSampler,
    SupervisedRow,
    load_prompts,
    load_supervised_rows,
)
from rljob_trainer.errors import ConfigurationError, DataError
from rljob_trainer.evaluation import ValidationSet, split_validation_sets
from rljob_trainer.models.policy import find_stop_token_ids, load_config
from rljob_trainer.models.sequence_parallel import check_sequence_parallel
from rljob_trainer.rewards import make_answer_check


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    train: PromptDataset
    validation: list[ValidationSet]
    """At most `evaluation.maxPrompts` of each."""
    demonstrations: list[SupervisedRow]
    sampler: PromptSampler
    total_steps: int


def load_inputs(job: ResolvedJob, note: Callable[[str], None]) -> Inputs:
    """Read and check everything.

    Raises:
        ConfigurationError: an unreadable model. DataError: unusable data files.
    """
    spec = job.spec
    config = load_config(spec.model.source, spec.model.revision)
    check_sequence_parallel(config, spec.model, spec.training.sequence_parallel_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.model.source, revision=spec.model.revision)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"spec.model.source: {spec.model.source!r} has no usable tokenizer ({error}); put tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error
    held_out: list[PromptRow] = []
    with make_answer_check(spec.reward) as check:
        train = load_prompts(spec.data.train, spec.data, tokenizer, check_answer=check, show=note)
        if spec.data.validation:
            held_out = load_prompts(
                spec.data.validation,
                spec.data,
                tokenizer,
                field_path="spec.data.validation",
                check_answer=check,
                show=note,
            ).rows
    validation = split_validation_sets(spec.data.validation, held_out, spec.evaluation.max_prompts)
    for row in (*train.rows, *held_out):
        if not row.prompt_ids:
            raise DataError(
                f"prompt {row.uid} has no tokens (text {row.prompt_text!r}); a response needs one to follow"
            )
    demonstrations = load_supervised_rows(spec.warm_start, spec.data, tokenizer, show=note) if spec.warm_start else []
    seed = spec.training.seed if spec.data.shuffle_seed is None else spec.data.shuffle_seed
    sampler = PromptSampler(len(train.rows), count_drawn_prompts(spec), seed)
    note(sampler.describe())
    return Inputs(
        tokenizer=tokenizer,
        stop_token_ids=find_stop_token_ids(spec.model.source, spec.model.revision, tokenizer),
        train=train,
        validation=validation,
        demonstrations=demonstrations,
        sampler=sampler,
        total_steps=spec.training.total_steps or (spec.training.total_epochs or 1) * sampler.steps_per_epoch,
    )
