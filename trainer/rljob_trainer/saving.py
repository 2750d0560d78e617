"""Checkpoints behind the training's back: the driver's side of `StateWriter`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray

from rljob_api.contract import ResolvedJob
from rljob_trainer.checkpoint import files
from rljob_trainer.checkpoint.state import WRITE_TIMEOUT_SECONDS
from rljob_trainer.distributed.cluster import CHECKPOINT_GROUP, Cluster
from rljob_trainer.distributed.waiting import Actor, wait_for_all
from rljob_trainer.errors import CheckpointError, TrainerError

SNAPSHOT_TIMEOUT_SECONDS: Final = 600.0
SETTLE_SECONDS: Final = 60.0
"""How long a run that failed otherwise waits for a checkpoint that is nearly written."""


@dataclass(frozen=True)
class PendingSave:
    """A snapshot that the ranks are writing."""

    step: int
    temporary: Path
    trainer_state: dict[str, Any]
    references: dict[Any, Actor]
    """Each rank's files, once written -> the rank."""
    started: float
    """Monotonic seconds."""


class CheckpointSaver:
    """Starts one save at a time and publishes it when every rank's files are complete.

    The training waits for the copy to host memory only. What goes wrong later surfaces in `collect`, which the loop
    calls after each step, so a run never trains on for long with storage that is full.
    """

    def __init__(
        self,
        job: ResolvedJob,
        cluster: Cluster,
        *,
        heartbeat: Callable[[], None],
        note: Callable[[str], None],
        on_published: Callable[[files.Checkpoint], None],
    ) -> None:
        self._directory = Path(job.paths.run_directory)
        self._world_size = job.layout.world_size
        self._keep_last = job.spec.checkpoint.keep_last
        self._cluster = cluster
        self._heartbeat, self._note, self._on_published = heartbeat, note, on_published
        self._pending: PendingSave | None = None
        self._num_bytes_seen = 0

    def start(self, step: int, trainer_state: dict[str, Any]) -> None:
        """Snapshot the ranks' state; a save that is still being written is waited for first.

        Raises:
            CheckpointError: the storage is full or not writable, now or in the last save.
        """
        if self._pending is not None:
            self._note(f"checkpoint of step {step}: waiting until that of step {self._pending.step} is written")
            self.wait()
        files.check_free_space(self._directory)
        temporary = files.begin(self._directory, step)
        try:
            self._cluster.call_ranks(
                "start_save",
                [(str(temporary),)] * len(self._cluster.ranks),
                timeout_seconds=SNAPSHOT_TIMEOUT_SECONDS,
            )
        except Exception:
            files.discard(temporary)
            raise
        references = {
            actor.handle.finish_save.options(concurrency_group=CHECKPOINT_GROUP).remote(): actor
            for actor in self._cluster.ranks
        }
        self._num_bytes_seen = 0
        self._pending = PendingSave(step, temporary, trainer_state, references, time.monotonic())

    def collect(self) -> None:
        """Publish the pending save if it is complete; never waits.

        Raises:
            CheckpointError: it failed; the last good checkpoint stands. TransientError: a rank is gone or late.
        """
        if self._pending is None:
            return
        references = list(self._pending.references)
        ready, unfinished = ray.wait(references, num_returns=len(references), timeout=0)
        late = time.monotonic() - self._pending.started > WRITE_TIMEOUT_SECONDS
        if unfinished and not late:
            # A rank that failed says so before the others are done.
            self._wait_for(ready, WRITE_TIMEOUT_SECONDS, unfinished)
            return
        self._finish(0.0 if late else WRITE_TIMEOUT_SECONDS)

    def wait(self) -> None:
        """Publish the pending save, if there is one.

        Raises:
            CheckpointError, TransientError: as `collect`.
        """
        if self._pending is not None:
            self._finish(WRITE_TIMEOUT_SECONDS)

    def settle(self) -> None:
        """The run failed: publish what was nearly written, but let nothing hide the failure."""
        if self._pending is None:
            return
        step, temporary = self._pending.step, self._pending.temporary
        try:
            self._finish(SETTLE_SECONDS)
        except (TrainerError, RuntimeError, OSError) as error:
            files.discard(temporary)
            self._note(f"checkpoint of step {step} was not finished when the run failed: {error}")

    def _finish(self, timeout_seconds: float) -> None:
        assert self._pending is not None
        pending = self._pending
        try:
            per_rank = self._wait_for(list(pending.references), timeout_seconds)
        finally:
            self._pending = None
        checkpoint = files.publish(
            pending.temporary,
            step=pending.step,
            world_size=self._world_size,
            trainer_state=pending.trainer_state,
            records=[record for records in per_rank for record in records],
        )
        self._on_published(checkpoint)
        files.prune(self._directory, self._keep_last, checkpoint.step)

    def _wait_for(self, references: list[Any], timeout_seconds: float, suspects: Sequence[Any] = ()) -> list[Any]:
        assert self._pending is not None
        pending = self._pending
        try:
            return wait_for_all(
                {reference: pending.references[reference] for reference in references},
                timeout_seconds=timeout_seconds,
                what=f"checkpoint of step {pending.step}",
                poll=self._poll_bytes,
                suspects={reference: pending.references[reference] for reference in suspects},
            )
        except CheckpointError:
            self._pending = None
            files.discard(pending.temporary)
            raise

    def _poll_bytes(self) -> None:
        """Bytes that arrived on the storage are progress; a hung file system is none."""
        if self._pending is None:
            return
        num_bytes = files.measure_bytes(self._pending.temporary)
        if num_bytes != self._num_bytes_seen:
            self._num_bytes_seen = num_bytes
            self._heartbeat()
