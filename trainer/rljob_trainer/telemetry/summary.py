"""The end of a run: a few lines for people, and the reward curve as a picture, both from metrics.jsonl."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rljob_trainer.telemetry.console import format_duration, format_number
from rljob_trainer.telemetry.writers import read_metrics

CURVE_FILE: Final = "reward.png"


@dataclass(frozen=True)
class Series:
    """A curve over steps."""

    steps: list[int]
    values: list[float]

    @property
    def span(self) -> str:
        """`first -> last`."""
        if not self.values:
            return "n/a"
        return f"{format_number(self.values[0])} -> {format_number(self.values[-1])}"


def read_series(rows: list[dict[str, Any]], key: str) -> Series:
    """The finite values of `key` by step."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return Series([step for step, _ in points], [value for _, value in points])


def draw_reward_curve(training: Series, evaluation: Series, path: Path, *, title: str) -> None:
    """Writes a PNG with the training and the held-out reward. Uses no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(training.steps, training.values, color="tab:blue", alpha=0.8, label="training samples")
    axes.plot(evaluation.steps, evaluation.values, color="tab:orange", marker="o", label="held-out prompts")
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path)


def write_summary(
    directory: Path, *, name: str, seconds: float, checkpoint_path: str | None, export_path: str | None = None
) -> str:
    """Draws the curve and returns the closing lines. `metrics.jsonl` rows carry `reward_mean` and `num_tokens` for
    steps, `evaluation_reward_mean` for evaluations."""
    rows = read_metrics(directory)
    training = read_series(rows, "reward_mean")
    evaluation = read_series(rows, "evaluation_reward_mean")
    step_seconds = sum(read_series(rows, "step_seconds").values)
    num_tokens = sum(read_series(rows, "num_tokens").values)
    lines = [
        f"Finished {name}: {training.steps[-1] if training.steps else 0} steps in {format_duration(seconds)}",
        f"  held-out reward   {evaluation.span}",
        f"  training reward   {training.span}",
    ]
    if step_seconds > 0:
        lines.append(f"  throughput        {num_tokens / step_seconds:,.0f} tokens/s")
    if checkpoint_path is not None:
        lines.append(f"  checkpoint        {checkpoint_path}")
    if export_path is not None:
        lines.append(f"  exported model    {export_path}")
    if training.values or evaluation.values:
        curve = directory / CURVE_FILE
        draw_reward_curve(training, evaluation, curve, title=f"{name}: mean reward")
        lines.append(f"  reward curve      {curve}")
    return "\n".join(lines)
