"""What the driver is doing, shared between the loop and the HTTP server; everything outside reads one snapshot."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from rljob_api.contract import Progress, ResolvedJob, TrainerPhase, TrainerState, Verdict
from rljob_api.v1alpha1.status import CheckpointStatus, PhaseSeconds, ProgressStatus
from rljob_trainer.telemetry.statistics import StepStatistics

RECENT_STEPS: Final = 20
"""Steps that the estimate of the completion time looks back on."""

_REPORTED_PHASES: Final = {
    TrainerPhase.ROLLOUT: "rollout",
    TrainerPhase.REWARD: "reward",
    TrainerPhase.TRAIN: "train",
    TrainerPhase.SYNC: "sync",
    TrainerPhase.CHECKPOINT: "checkpoint",
}


@dataclass(frozen=True)
class Snapshot:
    """A consistent copy of the state."""

    progress: Progress
    """The contract's document."""
    last: StepStatistics | None
    """Last finished step."""
    num_tokens_total: int
    """Counter."""
    num_dropped_samples_total: int
    """Counter of this attempt."""
    num_nan_rewards_total: int
    """Counter of this attempt."""
    num_reward_timeouts_total: int
    """Counter of this attempt."""
    num_tracker_failures_total: dict[str, int]
    """Tracker -> counter of this attempt."""
    evaluation_sets: dict[str, dict[str, float]]
    """Validation set -> statistics of its last evaluation."""
    heartbeat_seconds: float
    """Unix time of the last heartbeat."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds in the last finished step."""


class TelemetryState:
    """Thread-safe. Writers are the driver's threads, readers the HTTP server and the metrics collector."""

    def __init__(self, job: ResolvedJob, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds. The calling thread counts as the driver's loop (see `is_driver_alive`)."""
        self._job_uid = job.uid
        self._attempt = job.attempt
        layout = job.layout
        self._num_devices = layout.num_nodes * (layout.ranks_per_node + layout.engine_gpus_per_node)
        self._clock = clock
        self._lock = threading.Lock()
        self._driver = threading.current_thread()
        self._state = TrainerState.STARTING
        self._open_phases: list[TrainerPhase] = []
        self._start_seconds = self._heartbeat_seconds = self._switch_seconds = clock()
        self._total_steps: int | None = None
        self._resumed_from_step: int | None = None
        self._checkpoint: CheckpointStatus | None = None
        self._verdict: Verdict | None = None
        self._last: StepStatistics | None = None
        self._step = 0
        self._evaluation_reward_mean: float | None = None
        self._phase_seconds: dict[TrainerPhase, float] = {}
        self._last_phase_seconds: dict[TrainerPhase, float] = {}
        self._step_end_seconds: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._num_tokens_total = 0
        self._num_dropped_samples_total = 0
        self._num_nan_rewards_total = 0
        self._num_reward_timeouts_total = 0
        self._num_tracker_failures_total: dict[str, int] = {}
        self._evaluation_sets: dict[str, dict[str, float]] = {}

    def heartbeat(self) -> None:
        """A sign of progress inside the phase: finished samples, a micro-batch, a written shard."""
        with self._lock:
            self._heartbeat_seconds = self._clock()

    @contextlib.contextmanager
    def phase(self, phase: TrainerPhase) -> Iterator[None]:
        """The driver is in `phase`; its wall time is added to the step's. Phases may nest: time of an inner one is not
        counted in the outer one. Called from the driver's loop only."""
        with self._lock:
            self._switch_phase()
            self._open_phases.append(phase)
        try:
            yield
        finally:
            with self._lock:
                self._switch_phase()
                self._open_phases.pop()

    def _switch_phase(self) -> None:
        """Book the time since the last switch to the phase that was on top; a switch is a sign of progress."""
        now = self._clock()
        if self._open_phases:
            phase = self._open_phases[-1]
            self._phase_seconds[phase] = self._phase_seconds.get(phase, 0.0) + now - self._switch_seconds
        self._switch_seconds = self._heartbeat_seconds = now

    def start_training(
        self,
        *,
        total_steps: int,
        step: int = 0,
        resumed_from_step: int | None = None,
        checkpoint: CheckpointStatus | None = None,
    ) -> None:
        """Set-up is over; `step` is the last finished step (0, or that of the checkpoint)."""
        with self._lock:
            self._state = TrainerState.RUNNING
            self._total_steps = total_steps
            self._step = step
            self._resumed_from_step = resumed_from_step
            self._checkpoint = checkpoint
            self._step_end_seconds.append(self._clock())
            self._heartbeat_seconds = self._clock()

    def finish_step(self, statistics: StepStatistics) -> None:
        """A step is done; its phase times are closed and published with it."""
        with self._lock:
            now = self._clock()
            self._last = statistics
            self._step = statistics.step
            self._last_phase_seconds, self._phase_seconds = self._phase_seconds, {}
            self._num_tokens_total = (
                self._num_tokens_total + statistics.num_tokens
                if statistics.num_tokens_total is None
                else statistics.num_tokens_total
            )
            self._num_dropped_samples_total += statistics.num_dropped_samples
            self._num_nan_rewards_total += statistics.num_nan_rewards
            self._num_reward_timeouts_total += statistics.num_reward_timeouts
            self._step_end_seconds.append(now)
            self._heartbeat_seconds = now

    def record_evaluation(
        self, reward_mean: float | None, sets: Mapping[str, Mapping[str, float | None]] | None = None
    ) -> None:
        """Mean reward of a held-out evaluation, and statistics by validation set."""
        with self._lock:
            self._evaluation_reward_mean = reward_mean
            self._evaluation_sets = {
                name: {key: math.nan if value is None else value for key, value in statistics.items()}
                for name, statistics in (sets or {}).items()
            }
            self._heartbeat_seconds = self._clock()

    def count_tracker_failure(self, tracker: str) -> None:
        """A tracker did not take what it was given."""
        with self._lock:
            self._num_tracker_failures_total[tracker] = self._num_tracker_failures_total.get(tracker, 0) + 1

    def record_checkpoint(self, checkpoint: CheckpointStatus) -> None:
        """A checkpoint was published."""
        with self._lock:
            self._checkpoint = checkpoint
            self._heartbeat_seconds = self._clock()

    def set_state(self, state: TrainerState) -> None:
        """Move the driver's state."""
        with self._lock:
            self._state = state

    def set_verdict(self, verdict: Verdict, state: TrainerState) -> None:
        """The outcome is known; `state` is Succeeded, Stopped or Failed."""
        with self._lock:
            self._verdict = verdict
            self._state = state
            if state is TrainerState.SUCCEEDED:
                self._open_phases = [TrainerPhase.DONE]

    @property
    def is_driver_alive(self) -> bool:
        """Whether the thread that made this object still runs: the server's own thread outlives a dead loop."""
        return self._driver.is_alive()

    @property
    def last_phase_seconds(self) -> dict[str, float]:
        """Phase -> seconds of the last finished step."""
        with self._lock:
            return {phase.value: seconds for phase, seconds in self._last_phase_seconds.items()}

    def build_progress(self) -> Progress:
        """The document of `GET /v1/progress`."""
        return self.take_snapshot().progress

    def estimate_seconds_left(self) -> float | None:
        """From the wall time between recent step ends, evaluations and checkpoints included; None before the first."""
        with self._lock:
            return self._estimate_seconds_left()

    def take_snapshot(self) -> Snapshot:
        """A consistent copy."""
        with self._lock:
            return Snapshot(
                progress=self._build_progress(),
                last=self._last,
                num_tokens_total=self._num_tokens_total,
                num_dropped_samples_total=self._num_dropped_samples_total,
                num_nan_rewards_total=self._num_nan_rewards_total,
                num_reward_timeouts_total=self._num_reward_timeouts_total,
                num_tracker_failures_total=dict(self._num_tracker_failures_total),
                evaluation_sets=dict(self._evaluation_sets),
                heartbeat_seconds=self._heartbeat_seconds,
                phase_seconds={phase.value: seconds for phase, seconds in self._last_phase_seconds.items()},
            )

    def _estimate_seconds_left(self) -> float | None:
        if self._total_steps is None or len(self._step_end_seconds) < 2:
            return None
        ends = list(self._step_end_seconds)
        step_seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        return step_seconds * max(0, self._total_steps - self._step)

    def _build_progress(self) -> Progress:
        last = self._last
        seconds_left = self._estimate_seconds_left()
        tokens_per_second = last.num_tokens / last.step_seconds if last and last.step_seconds > 0 else None
        progress = ProgressStatus(
            step=self._step,
            total_steps=self._total_steps,
            epoch=last.epoch if last else None,
            reward_mean=last.reward_mean if last else None,
            evaluation_reward_mean=self._evaluation_reward_mean,
            kl_mean=last.kl_mean if last else None,
            entropy=last.entropy if last else None,
            response_tokens_mean=last.response_tokens_mean if last else None,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_gpu=None if tokens_per_second is None else tokens_per_second / self._num_devices,
            step_seconds=last.step_seconds if last else None,
            phase_seconds=PhaseSeconds(
                **{
                    name: self._last_phase_seconds[phase]
                    for phase, name in _REPORTED_PHASES.items()
                    if phase in self._last_phase_seconds
                }
            )
            if last
            else None,
            weight_version=last.weight_version if last else None,
            estimated_completion_time=None if seconds_left is None else format_time(self._clock() + seconds_left),
            updated_time=format_time(self._clock()),
        )
        return Progress(
            job_uid=self._job_uid,
            attempt=self._attempt,
            state=self._state,
            phase=self._open_phases[-1] if self._open_phases else TrainerPhase.SETUP,
            heartbeat_time=format_time(self._heartbeat_seconds),
            start_time=format_time(self._start_seconds),
            resumed_from_step=self._resumed_from_step,
            progress=progress,
            checkpoint=self._checkpoint,
            verdict=self._verdict,
        )


def format_time(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, the form of all Kubernetes times."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> float:
    """Unix seconds of an RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()
