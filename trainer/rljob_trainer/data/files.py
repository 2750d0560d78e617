"""Reads rows from JSONL, Parquet and saved Hugging Face datasets, and says what a file is when it is none of these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rljob_trainer.errors import DataError

Row = dict[str, Any]

PARQUET_BATCH_ROWS: Final = 1024
_SNIFF_BYTES: Final = 512
_JSON_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES: Final = (".parquet", ".pq")


class DataFile:
    """One entry of a `spec.data` list, recognised but not yet read.

    `place` is the field path (`spec.data.train[0]`), so that every message names the line of the spec to change.
    """

    def __init__(self, path: str, place: str) -> None:
        """Recognise `path`; raises DataError when it is missing, empty or none of the known formats."""
        self.path = path
        self.place = place
        self._path = Path(path)
        if not self._path.exists():
            raise DataError(f"{place}: {path} does not exist; {_describe_neighbours(self._path)}")
        self.format, self._parts = self._recognise()

    def rows(self) -> Iterator[Row]:
        """All rows in order, as plain Python values."""
        if self.format == "Hugging Face dataset":
            yield from self._read_dataset()
            return
        for part in self._parts:
            yield from self._read_parquet(part) if self.format == "Parquet" else self._read_jsonl(part)

    def _recognise(self) -> tuple[str, list[Path]]:
        if self._path.is_dir():
            return self._recognise_directory()
        return _recognise_file(self._path, self.place), [self._path]

    def _recognise_directory(self) -> tuple[str, list[Path]]:
        if (self._path / "dataset_dict.json").exists():
            splits = sorted(child.name for child in self._path.iterdir() if (child / "state.json").exists())
            raise DataError(
                f"{self.place}: {self.path} holds a dataset with the splits {splits}; "
                f"name one of them, for example {self._path / (splits[0] if splits else 'train')}"
            )
        if (self._path / "state.json").exists():
            return "Hugging Face dataset", []
        suffixes = (*_PARQUET_SUFFIXES, *_JSON_SUFFIXES)
        parts = sorted(child for child in self._path.iterdir() if child.suffix.lower() in suffixes and child.is_file())
        if not parts:
            raise DataError(
                f"{self.place}: the directory {self.path} is no dataset saved to disk and holds no .parquet or .jsonl "
                f"file; it holds {_list_names(self._path)}"
            )
        formats = {part: _recognise_file(part, self.place) for part in parts}
        if len(set(formats.values())) > 1:
            found = ", ".join(f"{part.name} ({kind})" for part, kind in formats.items())
            raise DataError(
                f"{self.place}: the directory {self.path} mixes formats: {found}; name the files one by one"
            )
        return formats[parts[0]], parts

    def _read_jsonl(self, path: Path) -> Iterator[Row]:
        with path.open(encoding="utf-8-sig") as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield self._parse_line(line, path, number)
            except UnicodeDecodeError as error:
                raise DataError(f"{self.place}: {path} is not UTF-8 text: {error}") from error

    def _parse_line(self, line: str, path: Path, number: int) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{self.place}: {path} line {number} is not JSON: {error}; each line must be one object"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.place}: {path} line {number} is a JSON {_name_json_type(row)}; each line must be one object, "
                'for example {"prompt": "2+2?", "answer": "4"}'
            )
        return row

    def _read_parquet(self, path: Path) -> Iterator[Row]:
        # Batch by batch: Arrow cannot convert nested columns that span several chunks in one read
        # ("Nested data conversions not implemented for chunked array outputs"), and a batch never spans row groups.
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as parquet:
                for group in range(parquet.num_row_groups):
                    for batch in parquet.iter_batches(batch_size=PARQUET_BATCH_ROWS, row_groups=[group]):
                        yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.place}: {path} cannot be read as Parquet: {error}") from error

    def _read_dataset(self) -> Iterator[Row]:
        import datasets

        try:
            dataset = datasets.load_from_disk(self.path)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.place}: {self.path} cannot be read as a saved dataset: {error}") from error
        for row in dataset:
            yield dict(row)


def _recognise_file(path: Path, place: str) -> str:
    with path.open("rb") as stream:
        head = stream.read(_SNIFF_BYTES)
    problem = _describe_impostor(path, head)
    if problem is not None:
        raise DataError(f"{place}: {path} {problem}")
    suffix = path.suffix.lower()
    if head.startswith(b"PAR1"):
        return "Parquet"
    if suffix in _PARQUET_SUFFIXES:
        raise DataError(f"{place}: {path} is not a Parquet file (starts with {head[:24]!r})")
    if suffix in _JSON_SUFFIXES or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return "JSONL"
    raise DataError(
        f"{place}: {path} is of no known format (starts with {head[:24]!r}); "
        "use .jsonl (one object per line), .parquet, or a directory made by datasets' save_to_disk"
    )


def _describe_impostor(path: Path, head: bytes) -> str | None:
    """What a file with a promising name really is; None when nothing speaks against it."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not text and path.stat().st_size <= _SNIFF_BYTES:
        return "is empty"
    if text.startswith(b"version https://git-lfs"):
        return (
            "is a Git-LFS pointer, not the data (starts with 'version https://git-lfs'); "
            "run `git lfs pull` where it was cloned, or copy the real file"
        )
    if text.startswith((b"<!doctype", b"<html")):
        return "is an HTML page, probably a failed download; fetch the raw file"
    if text.startswith(b"["):
        return 'is one JSON array; write one object per line (`jq -c ".[]" file.json > file.jsonl`)'
    if text.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"pk\x03\x04")):
        return "is compressed; decompress it first"
    return None


def _describe_neighbours(path: Path) -> str:
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    note = " (patterns are not expanded)" if any(sign in path.name for sign in "*?[") else ""
    if parent != path.parent:
        return f"nor does its directory; {parent.absolute()} exists and holds {_list_names(parent)}{note}"
    return f"beside it are {_list_names(parent)}{note}"


def _list_names(directory: Path, limit: int = 10) -> str:
    try:
        names = sorted(child.name + ("/" if child.is_dir() else "") for child in directory.iterdir())
    except OSError as error:
        return f"entries that cannot be listed ({error.strerror})"
    if not names:
        return "no files"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _name_json_type(value: Any) -> str:
    names = {str: "string", list: "array", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
