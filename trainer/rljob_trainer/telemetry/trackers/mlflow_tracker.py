"""MLflow. Credentials come from the environment: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.data import MLflow
from rljob_trainer.telemetry.trackers.base import TrackerRecord, describe_config, flatten

MAX_PARAMETERS: Final = 100
"""Of one request, by MLflow's limits; as are the characters of a value."""
MAX_PARAMETER_CHARACTERS: Final = 500


class MLflowTracker:
    """One run; a later attempt continues it by its id."""

    def __init__(self, settings: MLflow, job: ResolvedJob, record: TrackerRecord) -> None:
        self._settings, self._job, self._record = settings, job, record
        self._client: Any = None

    def open(self) -> None:
        """Start or continue.

        Raises:
            mlflow.exceptions.MlflowException: the server does not answer or refuses.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self._settings.tracking_uri)
        if self._record.run_id is not None:
            client.update_run(self._record.run_id, status="RUNNING")
            self._client = client
            return
        experiment = client.get_experiment_by_name(self._settings.experiment)
        experiment_id = (
            client.create_experiment(self._settings.experiment) if experiment is None else experiment.experiment_id
        )
        tags = {"rljob.name": self._job.name, "rljob.namespace": self._job.namespace, "rljob.uid": self._job.uid}
        run = client.create_run(experiment_id, run_name=self._job.name, tags=tags)
        self._record.run_id = run.info.run_id
        self._client = client
        parameters = [
            Param(key, str(value)[:MAX_PARAMETER_CHARACTERS])
            for key, value in flatten(describe_config(self._job.spec)).items()
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            client.log_batch(run.info.run_id, params=parameters[start : start + MAX_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One request."""
        from mlflow.entities import Metric

        now_milliseconds = int(time.time() * 1000)
        metrics = [Metric(name, value, now_milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self._record.run_id, metrics=metrics)

    def close(self, *, succeeded: bool) -> None:
        """A stopped or failed attempt leaves the run KILLED until the next one continues it."""
        if self._client is not None:
            self._client.set_terminated(self._record.run_id, status="FINISHED" if succeeded else "KILLED")
