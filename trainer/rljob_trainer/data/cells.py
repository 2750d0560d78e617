"""Normalises cells: a prompt cell to text or messages, an answer cell to a plain value, a column path to its cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = dict[str, str]

_ROLES: Final = ("system", "user", "assistant", "tool", "developer")
_MISSING: Final = object()


class UnusableCellError(ValueError):
    """A cell that cannot be used. `reason` groups such rows in the report; `str(error)` adds the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """`reason` is the same for all rows with this defect; `detail` is about this row."""
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


class UnsupportedContentError(ValueError):
    """Content that this model can never take (an image for a text model): the data set as a whole is wrong."""


def get_cell(row: Mapping[str, Any], column: str) -> Any:
    """The cell of `column`, which may be a dotted path into nested columns (`reward_model.ground_truth`).

    A column with that very name wins. Returns None where the row has no such cell.
    """
    value = _find_cell(row, column)
    return None if value is _MISSING else value


def has_column(row: Mapping[str, Any], column: str) -> bool:
    """Whether the row has the cell, null or not."""
    return _find_cell(row, column) is not _MISSING


def _find_cell(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def normalise_prompt(cell: Any) -> str | list[Message]:
    """Text as it is; a list of messages (also as a numpy array of dicts, or with content parts) as role/content texts.

    Raises:
        UnusableCellError: the cell holds no prompt.
        UnsupportedContentError: a content part is not text.
    """
    if isinstance(cell, str):
        if not cell.strip():
            raise UnusableCellError("prompt is empty")
        return cell
    if hasattr(cell, "tolist"):
        # A Parquet round trip through pandas turns lists of messages into numpy object arrays, whose repr would
        # otherwise be tokenised.
        cell = cell.tolist()
    if cell is None:
        raise UnusableCellError("prompt is null")
    if isinstance(cell, str):
        return normalise_prompt(cell)
    if not isinstance(cell, Sequence):
        raise UnusableCellError("prompt is neither text nor a list of messages", f"it is of type {type(cell).__name__}")
    if not cell:
        raise UnusableCellError("prompt is an empty list of messages")
    return [_normalise_message(message, position) for position, message in enumerate(cell)]


def _normalise_message(message: Any, position: int) -> Message:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise UnusableCellError(
            "a message is not of the form {role, content}", f"message {position} is {message!r:.80}"
        )
    role = message["role"]
    if role not in _ROLES:
        raise UnusableCellError("a message has an unknown role", f"message {position} has role {role!r}")
    return {"role": str(role), "content": _join_content(message["content"], position)}


def _join_content(content: Any, position: int) -> str:
    if isinstance(content, str):
        return content
    if hasattr(content, "tolist"):
        content = content.tolist()
    if content is None or not isinstance(content, Sequence):
        raise UnusableCellError("a message has no text", f"message {position} has content {content!r:.80}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        # Arrow fills the keys that other parts have with nulls, so an image part is known by its type alone.
        if kind != "text":
            raise UnsupportedContentError(
                f"message {position} has a content part of type {kind!r}; only text parts are supported"
            )
        texts.append(str(part["text"]))
    return "".join(texts)


def normalise_answer(cell: Any) -> Any:
    """The gold answer as a plain Python value.

    Raises:
        UnusableCellError: null, NaN or empty text (comparing those with anything gives rewards out of nothing:
            `"None" == "None"`).
    """
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if cell is None:
        raise UnusableCellError("answer is null")
    if isinstance(cell, float) and not math.isfinite(cell):
        raise UnusableCellError("answer is not finite", str(cell))
    if isinstance(cell, str) and not cell.strip():
        raise UnusableCellError("answer is empty")
    return cell


def name_kind(cell: Any) -> str:
    """The kind of a normalised cell, for comparing files: int64 in one and text in another is a conflict."""
    if isinstance(cell, bool):
        return "boolean"
    if isinstance(cell, int | float):
        return "number"
    if isinstance(cell, str):
        return "text"
    if isinstance(cell, Mapping):
        return "object"
    if isinstance(cell, Sequence):
        return "list"
    return type(cell).__name__
