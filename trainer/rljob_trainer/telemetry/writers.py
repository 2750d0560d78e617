"""metrics.jsonl and samples.jsonl of a run: one strict JSON object per line, no line twice after a resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rljob_api.names import METRICS_FILE, SAMPLES_FILE

EVALUATION_KEY: Final = "evaluation_reward_mean"
"""Rows of metrics.jsonl with this key are evaluations."""


@dataclass(frozen=True)
class SampleRecord:
    """One generated response."""

    uid: str
    """Row of the prompt."""
    prompt: str
    """Prompt text."""
    response: str
    """Response text."""
    reward: float | None
    """None: left out."""
    answer: Any = None
    """Gold answer."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Reward function -> unweighted score."""
    prediction: str | None = None
    """Answer found in the response."""
    failure: str | None = None
    """Why there is no reward although there should be one."""


class JsonlWriter:
    """Appends objects with a `step` to a file. Numbers that JSON does not know (NaN, infinities) become null."""

    def __init__(self, path: Path, *, resumed_from_step: int | None) -> None:
        """Opens `path`. A run from the beginning replaces an older file; a resumed one keeps the lines up to its step
        and drops the rest, which it is about to repeat, and a last line that a kill left unfinished."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _rewrite(path, list(_read_kept_lines(path, resumed_from_step)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """One line, flushed, so that `tail -f` and a killed driver both leave whole lines."""
        self._file.write(json.dumps(to_strict_json(row), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter(JsonlWriter):
    """`metrics.jsonl`: one line per step or evaluation."""

    def __init__(self, directory: Path, *, resumed_from_step: int | None = None) -> None:
        """In the run directory."""
        super().__init__(directory / METRICS_FILE, resumed_from_step=resumed_from_step)


class SampleWriter(JsonlWriter):
    """`samples.jsonl`: prompts, responses and rewards of some steps."""

    def __init__(self, directory: Path, *, resumed_from_step: int | None = None) -> None:
        """In the run directory."""
        super().__init__(directory / SAMPLES_FILE, resumed_from_step=resumed_from_step)

    def write_samples(self, step: int, samples: Iterable[SampleRecord], *, kind: str = "train") -> None:
        """The samples of one step; `kind` is train or evaluation."""
        for sample in samples:
            row = {
                "step": step,
                "kind": kind,
                "uid": sample.uid,
                "prompt": sample.prompt,
                "response": sample.response,
                "reward": sample.reward,
                "answer": sample.answer,
            }
            further = {"scores": sample.scores, "prediction": sample.prediction, "failure": sample.failure}
            self.write(row | {key: value for key, value in further.items() if value})


def to_strict_json(value: Any) -> Any:
    """`value` with NaN and infinities as null, and anything JSON does not know as text."""
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):
        return to_strict_json(value.tolist())
    return str(value)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All lines of `metrics.jsonl`, in order; an unfinished last line is left out."""
    return [json.loads(line) for line in _read_kept_lines(directory / METRICS_FILE, None, keep_all=True)]


def has_evaluation(directory: Path, step: int) -> bool:
    """Whether the evaluation after `step` was finished: a stop may have cut it short."""
    return any(row["step"] == step and EVALUATION_KEY in row for row in read_metrics(directory))


def _read_kept_lines(path: Path, resumed_from_step: int | None, *, keep_all: bool = False) -> Iterable[str]:
    if not path.exists() or (resumed_from_step is None and not keep_all):
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
            if keep_all or (resumed_from_step is not None and step <= resumed_from_step):
                yield line.rstrip("\n")


def _rewrite(path: Path, lines: list[str]) -> None:
    """Replace the file at once: a kill in the middle must not lose the history."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
