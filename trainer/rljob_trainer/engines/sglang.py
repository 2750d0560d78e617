"""SGLang as a rollout engine: 0.5.16 and 0.5.23, told apart by what they offer.

A group is sent as one batch of `num_samples` separate requests with equal prompts, not as one request with `n`: for `n`
SGLang first computes the prompt alone, waits, and only then starts the samples. Measured on one H200 (0.5B, 64 prompts
x 8, 256 + 256 tokens): 2.0-2.1 s against 3.2-3.9 s. With prompts much longer than responses it may turn round; SGLang's
prefix cache then still shares what an earlier batch computed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rljob_api.v1alpha1.model import DType
from rljob_trainer.distributed.network import (
    GLOO_VARIABLE,
    find_free_port,
    find_interface,
    is_local_address,
    set_interface,
)
from rljob_trainer.engines.contract import (
    EngineHealth,
    EngineInfo,
    EngineSettings,
    FinishReason,
    GeneratedGroup,
    GenerateRequest,
    LogProbMode,
    MemoryTag,
    PauseMode,
    SamplingParams,
)
from rljob_trainer.engines.ledger import WeightLedger, read_parameter_shapes
from rljob_trainer.engines.sglang_arguments import (
    GPUMemory,
    build_arguments,
    check_positions,
    choose_loopback,
    plan_environment,
)
from rljob_trainer.engines.sglang_buckets import LOAD_FORMAT, serialize_buckets
from rljob_trainer.engines.sglang_process import POLL_SECONDS, EngineProcesses, without_detokenizer
from rljob_trainer.engines.sglang_samples import build_sampling_params, read_sample
from rljob_trainer.engines.sglang_weights import compute_engine_checksum
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.policy import TORCH_DTYPES, load_config
from rljob_trainer.sync.buckets import Bucket

START_SECONDS: Final = 900.0
CALL_SECONDS: Final = 120.0
FLUSH_SECONDS: Final = 30.0
FLUSH_RETRY_SECONDS: Final = 0.05
ABORT_RETRY_SECONDS: Final = 1.0

log = logging.getLogger(__name__)


class SGLangEngine:
    """`EngineAdapter` over `sglang.srt.entrypoints.engine.Engine`, whose schedulers are processes of their own."""

    def __init__(self) -> None:
        self._processes: EngineProcesses | None = None
        self._settings: EngineSettings | None = None
        self._ledger: WeightLedger | None = None
        self._updating_to = ""
        self._has_update_session = False
        self._generating = threading.Lock()
        self._aborting = threading.Event()
        self._is_paused = False
        self._num_running = 0
        self._num_tokens_generated = 0
        self._offloaded: set[MemoryTag] = set()

    def probe(self) -> EngineInfo:
        """Version of the installed package.

        Raises:
            ConfigurationError: SGLang is not installed.
        """
        try:
            version = importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigurationError(
                "spec.rollout.engine: SGLang is not installed in this environment; use an image of the catalogue with "
                "SGLang, build one with requirements/engines/build.sh sglang-0.5.23-cpu, or set engine: Native"
            ) from error
        return EngineInfo("SGLang", version, LogProbMode.TEMPERED, (PauseMode.KEEP,))

    def start(self, settings: EngineSettings) -> None:
        """Start the schedulers and load the model. For a replica over several nodes, call it on all of them at once.

        Raises:
            ConfigurationError: SGLang is missing or refuses an argument. EngineDied: a scheduler ended.
        """
        version = self.probe().version
        change = plan_environment(
            version,
            settings,
            os.environ,
            os.sched_getaffinity(0),
            has_ipv4_loopback=is_local_address("127.0.0.1"),
        )
        for warning in change.warnings:
            log.warning("SGLang engine: %s", warning)
        for name in change.removed:
            del os.environ[name]
        os.environ.update(change.assigned)
        if settings.rendezvous is not None and settings.host is not None and GLOO_VARIABLE not in os.environ:
            # By itself gloo takes what the host name resolves to, which need not be where the other nodes look.
            set_interface(find_interface(settings.host))
        if settings.device == "cpu":
            import torch.multiprocessing

            # By name, not by descriptor: a rank on another "node" is no child of this process and gets no descriptors.
            torch.multiprocessing.set_sharing_strategy("file_system")
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils.hf_transformers_utils import get_context_length

        config = load_config(settings.model_source, settings.model_revision)
        check_positions(settings.max_sequence_tokens, get_context_length(config.get_text_config()))
        arguments = build_arguments(
            settings,
            list_argument_names(ServerArgs),
            nccl_port=find_free_port(choose_loopback(settings.host)),
            cards=read_gpu_memory(settings) if settings.device == "cuda" else (),
        )
        self._settings = settings
        self._ledger = WeightLedger(
            "SGLang engine",
            read_parameter_shapes(settings.model_source, settings.model_revision),
            TORCH_DTYPES[DType(settings.dtype)],
        )
        build = functools.partial(without_detokenizer(Engine), **arguments)
        self._processes = EngineProcesses(build, timeout_seconds=START_SECONDS)

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        """Groups as they finish. All are handed over at once: SGLang keeps `max_running_requests` busy."""
        processes = self._require_first_node()
        if self._offloaded:
            raise EngineDied(
                f"SGLang engine: generate while {', '.join(sorted(self._offloaded))} are offloaded; call onload first"
            )
        stop_ids = self._require_settings().stop_token_ids
        with self._generating:
            self._aborting.clear()
            finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
            open_requests: dict[Any, GenerateRequest] = {}
            for request in requests:
                future = processes.submit(self._generate_group(request, params))
                open_requests[future] = request
                self._num_running += request.num_samples
            for future in open_requests:
                future.add_done_callback(finished.put)
            abort_time = 0.0
            try:
                while open_requests:
                    try:
                        future = finished.get(timeout=POLL_SECONDS)
                    except queue.Empty:
                        processes.check_alive()
                        # Again and again: a request on its way to the scheduler misses the first one.
                        if self._aborting.is_set() and time.monotonic() > abort_time:
                            abort_time = time.monotonic() + ABORT_RETRY_SECONDS
                            self._send_abort(processes)
                        continue
                    request = open_requests.pop(future)
                    outputs = processes.wait(future, what=f"generate {request.uid}", timeout_seconds=CALL_SECONDS)
                    samples = [read_sample(output, request, stop_ids, params.max_tokens) for output in outputs]
                    if not self._aborting.is_set() and any(
                        sample.finish_reason is FinishReason.ABORT for sample in samples
                    ):
                        reasons = [output["meta_info"]["finish_reason"] for output in outputs]
                        raise EngineDied(f"SGLang engine: gave up samples of {request.uid} by itself: {reasons}")
                    self._num_running -= request.num_samples
                    self._num_tokens_generated += sum(len(sample.token_ids) for sample in samples)
                    yield GeneratedGroup(request.uid, samples)
            finally:
                self._num_running = 0
                if open_requests:
                    self._send_abort(processes)

    async def _generate_group(self, request: GenerateRequest, params: SamplingParams) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = await self._require_first_node().engine.async_generate(
            input_ids=[request.prompt_ids] * request.num_samples,
            sampling_params=build_sampling_params(request, params, self._require_settings().stop_token_ids),
            return_logprob=True,
        )
        return outputs

    def abort_all(self) -> None:
        """Without a running `generate` it does nothing."""
        if self._generating.locked():
            self._aborting.set()
            processes = self._require_first_node()
            if self._is_paused:
                self.resume()
            self._send_abort(processes)

    def _send_abort(self, processes: EngineProcesses) -> None:
        async def abort() -> None:
            processes.engine.tokenizer_manager.abort_request(abort_all=True)

        processes.submit(abort())

    def pause(self, mode: PauseMode) -> None:
        """Requests stay in the batch with their KV cache (`in_place`)."""
        if mode is not PauseMode.KEEP:
            raise ConfigurationError(
                f"SGLang engine: pause mode {mode!r} is not supported; use {PauseMode.KEEP.value!r}"
            )
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._call("pause_generation", PauseGenerationReqInput(mode="in_place"))
        self._is_paused = True

    def resume(self) -> None:
        """Idempotent."""
        if not self._is_paused:
            return
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._call("continue_generation", ContinueGenerationReqInput(torch_empty_cache=False))
        self._is_paused = False

    def begin_update(self, version: int) -> None:
        """Refused while generating, while weights are offloaded, or for a version that does not grow."""
        manager = self._require_first_node().engine.tokenizer_manager
        if self._generating.locked():
            raise EngineDied("SGLang engine: weight update while samples run; let generate finish or abort_all first")
        if MemoryTag.WEIGHTS in self._offloaded:
            raise EngineDied("SGLang engine: weight update while weights are offloaded; call onload first")
        self._require_ledger().begin(version)
        self._updating_to = str(version)
        self._flush()
        # 0.5.23 takes weights only inside a session; 0.5.16 has none.
        if hasattr(manager, "begin_weight_update") and not self._has_update_session:
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            self._call_checked("begin_weight_update", BeginWeightUpdateReqInput())
            self._has_update_session = True

    def update(self, buckets: Sequence[Bucket]) -> None:
        """One flattened bucket, for each rank. SGLang passes over names it does not know, so they are checked here."""
        settings, ledger = self._require_settings(), self._require_ledger()
        if not buckets:
            raise EngineDied("SGLang engine: update without a bucket")
        ledger.receive(buckets[0].entries)
        if any(bucket.entries != buckets[0].entries for bucket in buckets[1:]):
            raise EngineDied("SGLang engine: the ranks' weight buckets hold different tensors")
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        payloads, kept = serialize_buckets(buckets, settings.tensor_parallel_size)
        # Never flushed here: 0.5.16 ends its scheduler when a flush fails.
        self._call_checked(
            "update_weights_from_tensor",
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads,
                load_format=LOAD_FORMAT,
                flush_cache=False,
                weight_version=self._updating_to,
            ),
        )
        del kept

    def end_update(self) -> int:
        """The new version, once every parameter arrived."""
        ledger = self._require_ledger()
        ledger.check_complete()
        if self._has_update_session:
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            self._call_checked("end_weight_update", EndWeightUpdateReqInput())
            self._has_update_session = False
        self._flush()
        return ledger.commit()

    def checksum(self) -> int:
        """Over the parameters as Hugging Face names them. Writes the weights to a temporary directory: for tests."""
        self._require_first_node()
        return compute_engine_checksum(self._processes, self._require_settings())

    def offload(self, tags: Sequence[MemoryTag]) -> None:
        """Release device memory by tag. Refused while samples run: SGLang's scheduler would end."""
        processes = self._require_started()
        if self._generating.locked():
            raise EngineDied("SGLang engine: offload while samples run; let generate finish or abort_all first")
        new = [tag for tag in MemoryTag if tag in tags and tag not in self._offloaded]
        if not new:
            return
        if self._has_memory_saver(processes):
            from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

            self._flush()
            self._call("release_memory_occupation", ReleaseMemoryOccupationReqInput(tags=[tag.value for tag in new]))
        self._offloaded.update(new)

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        """Map memory back. Weights hold garbage until the next update."""
        processes = self._require_started()
        # A tag that is not offloaded ends SGLang's scheduler with a KeyError.
        new = [tag for tag in MemoryTag if tag in tags and tag in self._offloaded]
        if not new:
            return
        if self._has_memory_saver(processes):
            from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

            self._call("resume_memory_occupation", ResumeMemoryOccupationReqInput(tags=[tag.value for tag in new]))
        self._offloaded.difference_update(new)

    def health(self) -> EngineHealth:
        """Counters; also whether every process of the engine is there.

        Raises:
            EngineDied: one is gone.
        """
        self._require_started().check_alive()
        return EngineHealth(
            weight_version=0 if self._ledger is None else self._ledger.version,
            num_running=self._num_running,
            num_tokens_generated=self._num_tokens_generated,
            is_paused=self._is_paused,
            offloaded=tuple(sorted(self._offloaded, key=lambda tag: tag.value)),
        )

    def stop(self) -> None:
        """End the engine's processes."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.stop()

    def _has_memory_saver(self, processes: EngineProcesses) -> bool:
        return self._require_settings().device == "cuda" and processes.engine.tokenizer_manager is not None

    def _flush(self) -> None:
        """Drop cached prefixes; they belong to the old weights.

        Raises:
            EngineDied: requests still run after the deadline.
        """
        if MemoryTag.KV_CACHE in self._offloaded:
            return  # releasing it flushed it, and its memory is not mapped now
        deadline = time.monotonic() + FLUSH_SECONDS
        # The last batch may not be drained yet when its samples are already here (overlapped scheduling).
        while not self._call("flush_cache").success:
            if time.monotonic() > deadline:
                raise EngineDied(f"SGLang engine: requests still run {FLUSH_SECONDS:.0f} s after the last sample")
            time.sleep(FLUSH_RETRY_SECONDS)

    def _call(self, method: str, *arguments: Any) -> Any:
        processes = self._require_first_node()
        call = getattr(processes.engine.tokenizer_manager, method)(*arguments)
        return processes.call(call, what=method, timeout_seconds=CALL_SECONDS)

    def _call_checked(self, method: str, argument: Any) -> None:
        """For the calls that answer `(success, message)` and never raise."""
        success, message = self._call(method, argument)
        if not success:
            raise EngineDied(f"SGLang engine: {method} failed: {message}")

    def _require_started(self) -> EngineProcesses:
        if self._processes is None:
            raise EngineDied("SGLang engine: not started")
        return self._processes

    def _require_first_node(self) -> EngineProcesses:
        processes = self._require_started()
        if processes.engine.tokenizer_manager is None:
            raise EngineDied(
                f"SGLang engine: node {self._require_settings().node_rank} of this replica only lends its GPUs; ask "
                "node 0"
            )
        return processes

    def _require_settings(self) -> EngineSettings:
        if self._settings is None:
            raise EngineDied("SGLang engine: not started")
        return self._settings

    def _require_ledger(self) -> WeightLedger:
        if self._ledger is None:
            raise EngineDied("SGLang engine: not started")
        return self._ledger


def list_argument_names(server_args: Any) -> set[str]:
    """Fields of `ServerArgs`: a dataclass in 0.5.16, assembled from namespaces in 0.5.23."""
    return {name for part in server_args.__mro__ for name in getattr(part, "__annotations__", {})} | set(
        getattr(server_args, "__struct_fields__", ())
    )


def read_gpu_memory(settings: EngineSettings) -> list[GPUMemory]:
    """Of the GPUs this replica uses on this node. NVML, since CUDA would take half a gibibyte for a context.

    Raises:
        ConfigurationError: NVML does not know one of them.
    """
    try:
        import pynvml
    except ImportError:
        log.warning("SGLang engine: nvidia-ml-py is not installed, so memoryFraction is of the free memory, not of all")
        return []
    visible = settings.visible_devices or tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    count = settings.tensor_parallel_size // settings.num_nodes
    names = (visible or tuple(str(index) for index in range(count)))[:count]
    cards: list[GPUMemory] = []
    pynvml.nvmlInit()
    try:
        for name in names:
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            cards.append(GPUMemory(int(memory.free), int(memory.total)))
    except pynvml.NVMLError as error:
        raise ConfigurationError(f"SGLang engine: GPU {name} of {', '.join(names)} cannot be read: {error}") from error
    finally:
        pynvml.nvmlShutdown()
    return cards
