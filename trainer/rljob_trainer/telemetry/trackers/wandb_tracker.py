"""Weights & Biases. Credentials and server come from the environment: WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.data import WandB
from rljob_trainer.telemetry.trackers.base import TrackerRecord, describe_config, make_run_id

INIT_SECONDS: Final = 60.0


class WandBTracker:
    """One run; a later attempt continues it by its id."""

    def __init__(self, settings: WandB, job: ResolvedJob, record: TrackerRecord) -> None:
        self._settings, self._job, self._record = settings, job, record
        self._run: Any = None

    def open(self) -> None:
        """Start or resume.

        Raises:
            wandb.errors.Error: no credentials, or the server did not answer.
        """
        import wandb

        if self._record.run_id is None:
            self._record.run_id = make_run_id(self._job.name)
        directory = Path(self._job.paths.run_directory)
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            id=self._record.run_id,
            name=self._job.name,
            resume="allow",
            dir=str(directory),
            config=describe_config(self._job.spec) | {"namespace": self._job.namespace, "uid": self._job.uid},
            settings=wandb.Settings(
                # It would wrap the driver's stdout, whose last line the operator reads.
                console="off",
                silent=True,
                disable_git=True,
                init_timeout=INIT_SECONDS,
            ),
        )
        # Its own step must grow; ours is a value, so that evaluations of the same step can follow.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Asynchronous in the library."""
        self._run.log({"step": step, **values})

    def close(self, *, succeeded: bool) -> None:
        """Upload the rest. A stopped or failed attempt leaves the run as crashed until the next one continues it."""
        if self._run is not None:
            self._run.finish(exit_code=0 if succeeded else 1)
