"""One engine adapter in its own actor process."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from rljob_api.v1alpha1.rollout import Engine
from rljob_trainer.distributed.location import ActorLocation, locate_this_actor
from rljob_trainer.distributed.network import find_free_port
from rljob_trainer.engines.contract import (
    EngineAdapter,
    EngineHealth,
    EngineInfo,
    EngineSettings,
    GeneratedGroup,
    GenerateRequest,
    MemoryTag,
    SamplingParams,
)
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.quiet import quiet_libraries
from rljob_trainer.stacks import format_stacks
from rljob_trainer.sync.buckets import Bucket

WATCH_SECONDS: Final = 1.0
ADAPTERS: Final[dict[Engine, str]] = {
    Engine.NATIVE: "rljob_trainer.engines.native:NativeEngine",
    Engine.SGLANG: "rljob_trainer.engines.sglang:SGLangEngine",
    Engine.VLLM: "rljob_trainer.engines.vllm:VLLMEngine",
}
"""`module:class`, imported where it runs: engines are not installed together."""


def create_adapter(engine: Engine) -> EngineAdapter:
    """A new adapter, not started.

    Raises:
        ConfigurationError: this trainer has none for the engine.
    """
    if engine not in ADAPTERS:
        raise ConfigurationError(
            f"spec.rollout.engine: {engine} has no adapter in this trainer; use {', '.join(ADAPTERS)}"
        )
    module, _, name = ADAPTERS[engine].partition(":")
    adapter: EngineAdapter = getattr(importlib.import_module(module), name)()
    return adapter


class EngineActor:
    """Forwards to the adapter; `generate` streams groups as they finish."""

    def __init__(self, engine: Engine) -> None:
        quiet_libraries()
        self._adapter = create_adapter(engine)
        self._stopping = threading.Event()

    def locate(self) -> ActorLocation:
        """Where this actor runs."""
        return locate_this_actor()

    def start(self, settings: EngineSettings) -> EngineInfo:
        """Load the model on the devices of the replica's ranks."""
        if settings.visible_devices is not None:
            # Ray gave this actor no GPU; nothing here has touched CUDA yet.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.visible_devices)
        self._adapter.start(settings)
        return self._adapter.probe()

    def find_port(self, host: str) -> int:
        """A port that is free on this node now."""
        return find_free_port(host)

    def watch(self) -> None:
        """For the nodes of a replica that are not asked to generate: returns when the engine is stopped.

        Raises:
            EngineDied: the engine ended by itself.
        """
        while not self._stopping.wait(timeout=WATCH_SECONDS):
            self._adapter.health()

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        """Stream of finished groups."""
        yield from self._adapter.generate(requests, params)

    def begin_update(self, version: int) -> None:
        """See the contract. Weights that were offloaded get their memory back first: it is what the update fills."""
        self._adapter.onload([MemoryTag.WEIGHTS])
        self._adapter.begin_update(version)

    def update(self, *buckets: Bucket) -> None:
        """One bucket for all ranks of the replica, or one per rank; mapped from the object store without a copy."""
        self._adapter.update(buckets)

    def end_update(self) -> int:
        """The new version; then the KV cache gets its memory back, when transfer buffers are gone."""
        version = self._adapter.end_update()
        self._adapter.onload([MemoryTag.KV_CACHE])
        return version

    def checksum(self) -> int:
        """See the contract."""
        return self._adapter.checksum()

    def offload(self, tags: Sequence[MemoryTag]) -> None:
        """See the contract."""
        self._adapter.offload(tags)

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        """See the contract."""
        self._adapter.onload(tags)

    def abort_all(self) -> None:
        """Callable while `generate` runs."""
        self._adapter.abort_all()

    def health(self) -> EngineHealth:
        """Callable while `generate` runs."""
        return self._adapter.health()

    def format_stacks(self) -> str:
        """Where this process is (not those that the engine started). Callable while `generate` runs."""
        return format_stacks()

    def stop(self) -> None:
        """Free everything."""
        self._stopping.set()
        self._adapter.stop()
