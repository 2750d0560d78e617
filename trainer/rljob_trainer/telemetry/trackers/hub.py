"""All trackers of a job behind one call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.data import Tracking
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.telemetry.trackers.base import (
    EVALUATION,
    TRAIN,
    Tracker,
    TrackerRecord,
    TrackerRecords,
    select_numbers,
)
from rljob_trainer.telemetry.trackers.feed import CLOSE_SECONDS, TrackedRow, TrackerFeed
from rljob_trainer.telemetry.trackers.mlflow_tracker import MLflowTracker
from rljob_trainer.telemetry.trackers.tensorboard_tracker import TensorBoardTracker
from rljob_trainer.telemetry.trackers.wandb_tracker import WandBTracker

LIBRARIES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Field of `spec.tracking` -> module it needs."""


def list_trackers(tracking: Tracking) -> list[str]:
    """Fields of `spec.tracking` that ask for a tracker."""
    asked = {
        "tensorboard": tracking.tensorboard,
        "wandb": tracking.wandb is not None,
        "mlflow": tracking.mlflow is not None,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def check_libraries(tracking: Tracking) -> None:
    """A missing library is no outage: it is said before the run starts.

    Raises:
        ConfigurationError: a tracker's library is not installed.
    """
    for name in list_trackers(tracking):
        if importlib.util.find_spec(LIBRARIES[name]) is None:
            raise ConfigurationError(
                f"spec.tracking.{name}: the package {LIBRARIES[name]} is not installed here; install rljob[tracking], "
                "or remove the field: metrics.jsonl is always written"
            )


class TrackerHub:
    """Hands every row to every tracker of the job; never blocks, never raises."""

    def __init__(
        self, job: ResolvedJob, *, is_new_run: bool, warn: Callable[[str], None], count_failure: Callable[[str], None]
    ) -> None:
        """`is_new_run`: neither resumed nor a later attempt; it gets runs of its own in the trackers."""
        self._feeds: list[TrackerFeed] = []
        names = list_trackers(job.spec.tracking)
        if not names:
            return
        records = TrackerRecords(Path(job.paths.run_directory), is_new_run=is_new_run)
        if records.problem is not None:
            warn(records.problem)
        for name in names:
            record = records.get(name)
            tracker = _make_tracker(name, job, record)
            self._feeds.append(
                TrackerFeed(name, tracker, record, save=records.save, warn=warn, count_failure=count_failure)
            )

    def log_step(self, step: int, row: Mapping[str, Any]) -> None:
        """A training row of metrics.jsonl."""
        self._log(TrackedRow(TRAIN, step, select_numbers(row, TRAIN)))

    def log_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """An evaluation row of metrics.jsonl."""
        self._log(TrackedRow(EVALUATION, step, select_numbers(row, EVALUATION)))

    def close(self, *, succeeded: bool, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait for the trackers, each at most `timeout_seconds`."""
        for feed in self._feeds:
            feed.close(succeeded=succeeded, timeout_seconds=timeout_seconds)

    def _log(self, row: TrackedRow) -> None:
        for feed in self._feeds:
            feed.log(row)


def _make_tracker(name: str, job: ResolvedJob, record: TrackerRecord) -> Tracker:
    tracking = job.spec.tracking
    if name == "wandb" and tracking.wandb is not None:
        return WandBTracker(tracking.wandb, job, record)
    if name == "mlflow" and tracking.mlflow is not None:
        return MLflowTracker(tracking.mlflow, job, record)
    return TensorBoardTracker(Path(job.paths.run_directory))
