"""The built-in engine: batched, KV-cached decoding of a full model copy with transformers (CPU, small models).

Shape legend: P prompts, B samples in flight, L prompt length, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor

from rljob_api.v1alpha1.model import DType
from rljob_trainer.engines.contract import (
    EngineHealth,
    EngineInfo,
    EngineSettings,
    FinishReason,
    GeneratedGroup,
    GeneratedSample,
    GenerateRequest,
    LogProbMode,
    MemoryTag,
    PauseMode,
    SamplingParams,
)
from rljob_trainer.engines.sampling import choose_tokens, draw_sample_noise
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.policy import TORCH_DTYPES, load_causal_lm
from rljob_trainer.sync.buckets import Bucket, combine_checksums, compute_tensor_checksum

DEFAULT_CONCURRENT_SAMPLES: Final = 512
COMPACTION_INTERVAL_TOKENS: Final = 4
MAX_PAUSE_SECONDS: Final = 3600.0


@dataclass
class _Sample:
    """One sequence while it is decoded."""

    request: int
    index: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class NativeEngine:
    """`EngineAdapter` over a Hugging Face model."""

    def __init__(self) -> None:
        self._model: Any = None
        self._settings: EngineSettings | None = None
        self._version = 0
        self._pending_version: int | None = None
        self._received: dict[str, bool] = {}
        self._generating = threading.Lock()
        self._aborting = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._num_running = 0
        self._num_tokens_generated = 0
        self._offloaded: set[MemoryTag] = set()

    def probe(self) -> EngineInfo:
        """Native decodes with the installed transformers, so that is its version."""
        return EngineInfo("Native", transformers.__version__, LogProbMode.TEMPERED, (PauseMode.KEEP,))

    def start(self, settings: EngineSettings) -> None:
        """Load a full copy of the model in the engine's dtype.

        Raises:
            ConfigurationError: unknown engine arguments, or an unreadable model.
        """
        if settings.engine_args:
            raise ConfigurationError(
                f"spec.rollout.engineArgs: Native takes no arguments, got {sorted(settings.engine_args)}; remove them"
            )
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        dtype = TORCH_DTYPES[DType(settings.dtype)]
        self._model = load_causal_lm(settings.model_source, settings.model_revision, dtype=dtype, attention="sdpa")
        self._model.to(settings.device).requires_grad_(False)
        self._settings = settings

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        """Groups as they finish; samples of a prompt share its prefill."""
        settings = self._require_started()
        if MemoryTag.WEIGHTS in self._offloaded:
            raise EngineDied("Native engine: generate while its weights are offloaded; call onload first")
        capacity = settings.max_concurrent_samples or DEFAULT_CONCURRENT_SAMPLES
        with self._generating:
            self._aborting.clear()
            for batch in _split_requests(requests, capacity):
                yield from self._generate_batch(batch, params)

    @torch.inference_mode()
    def _prefill(self, requests: Sequence[GenerateRequest]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Last logits per sample (B, V), cache, attention mask (B, L) and next position (B,), samples of a prompt "
        "adjacent."""
        device = self._model.device
        max_length = max(len(request.prompt_ids) for request in requests)
        ids_PL = torch.zeros(len(requests), max_length, dtype=torch.int64)
        mask_PL = torch.zeros(len(requests), max_length, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids_PL[row, max_length - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask_PL[row, max_length - len(request.prompt_ids) :] = 1
        ids_PL, mask_PL = ids_PL.to(device), mask_PL.to(device)
        # Left padding: the first real token must sit at position 0 (OpenRLHF 217).
        positions_PL = (mask_PL.cumsum(dim=1) - 1).clamp(min=0)
        output = self._model(
            input_ids=ids_PL, attention_mask=mask_PL, position_ids=positions_PL, use_cache=True, logits_to_keep=1
        )
        parent_B = torch.tensor(
            [row for row, request in enumerate(requests) for _ in range(request.num_samples)], device=device
        )
        cache = output.past_key_values
        cache.batch_select_indices(parent_B)
        return output.logits[:, -1][parent_B], cache, mask_PL[parent_B], positions_PL[parent_B, -1] + 1

    def _generate_batch(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        if self._aborting.is_set():
            # Never started: empty partial responses, so that every request is answered exactly once.
            yield from (_empty_group(request, self._version) for request in requests)
            return
        settings = self._require_started()
        stop_ids = set(settings.stop_token_ids)
        samples = [_Sample(row, index) for row, request in enumerate(requests) for index in range(request.num_samples)]
        open_samples = [request.num_samples for request in requests]
        by_request: list[list[_Sample]] = [[] for _ in requests]
        for sample in samples:
            by_request[sample.request].append(sample)
        noise_BT = torch.from_numpy(
            np.stack(
                [
                    draw_sample_noise(request.seed, request.step, request.uid, index, params.max_tokens)
                    for request in requests
                    for index in range(request.num_samples)
                ]
            )
        )
        version = self._version
        logits_BV, cache, mask_BL, positions_B = self._prefill(requests)
        rows = list(range(len(samples)))
        self._num_running = len(samples)
        for position in range(params.max_tokens):
            if not self._running.wait(timeout=MAX_PAUSE_SECONDS):
                raise EngineDied(f"Native engine: paused for more than {MAX_PAUSE_SECONDS:.0f} s without resume")
            if self._aborting.is_set():
                break
            with torch.inference_mode():
                tokens_B, log_probs_B = choose_tokens(
                    logits_BV, noise_BT[rows, position], temperature=params.temperature, top_p=params.top_p
                )
            for row, token, log_prob in zip(rows, tokens_B.tolist(), log_probs_B.tolist(), strict=True):
                sample = samples[row]
                if sample.finish_reason is not None:
                    continue
                sample.token_ids.append(token)
                sample.log_probs.append(log_prob)
                self._num_tokens_generated += 1
                if token in stop_ids or position + 1 == params.max_tokens:
                    sample.finish_reason = FinishReason.STOP if token in stop_ids else FinishReason.LENGTH
                    self._num_running -= 1
                    open_samples[sample.request] -= 1
                    if open_samples[sample.request] == 0:
                        request_index = sample.request
                        yield _build_group(requests[request_index], by_request[request_index], version)
            if self._num_running == 0:
                return
            with torch.inference_mode():
                if position % COMPACTION_INTERVAL_TOKENS == COMPACTION_INTERVAL_TOKENS - 1:
                    kept = [slot for slot, row in enumerate(rows) if samples[row].finish_reason is None]
                    if len(kept) <= 0.8 * len(rows):
                        kept_B = torch.tensor(kept, device=tokens_B.device)
                        cache.batch_select_indices(kept_B)
                        tokens_B, mask_BL, positions_B = tokens_B[kept_B], mask_BL[kept_B], positions_B[kept_B]
                        rows = [rows[slot] for slot in kept]
                mask_BL = torch.nn.functional.pad(mask_BL, (0, 1), value=1)
                output = self._model(
                    input_ids=tokens_B.unsqueeze(1),
                    attention_mask=mask_BL,
                    position_ids=positions_B.unsqueeze(1),
                    past_key_values=cache,
                    use_cache=True,
                )
                logits_BV, positions_B = output.logits[:, -1], positions_B + 1
        self._num_running = 0
        for request_index, group in enumerate(by_request):
            if open_samples[request_index]:
                yield _build_group(requests[request_index], group, version)

    def abort_all(self) -> None:
        """Takes effect before the next token. Without a running `generate` it does nothing."""
        if self._generating.locked():
            self._aborting.set()
            self._running.set()

    def pause(self, mode: PauseMode) -> None:
        """Takes effect before the next token."""
        if mode is not PauseMode.KEEP:
            raise ConfigurationError(
                f"Native engine: pause mode {mode!r} is not supported; use {PauseMode.KEEP.value!r}"
            )
        self._running.clear()

    def resume(self) -> None:
        """Idempotent."""
        self._running.set()

    def begin_update(self, version: int) -> None:
        """Refused while generating, or for a version that does not grow."""
        self._require_started()
        if self._generating.locked():
            raise EngineDied("Native engine: weight update while samples run; let generate finish or abort_all first")
        if version <= self._version:
            raise EngineDied(f"Native engine: weight version {version} does not follow {self._version}")
        self._pending_version = version
        self._received = {name: False for name, _ in self._model.named_parameters()}

    def update(self, buckets: Sequence[Bucket]) -> None:
        """Copy in place; unknown names, other shapes or dtypes are errors, since a skipped tensor is a silent fault."""
        if self._pending_version is None:
            raise EngineDied("Native engine: update without begin_update")
        parameters = dict(self._model.named_parameters())
        for bucket in buckets:
            for name, tensor in bucket.tensors():
                parameter = parameters.get(name)
                if parameter is None:
                    raise EngineDied(f"Native engine: weight update names {name!r}, which the model does not have")
                if parameter.shape != tensor.shape or parameter.dtype != tensor.dtype:
                    raise EngineDied(
                        f"Native engine: weight {name!r} arrives as {tuple(tensor.shape)} {tensor.dtype}, "
                        f"the model has {tuple(parameter.shape)} {parameter.dtype}"
                    )
                with torch.no_grad():
                    parameter.copy_(tensor)
                self._received[name] = True

    def end_update(self) -> int:
        """The new version, once every parameter arrived."""
        if self._pending_version is None:
            raise EngineDied("Native engine: end_update without begin_update")
        missing = [name for name, arrived in self._received.items() if not arrived]
        if missing:
            raise EngineDied(
                f"Native engine: weight update lacks {len(missing)} parameters, for example {missing[0]!r}"
            )
        self._version, self._pending_version = self._pending_version, None
        return self._version

    def checksum(self) -> int:
        """Over named parameters, tied ones once."""
        self._require_started()
        return combine_checksums(
            compute_tensor_checksum(name, tensor) for name, tensor in self._model.named_parameters()
        )

    def offload(self, tags: Sequence[MemoryTag]) -> None:
        """Weights move to host memory; the KV cache lives only inside `generate`."""
        settings = self._require_started()
        if MemoryTag.WEIGHTS in tags and MemoryTag.WEIGHTS not in self._offloaded and settings.device != "cpu":
            self._model.to("cpu")
        self._offloaded.update(tags)

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        """Weights move back to the device."""
        settings = self._require_started()
        if MemoryTag.WEIGHTS in tags and MemoryTag.WEIGHTS in self._offloaded and settings.device != "cpu":
            self._model.to(settings.device)
        self._offloaded.difference_update(tags)

    def health(self) -> EngineHealth:
        """Counters only; takes no lock."""
        return EngineHealth(
            weight_version=self._version,
            num_running=self._num_running,
            num_tokens_generated=self._num_tokens_generated,
            is_paused=not self._running.is_set(),
            offloaded=tuple(sorted(self._offloaded, key=lambda tag: tag.value)),
        )

    def stop(self) -> None:
        """Drop the model."""
        self.abort_all()
        self._model = None

    def _require_started(self) -> EngineSettings:
        if self._settings is None or self._model is None:
            raise EngineDied("Native engine: not started")
        return self._settings


def _split_requests(requests: Sequence[GenerateRequest], capacity: int) -> Iterator[list[GenerateRequest]]:
    """Whole prompts per batch, at most `capacity` samples; a larger group gets a batch of its own."""
    batch: list[GenerateRequest] = []
    num_samples = 0
    for request in requests:
        if batch and num_samples + request.num_samples > capacity:
            yield batch
            batch, num_samples = [], 0
        batch.append(request)
        num_samples += request.num_samples
    if batch:
        yield batch


def _build_group(request: GenerateRequest, samples: Sequence[_Sample], version: int) -> GeneratedGroup:
    return GeneratedGroup(
        request.uid,
        [
            GeneratedSample(
                token_ids=sample.token_ids,
                log_probs=np.asarray(sample.log_probs, dtype=np.float32),
                finish_reason=sample.finish_reason or FinishReason.ABORT,
                weight_version=version,
            )
            for sample in samples
        ],
    )


def _empty_group(request: GenerateRequest, version: int) -> GeneratedGroup:
    return _build_group(request, [_Sample(0, index) for index in range(request.num_samples)], version)
