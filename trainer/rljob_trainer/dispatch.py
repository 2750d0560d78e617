"""What the loop asks of all ranks and engines together: log-probabilities, updates, weight sync, checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from rljob_api.contract import ResolvedJob
from rljob_trainer.batching import BatchPlan, plan_batches
from rljob_trainer.distributed.cluster import CONTROL_GROUP, Cluster
from rljob_trainer.distributed.waiting import Actor, iterate_streams, wait_for_all
from rljob_trainer.distributed.weight_sources import WeightSource
from rljob_trainer.engines.contract import MemoryTag
from rljob_trainer.errors import EngineDied
from rljob_trainer.memory_plan import GIB
from rljob_trainer.rows import FloatArray, MiniBatch, TrainRow, UpdateMetrics, ValueMetrics, count_trainable, split_rows

STORAGE_TIMEOUT_SECONDS: Final = 3600.0
ENGINE_CALL_SECONDS: Final = 300.0
BUCKETS_IN_FLIGHT: Final = 2


class Dispatcher:
    """Cuts rows over ranks and micro-batches, and waits with deadlines. Holds no training state."""

    def __init__(self, job: ResolvedJob, cluster: Cluster, heartbeat: Callable[[], None]) -> None:
        self._job = job
        self._cluster = cluster
        self._heartbeat = heartbeat
        self._collective_seconds = float(job.spec.training.collective_timeout_seconds)
        self._ranks_per_share = job.spec.training.sequence_parallel_size
        """Neighbouring ranks that work on the same rows."""
        self._probe: Any = None
        self._progress_seen = -1
        self._offloads_engine: bool | None = None

    def compute_log_probs(
        self, rows: Sequence[TrainRow], *, reference: bool, with_sum_pi_squared: bool = False
    ) -> list[FloatArray]:
        """Per row, under the current policy or the reference; (2, tokens) with sums of squared probabilities."""
        return self._compute_per_row(
            "compute_log_probs", rows, reference=reference, with_sum_pi_squared=with_sum_pi_squared
        )

    def compute_values(self, rows: Sequence[TrainRow]) -> list[FloatArray]:
        """Per row, under the critic."""
        return self._compute_per_row("compute_values", rows)

    def _compute_per_row(self, method: str, rows: Sequence[TrainRow], **keywords: Any) -> list[FloatArray]:
        plan = self._plan(rows)
        results = self._cluster.call_ranks(
            method,
            self._spread([(micro_batches,) for micro_batches in split_rows(rows, plan)]),
            timeout_seconds=self._deadline(plan),
            poll=self._poll_progress,
            **keywords,
        )
        by_row: dict[int, FloatArray] = {}
        for rank_rows, rank_values in zip(plan.rows, results[:: self._ranks_per_share], strict=True):
            for micro_rows, micro_values in zip(rank_rows, rank_values, strict=True):
                by_row.update(zip(micro_rows, micro_values, strict=True))
        return [by_row[index] for index in range(len(rows))]

    def update(
        self,
        rows: Sequence[TrainRow],
        *,
        learning_rate: float,
        kl_coefficient: float = 0.0,
        is_supervised: bool = False,
    ) -> UpdateMetrics:
        """One optimizer update on all rows; the result does not depend on ranks or micro-batches."""
        plan = self._plan(rows)
        num_tokens, num_sequences = count_trainable(rows)
        batches = [
            (MiniBatch(micro_batches, num_tokens, num_sequences, learning_rate, kl_coefficient, is_supervised),)
            for micro_batches in split_rows(rows, plan)
        ]
        metrics: list[UpdateMetrics] = self._cluster.call_ranks(
            "update", self._spread(batches), timeout_seconds=self._deadline(plan), poll=self._poll_progress
        )
        return metrics[0]

    def update_critic(self, rows: Sequence[TrainRow], *, learning_rate: float) -> ValueMetrics:
        """One optimizer update of the critic on all rows."""
        plan = self._plan(rows)
        num_tokens, num_sequences = count_trainable(rows)
        batches = [
            (MiniBatch(micro_batches, num_tokens, num_sequences, learning_rate),)
            for micro_batches in split_rows(rows, plan)
        ]
        metrics: list[ValueMetrics] = self._cluster.call_ranks(
            "update_critic", self._spread(batches), timeout_seconds=self._deadline(plan), poll=self._poll_progress
        )
        return metrics[0]

    def make_room(self) -> None:
        """Before a training phase: where the memory plan says that engine and trainer take turns, the engines leave
        the GPUs. Returns when all have, and notes what each rank found free: a card that is fuller than the others
        shows here, not as the engine's complaint about unbalanced memory."""
        if not self._takes_turns():
            return
        tags = [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]
        self._cluster.call_engines("offload", tags, timeout_seconds=ENGINE_CALL_SECONDS)
        free = self._cluster.call_ranks("get_free_bytes", timeout_seconds=ENGINE_CALL_SECONDS)
        print("free GPU memory for training: " + ", ".join(f"{value / GIB:.1f} GiB" for value in free), flush=True)

    def _takes_turns(self) -> bool:
        if self._offloads_engine is None:
            self._offloads_engine = any(self._cluster.call_ranks("plans_turns", timeout_seconds=ENGINE_CALL_SECONDS))
        return self._offloads_engine

    def sync_weights(self, version: int, *, bucket_bytes: int | None = None) -> None:
        """Stream buckets from the ranks to the engines, then switch versions.

        On GPUs each tensor parallel rank of an engine takes a copy that a rank of its node has put on its card
        (`distributed.weight_sources`); on CPUs the first rank of a node gives one for all engines there.

        Args:
            version: of the weights.
            bucket_bytes: another bucket size than the default.

        Raises:
            EngineDied: an engine refused a bucket or reports another version. TransientError: a rank is lost or late.
        """
        cluster = self._cluster
        if self._takes_turns():
            # What the update left in the allocator's cache is what the engine needs now.
            cluster.call_ranks("release_cached_memory", timeout_seconds=ENGINE_CALL_SECONDS)
            cluster.call_engines("begin_update", version, timeout_seconds=ENGINE_CALL_SECONDS)
        written: list[list[int]] = [[] for _ in cluster.ranks]
        for source in sorted({source for sources in cluster.weight_sources for source in sources}):
            written[source.rank].append(source.device_index)
        streams = {
            rank.handle.stream_weights.options(
                num_returns="streaming", _generator_backpressure_num_objects=BUCKETS_IN_FLIGHT
            ).remote(tuple(devices), bucket_bytes): rank
            for rank, devices in zip(cluster.ranks, written, strict=True)
        }
        if not self._takes_turns():
            # The first gather runs while the engines get ready.
            cluster.call_engines("begin_update", version, timeout_seconds=ENGINE_CALL_SECONDS)
        arrived: list[dict[WeightSource, deque[Any]]] = [
            {source: deque() for source in sources} for sources in cluster.weight_sources
        ]
        numbers = {id(rank): number for number, rank in enumerate(cluster.ranks)}
        num_arrived = [0] * len(cluster.ranks)
        in_flight: dict[int, dict[Any, Actor]] = {}
        for rank, bucket in iterate_streams(
            streams, timeout_seconds=self._collective_seconds, what="weight sync", poll=self._poll_progress
        ):
            number = numbers[id(rank)]
            # A rank streams each bucket once for every card it writes to, in this order.
            source = WeightSource(number, written[number][num_arrived[number] % len(written[number])])
            num_arrived[number] += 1
            for index, queues in enumerate(arrived):
                if source not in queues:
                    continue
                queues[source].append(bucket)
                if not all(queues.values()):
                    continue
                # The previous bucket must have arrived before the next is handed on, so that few exist at a time.
                self._wait_for_engines(in_flight.pop(index, {}))
                buckets = [queue.popleft() for queue in queues.values()]
                engine = cluster.engines[index]
                in_flight[index] = {engine.handle.update.remote(*buckets): engine}
        for acknowledgements in in_flight.values():
            self._wait_for_engines(acknowledgements)
        if any(queue for queues in arrived for queue in queues.values()):
            raise EngineDied("weight sync: the ranks of an engine streamed different numbers of buckets")
        versions = cluster.call_engines("end_update", timeout_seconds=ENGINE_CALL_SECONDS)
        if any(found != version for found in versions):
            raise EngineDied(f"weight sync: engines report versions {versions}, expected {version}")

    def load(self, path: Path) -> None:
        """Load a checkpoint on all ranks."""
        self._cluster.call_ranks(
            "load_checkpoint",
            [(str(path),)] * len(self._cluster.ranks),
            timeout_seconds=STORAGE_TIMEOUT_SECONDS,
            poll=self._poll_progress,
        )

    def setup_reference(self) -> None:
        """Create the reference on all ranks."""
        self._cluster.call_ranks("setup_reference", timeout_seconds=STORAGE_TIMEOUT_SECONDS)

    def setup_critic(self) -> None:
        """Create the critic on all ranks."""
        self._cluster.call_ranks("setup_critic", timeout_seconds=STORAGE_TIMEOUT_SECONDS)

    def reset_optimizer(self) -> None:
        """Forget optimizer moments on all ranks."""
        self._cluster.call_ranks("reset_optimizer", timeout_seconds=self._collective_seconds)

    def allocate_moments(self) -> None:
        """Optimizer moments of all ranks, while the engines leave room: a save before the first update (a stop in the
        first rollout, the critic's warm-up) would allocate them, and gradients, beside the engines."""
        self._cluster.call_ranks("allocate_moments", timeout_seconds=self._collective_seconds)

    def export(self, target: Path) -> None:
        """Write the policy in Hugging Face format."""
        self._cluster.call_ranks(
            "export", [(str(target),)] * len(self._cluster.ranks), timeout_seconds=STORAGE_TIMEOUT_SECONDS
        )

    def _spread(self, shares: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Arguments by share of the rows -> by rank."""
        return [share for share in shares for _ in range(self._ranks_per_share)]

    def _plan(self, rows: Sequence[TrainRow]) -> BatchPlan:
        training, shared = self._job.spec.training, self._ranks_per_share
        budget = training.micro_batch_tokens
        return plan_batches(
            [row.num_tokens for row in rows],
            self._job.layout.world_size // shared,
            # The budget is one rank's; a pack is spread over several.
            micro_batch_tokens=None if budget is None else budget * shared,
            micro_batch_sequences=training.micro_batch_sequences,
        )

    def _deadline(self, plan: BatchPlan) -> float:
        """A rank that is lost shows at once; this bounds one that hangs."""
        return self._collective_seconds * (1 + plan.num_micro_batches)

    def _wait_for_engines(self, references: dict[Any, Actor]) -> None:
        wait_for_all(references, timeout_seconds=ENGINE_CALL_SECONDS, what="weight bucket")

    def _poll_progress(self) -> None:
        """Heartbeat whenever rank 0 has finished another micro-batch: progress, not liveness."""
        if self._probe is None:
            rank_0 = self._cluster.ranks[0].handle
            self._probe = rank_0.count_progress.options(concurrency_group=CONTROL_GROUP).remote()
            return
        ready, _ = ray.wait([self._probe], timeout=0)
        if ready:
            self._probe = None
            try:
                progress = ray.get(ready[0])
            except RayError:
                return  # a dead rank: the wait that polls reports it, by name
            if progress != self._progress_seen:
                self._progress_seen = progress
                self._heartbeat()
