"""What the driver shows while it trains: a progress bar on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from rljob_trainer.telemetry.statistics import StepStatistics

PHASE_ORDER = ("rollout", "reward", "train", "sync", "evaluate", "checkpoint")


class Console:
    """Shows steps. Use as a context manager, so that a failing run leaves the terminal as it was."""

    def __init__(self, *, console: RichConsole | None = None) -> None:
        """`console` defaults to stdout; without a terminal there plain lines are printed, which logs can keep."""
        self._console = console or RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._label = ""

    def start(self, label: str, *, total: int, completed: int = 0) -> None:
        """Begin a series (`warm start`, `train`); an earlier one ends."""
        self.stop()
        self._label = label
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}"),
            console=self._console,
            transient=False,
        )
        self._task = self._progress.add_task(label, total=total, completed=completed, details="")
        self._progress.start()

    def update(self, completed: int, total: int, details: str, *, every: int = 1) -> None:
        """`completed` of `total` are done. Plain lines are printed only for every so many, the first and the last."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=completed, details=details)
        elif completed in (1, total) or completed % every == 0:
            self.note(f"{self._label} {completed}/{total}  {details}")

    def show_step(
        self,
        statistics: StepStatistics,
        *,
        total_steps: int,
        phase_seconds: Mapping[str, float],
        seconds_left: float | None,
    ) -> None:
        """One finished step."""
        self.update(
            statistics.step,
            total_steps,
            describe_step(statistics, phase_seconds=phase_seconds, seconds_left=seconds_left),
        )

    def note(self, text: str) -> None:
        """A line of text, above the bar if there is one."""
        self._console.print(text, markup=False)

    def stop(self) -> None:
        """End the bar, keeping its last state on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def describe_step(statistics: StepStatistics, *, phase_seconds: Mapping[str, float], seconds_left: float | None) -> str:
    """`reward 0.512  1,234 tok/s  2.1 s (rollout 1.2, train 0.7, sync 0.1)  ETA 1:05`."""
    parts = [f"reward {format_number(statistics.reward_mean)}"]
    if statistics.step_seconds > 0:
        parts.append(f"{statistics.num_tokens / statistics.step_seconds:,.0f} tok/s")
    known = [name for name in PHASE_ORDER if name in phase_seconds]
    known += sorted(name for name in phase_seconds if name not in PHASE_ORDER)
    phases = ", ".join(f"{name} {phase_seconds[name]:.1f}" for name in known if phase_seconds[name] >= 0.05)
    parts.append(f"{statistics.step_seconds:.1f} s" + (f" ({phases})" if phases else ""))
    if statistics.num_dropped_samples:
        parts.append(f"{statistics.num_dropped_samples} samples dropped")
    if seconds_left is not None:
        parts.append(f"ETA {format_duration(seconds_left)}")
    return "  ".join(parts)


def format_number(value: Any) -> str:
    """Three decimals; `n/a` for undefined statistics."""
    return "n/a" if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_duration(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
