"""What the loaders hand to the loop: rows of prompts, rows of demonstrations, and the account of what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MAX_EXAMPLES: Final = 3


@dataclass(frozen=True)
class PromptRow:
    """One usable prompt."""

    uid: str
    """`<train|validation>/<file>/<row>`: unique, and the same in every attempt; never derived from the text (verl-like
    grouping by text or index merges duplicate prompts into one group)."""
    prompt_ids: list[int]
    """Token ids exactly as they are sent to the engine."""
    prompt_text: str
    """The text those ids were made from."""
    answer: Any
    """Gold answer as it stands in the file."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row; reward functions get them by name."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The conversation that `prompt_text` renders ({role, content}, system prompt included); empty for plain text."""


@dataclass(frozen=True)
class SupervisedRow:
    """One demonstration."""

    prompt_ids: list[int]
    """Token ids of the prompt, rendered like an RL prompt."""
    response_ids: list[int]
    """Token ids of the target response, the end-of-sequence token included."""


@dataclass(frozen=True)
class FileReport:
    """One file that was read."""

    path: str
    """Path as given."""
    format: str
    """JSONL, Parquet or Hugging Face dataset."""
    num_rows: int
    """Rows read."""


@dataclass
class DataReport:
    """What became of the rows of one `spec.data` list."""

    field_path: str
    """For example `spec.data.train`."""
    max_prompt_tokens: int
    """The limit that was applied."""
    files: list[FileReport] = field(default_factory=list)
    """Files in order."""
    num_rows_used: int = 0
    """Rows handed on."""
    num_rows_overlong: int = 0
    """Rows dropped because their prompt is longer than the limit."""
    num_rows_truncated: int = 0
    """Rows whose prompt was cut on the left (`overlongPrompts: TruncateLeft`)."""
    longest_prompt_tokens: int = 0
    """Longest prompt that was met, before dropping or cutting."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Rows left out for another reason: reason -> count."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> up to three places (`file row n: detail`)."""

    @property
    def num_rows_read(self) -> int:
        """Rows of all files."""
        return sum(report.num_rows for report in self.files)

    @property
    def num_rows_unusable(self) -> int:
        """Rows left out for reasons other than length."""
        return sum(self.unusable.values())

    def note(self, reason: str, place: str) -> None:
        """Keep the first places where `reason` was met."""
        places = self.examples.setdefault(reason, [])
        if len(places) < MAX_EXAMPLES:
            places.append(place)

    def reject(self, reason: str, place: str) -> None:
        """Count one unusable row."""
        self.unusable[reason] = self.unusable.get(reason, 0) + 1
        self.note(reason, place)

    def format(self) -> str:
        """The account for the log, one line per fact."""
        lines = [
            f"{self.field_path}: {self.num_rows_used} of {self.num_rows_read} rows used, {len(self.files)} file(s); "
            f"longest prompt {self.longest_prompt_tokens} tokens, limit {self.max_prompt_tokens}"
        ]
        lines += [f"  {report.path}: {report.num_rows} rows ({report.format})" for report in self.files]
        if self.num_rows_overlong:
            lines.append(f"  {self.num_rows_overlong} of {self.num_rows_read} dropped: {self._describe('overlong')}")
        if self.num_rows_truncated:
            lines.append(f"  {self.num_rows_truncated} cut on the left: {self._describe('truncated')}")
        lines += [f"  {count} unusable: {reason}: {self._describe(reason)}" for reason, count in self.unusable.items()]
        return "\n".join(lines)

    def _describe(self, reason: str) -> str:
        return "; ".join(self.examples.get(reason, []))


@dataclass(frozen=True)
class PromptDataset:
    """The usable prompts of one `spec.data` list."""

    rows: list[PromptRow]
    """In file order."""
    report: DataReport
    """What was read and left out."""

    def __len__(self) -> int:
        return len(self.rows)
