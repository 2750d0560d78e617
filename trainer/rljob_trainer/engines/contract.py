"""What every rollout engine does, in terms of plain data.

One adapter object lives in one actor process (`engines.actor`): when the engine dies, the actor dies, and the driver
sees a typed `EngineDied`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.sync.buckets import Bucket


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """An end-of-sequence id, which is the last token of the response."""
    LENGTH = "length"
    """`max_tokens` reached."""
    ABORT = "abort"
    """`abort_all`: the tokens so far are a partial response."""


class PauseMode(StrEnum):
    """What happens to running requests while paused."""

    KEEP = "keep"
    """They stay where they are and continue after `resume`."""


class MemoryTag(StrEnum):
    """What `offload` moves out of accelerator memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class LogProbMode(StrEnum):
    """Which distribution the returned log-probabilities belong to."""

    TEMPERED = "tempered"
    """softmax(logits / temperature), before top-p: what the trainer recomputes. Greedy requests use temperature 1."""
    TEMPERED_NUCLEUS = "tempered-nucleus"
    """The distribution sampled from: as TEMPERED, but after top-p. The same as TEMPERED without top-p."""


@dataclass(frozen=True)
class EngineInfo:
    """Answer of `probe`."""

    name: str
    version: str
    log_prob_mode: LogProbMode
    pause_modes: tuple[PauseMode, ...]


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine needs to start."""

    model_source: str
    model_revision: str | None
    dtype: str
    """`Float32` or `BFloat16`."""
    device: str
    """`cpu` or `cuda`."""
    stop_token_ids: tuple[int, ...]
    """Every id that ends a response."""
    max_concurrent_samples: int | None = None
    max_sequence_tokens: int = 4096
    """Longest prompt plus longest response."""
    tensor_parallel_size: int = 1
    """Ranks of this replica."""
    num_nodes: int = 1
    """Nodes of this replica; each has `tensor_parallel_size / num_nodes` ranks and an engine actor of its own."""
    node_rank: int = 0
    """Which of them this is. 0 is asked to generate; the others only lend their GPUs."""
    rendezvous: str | None = None
    """`host:port` (IPv6 in brackets) where the nodes of this replica meet; None within one node."""
    host: str | None = None
    """Bare address of this node; None: loopback of IPv4."""
    visible_devices: tuple[str, ...] | None = None
    """GPUs of this node's ranks, in rank order; None: what the process sees."""
    memory_fraction: float = 0.6
    """Share of GPU memory for weights and KV cache; no meaning on CPUs."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    may_sleep: bool = True
    """Whether a trainer on the same GPUs may take turns with it, so that memory must be given back and taken again."""
    num_threads: int | None = None
    """CPU threads of this engine; None leaves the library's default."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen."""

    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and the samples wanted of it."""

    uid: str
    prompt_ids: list[int]
    num_samples: int
    seed: int
    """Job seed; sampling noise is a function of (seed, step, uid, sample, position), not of the batch."""
    step: int


@dataclass(frozen=True)
class GeneratedSample:
    """One response."""

    token_ids: list[int]
    """Without the prompt; ends with the stop id when `finish_reason` is STOP."""
    log_probs: NDArray[np.float32]
    """(len(token_ids),) of the engine's `LogProbMode`."""
    finish_reason: FinishReason
    weight_version: int


@dataclass(frozen=True)
class GeneratedGroup:
    """All samples of one request, in sample order."""

    uid: str
    samples: list[GeneratedSample]


@dataclass(frozen=True)
class EngineHealth:
    """Liveness and progress: a process that answers but generates nothing is visible by its counter."""

    weight_version: int
    num_running: int
    num_tokens_generated: int
    is_paused: bool
    offloaded: tuple[MemoryTag, ...]


class EngineAdapter(Protocol):
    """One rollout engine replica. `generate` runs in one thread; everything else may be called from another."""

    def probe(self) -> EngineInfo:
        """Name, version and abilities of the installed engine; works before `start`."""

    def start(self, settings: EngineSettings) -> None:
        """Load the model; weight version 0."""

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        """Yield each group as soon as all of its samples ended, in any order; every request exactly once."""

    def abort_all(self) -> None:
        """End running samples; `generate` yields what they have with reason ABORT, and the rest empty."""

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding until `resume`."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def begin_update(self, version: int) -> None:
        """Announce new weights. Refused while samples run: half of a response would come from other weights."""

    def update(self, buckets: Sequence[Bucket]) -> None:
        """Take over the tensors in `buckets` (engine dtype)."""

    def end_update(self) -> int:
        """Check that every parameter arrived, drop cached prefixes, and return the new weight version."""

    def checksum(self) -> int:
        """`sync.buckets.combine_checksums` over the parameters the engine holds."""

    def offload(self, tags: Sequence[MemoryTag]) -> None:
        """Free accelerator memory; idempotent."""

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory back; idempotent."""

    def health(self) -> EngineHealth:
        """Answers at once, also while generating."""

    def stop(self) -> None:
        """Free everything; idempotent."""
