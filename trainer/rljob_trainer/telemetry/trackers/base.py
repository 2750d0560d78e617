"""What a tracker is, and the identity of its run that later attempts continue."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from rljob_api.v1alpha1.spec import RLJobSpec

RECORD_FILE: Final = "trackers.json"
TRAIN: Final = "train"
EVALUATION: Final = "evaluation"


class Tracker(Protocol):
    """One library. Methods run in the tracker's own thread, may block and may raise."""

    def open(self) -> None:
        """Begin the run, or continue the one of the record."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step."""

    def close(self, *, succeeded: bool) -> None:
        """End the run. Called once, whether or not it was opened."""


@dataclass
class TrackerRecord:
    """What is remembered of one tracker between attempts."""

    run_id: str | None = None
    """Run in the tracker."""
    logged: dict[str, int] = field(default_factory=dict)
    """Kind of row (train, evaluation) -> last step that reached the tracker."""


class TrackerRecords:
    """`trackers.json` in the run directory: the same run in every attempt, and no step twice. Thread-safe."""

    def __init__(self, directory: Path, *, is_new_run: bool) -> None:
        """A new run forgets what an earlier one in the same directory left."""
        self._path = directory / RECORD_FILE
        self._lock = threading.Lock()
        self._records: dict[str, TrackerRecord] = {}
        if not is_new_run and self._path.exists():
            try:
                document = json.loads(self._path.read_text(encoding="utf-8"))
                self._records = {name: TrackerRecord(**entry) for name, entry in document.items()}
            except (ValueError, TypeError, AttributeError) as error:
                # A new run in the tracker is better than no training.
                self.problem: str | None = f"{self._path} cannot be read ({error}); trackers begin new runs"
                return
        self.problem = None

    def get(self, name: str) -> TrackerRecord:
        """The record of a tracker."""
        with self._lock:
            return self._records.setdefault(name, TrackerRecord())

    def save(self) -> None:
        """Replace the file at once."""
        with self._lock:
            document = {name: {"run_id": r.run_id, "logged": r.logged} for name, r in self._records.items()}
            temporary = self._path.with_name(self._path.name + ".tmp")
            temporary.write_text(json.dumps(document), encoding="utf-8")
            os.replace(temporary, self._path)


def make_run_id(job_name: str) -> str:
    """`<job>-<random>`: a deleted job of the same name is another run."""
    return f"{job_name}-{secrets.token_hex(4)}"


def describe_config(spec: RLJobSpec) -> dict[str, Any]:
    """The job as run configuration. Without the cluster and the escape hatch: their environment may hold secrets."""
    document: dict[str, Any] = spec.model_dump(mode="json", exclude_none=True, exclude={"cluster", "trainer"})
    return document


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `a/b`; lists by position."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}/"))
        elif isinstance(value, list | tuple):
            flat.update(flatten({str(index): entry for index, entry in enumerate(value)}, f"{name}/"))
        else:
            flat[name] = value
    return flat


def select_numbers(row: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Finite numbers of a row of metrics.jsonl, as `<prefix>/<key>`; `step` is the axis, not a value."""
    return {
        f"{prefix}/{re.sub(r'[^A-Za-z0-9_./ -]', '_', key)}": float(value)
        for key, value in flatten(row).items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
