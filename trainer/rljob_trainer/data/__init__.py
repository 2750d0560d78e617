"""Prompts and demonstrations: files in, checked and tokenised rows out."""

from rljob_trainer.data.load import load_prompts, load_supervised_rows
from rljob_trainer.data.rows import DataReport, FileReport, PromptDataset, PromptRow, SupervisedRow
from rljob_trainer.data.sampler import PromptSampler

__all__ = [
    "DataReport",
    "FileReport",
    "PromptDataset",
    "PromptRow",
    "PromptSampler",
    "SupervisedRow",
    "load_prompts",
    "load_supervised_rows",
]
