"""Paths of a local run: relative ones are taken from the current directory, missing ones are named before the start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rljob_api.findings import Finding, FindingReason, make_error
from rljob_api.v1alpha1 import RewardType, RLJob, RLJobSpec

_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin")
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MAX_LISTED: Final = 5


@dataclass(frozen=True)
class LocalPath:
    """One path of the spec, absolute."""

    field: str
    path: Path
    is_model: bool = False


def resolve_local_paths(job: RLJob, directory: Path) -> tuple[RLJob, list[LocalPath]]:
    """A copy of the job with absolute paths, and all of them; Hugging Face ids stay as they are."""
    job = job.model_copy(deep=True)
    spec = job.spec
    found: list[LocalPath] = []

    def take(field: str, text: str, *, is_model: bool = False) -> str:
        path = Path(os.path.abspath(directory / Path(text).expanduser()))
        found.append(LocalPath(field, path, is_model))
        return str(path)

    def take_list(field: str, texts: list[str]) -> list[str]:
        return [take(f"{field}[{index}]", text) for index, text in enumerate(texts)]

    spec.data.train = take_list("spec.data.train", spec.data.train)
    spec.data.validation = take_list("spec.data.validation", spec.data.validation)
    if spec.warm_start is not None:
        supervised = spec.warm_start.supervised
        supervised.data = take_list("spec.warmStart.supervised.data", supervised.data)
    for index, function in enumerate(spec.reward.functions):
        field = f"spec.reward.functions[{index}].path"
        if function.path is not None and function.type is RewardType.PYTHON:
            function.path = take(field, function.path)
        elif (
            function.path is not None and function.type is RewardType.MODEL and is_local_path(function.path, directory)
        ):
            function.path = take(field, function.path, is_model=True)
    if spec.checkpoint.resume_from_path is not None:
        spec.checkpoint.resume_from_path = take("spec.checkpoint.resumeFromPath", spec.checkpoint.resume_from_path)
    _resolve_models(spec, directory, take)
    return job, found


def check_local_paths(paths: list[LocalPath]) -> list[Finding]:
    """What is missing or unreadable, by field, with what there is instead."""
    return [finding for path in paths for finding in _check_path(path)]


def is_local_path(source: str, directory: Path) -> bool:
    """Whether a model source is a directory rather than a Hugging Face id (`owner/name`)."""
    if source.startswith(("/", "./", "../", "~")) or source.count("/") > 1:
        return True
    first = source.split("/")[0]
    return (directory / source).exists() or ("/" in source and (directory / first).is_dir())


def _resolve_models(spec: RLJobSpec, directory: Path, take: Callable[..., str]) -> None:
    sources: list[tuple[str, Any]] = [
        ("spec.model.source", spec.model),
        ("spec.critic.source", spec.critic),
        ("spec.reference.source", spec.reference),
    ]
    for field, holder in sources:
        if holder is not None and holder.source is not None and is_local_path(holder.source, directory):
            holder.source = take(field, holder.source, is_model=True)


def _check_path(local: LocalPath) -> list[Finding]:
    path = local.path
    if not path.exists():
        return [make_error(local.field, f"{path} does not exist{_describe_neighbours(path)}")]
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        return [make_error(local.field, f"{path} cannot be read by this user; chmod it or run as its owner")]
    return _check_model(local) if local.is_model else []


def _check_model(local: LocalPath) -> list[Finding]:
    path = local.path
    if not path.is_dir():
        message = f"{path} is a file; give the directory with config.json, weights and tokenizer"
        return [make_error(local.field, message, FindingReason.INVALID_TYPE)]
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(any(path.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        missing.append("weights (*.safetensors)")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if not missing:
        return []
    message = f"{path} has no {', no '.join(missing)}: it is not a model directory{_describe_entries(path)}"
    return [make_error(local.field, message)]


def _describe_neighbours(path: Path) -> str:
    parent = path.parent
    while not parent.is_dir():
        parent, path = parent.parent, parent
    names = sorted(entry.name for entry in parent.iterdir()) if os.access(parent, os.R_OK | os.X_OK) else []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {parent / close[0]}?" if close else _describe_entries(parent)
    return f": {path.name} is not in {parent}{hint}" if path.parent == parent else hint


def _describe_entries(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    if not names:
        return f"; {directory} is empty"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"; {directory} has {', '.join(names[:_MAX_LISTED])}{more}"
