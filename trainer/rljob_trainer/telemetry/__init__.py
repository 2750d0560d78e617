"""Progress, metrics, logs and the closing summary of a run."""

from rljob_trainer.telemetry.console import Console
from rljob_trainer.telemetry.server import ProgressServer
from rljob_trainer.telemetry.state import TelemetryState
from rljob_trainer.telemetry.statistics import StepStatistics
from rljob_trainer.telemetry.summary import write_summary
from rljob_trainer.telemetry.writers import MetricsWriter, SampleRecord, SampleWriter

__all__ = [
    "Console",
    "MetricsWriter",
    "ProgressServer",
    "SampleRecord",
    "SampleWriter",
    "StepStatistics",
    "TelemetryState",
    "write_summary",
]
