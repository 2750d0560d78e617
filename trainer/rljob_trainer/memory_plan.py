"""Where the memory of one GPU goes, and what that decides. Pure functions on numbers, in bytes.

A co-located GPU holds, in turns, an engine (weights, KV cache, graphs) and a trainer rank (shards, optimizer,
gradients, activations, logits). What does not fit side by side takes turns through `offload`; what does not fit alone
is recomputed or gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.algorithm import KLPlacement
from rljob_api.v1alpha1.model import Toggle
from rljob_api.v1alpha1.rollout import Placement

GIB: Final = 2**30
CONTEXT_BYTES: Final = int(1.5 * GIB)
"""CUDA context, libraries and communicators of one process."""
ENGINE_RESIDUE_BYTES: Final = 3 * GIB
"""What an engine keeps on the GPU when weights and KV cache are offloaded: context, graphs, workspaces."""
RESERVE_FRACTION: Final = 0.08
"""Of the device: fragmentation and what the estimate misses."""
BYTES_MASTER: Final = 4
BYTES_MOMENTS: Final = 8
LOGIT_WORKSPACE_BYTES: Final = 10
"""Per logit of one chunk: the logits, their gradient and float32 temporaries."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Weights; biases and norms are left out. A tied embedding counts once."""
        return self.num_layers * self.num_block_parameters + (1 if self.is_tied else 2) * self.num_embedding_parameters

    @property
    def num_block_parameters(self) -> int:
        """Of one decoder block."""
        query, key = self.num_heads * self.head_size, self.num_key_value_heads * self.head_size
        return self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size)

    @property
    def num_embedding_parameters(self) -> int:
        """Of one vocabulary x hidden matrix."""
        return self.vocabulary_size * self.hidden_size

    @property
    def activation_bytes_per_token(self) -> int:
        """Kept for the backward pass of all blocks in bfloat16: five hidden-sized tensors, q, k, v and the three of
        the gated MLP per block. Measured on one H200: 0.92 MB for Qwen2-0.5B, where this gives 0.93 MB."""
        key = self.num_key_value_heads * self.head_size
        per_block = 5 * self.hidden_size + 2 * key + 3 * self.intermediate_size
        return 2 * self.num_layers * per_block

    def compute_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward and backward, 6 per weight plus causal attention: 6 N + 6 layers x width x S (PaLM, appendix B,
        halved because causality leaves half of the pairs)."""
        width = self.num_heads * self.head_size
        return 6.0 * self.num_parameters + 6.0 * self.num_layers * width * sequence_tokens


@dataclass(frozen=True)
class MemoryRequest:
    """What one GPU is asked to hold."""

    model: ModelShape
    device_bytes: int
    world_size: int
    tensor_parallel_size: int
    memory_fraction: float
    """Of the device, for the engine's weights and KV cache; 0 without a co-located engine."""
    micro_batch_tokens: int
    chunk_tokens: int
    bucket_bytes: int
    num_models: int = 1
    """Models with gradients and optimizer for all weights (2 with a critic)."""
    num_frozen_models: int = 0
    """Sharded float32 copies without optimizer: references, and the base of adapters."""
    recompute_blocks: bool | None = None
    """None: decide."""
    offload_optimizer: bool = False
    offload_parameters: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and the choices they follow from."""

    device_bytes: int
    engine_weights: int
    engine_kv_cache: int
    parameters: int
    """Float32 shards of all models."""
    optimizer: int
    gradients: int
    gathered: int
    """Parameters in the compute dtype, and float32 gradients that are not reduced yet."""
    activations: int
    logits: int
    buckets: int
    recompute_blocks: bool
    keep_gathered: bool
    keep_logits: bool
    offload_engine: bool
    """Engine and trainer do not fit side by side, so that they take turns."""

    @property
    def trainer_peak(self) -> int:
        """Of an update."""
        state = self.parameters + self.optimizer + self.gradients
        return CONTEXT_BYTES + state + self.gathered + self.activations + self.logits

    @property
    def rollout_peak(self) -> int:
        """Of a rollout: the engine, and what the trainer keeps."""
        engine = self.engine_weights + self.engine_kv_cache + ENGINE_RESIDUE_BYTES
        return engine + CONTEXT_BYTES + self.parameters + self.optimizer + self.buckets

    @property
    def fits(self) -> bool:
        """Whether both phases fit, by this estimate."""
        usable = compute_usable(self.device_bytes)
        update = self.trainer_peak + (ENGINE_RESIDUE_BYTES if self.engine_weights else 0)
        return update <= usable and (not self.engine_weights or self.rollout_peak <= usable)

    def describe(self) -> str:
        """One line for the log, in GiB."""
        parts = {
            "engine weights": self.engine_weights,
            "KV cache": self.engine_kv_cache,
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "gathered": self.gathered,
            "activations": self.activations,
            "logits": self.logits,
            "buckets": self.buckets,
        }
        choices = [
            "blocks recomputed" if self.recompute_blocks else "activations kept",
            "gathered once per update" if self.keep_gathered else "gathered per micro-batch",
            "logits kept" if self.keep_logits else "logits recomputed",
            self._describe_engine(),
        ]
        return (
            f"memory plan per GPU of {self.device_bytes / GIB:.1f} GiB: "
            + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
            + f"; update peak {self.trainer_peak / GIB:.1f}, rollout peak {self.rollout_peak / GIB:.1f}; "
            + ", ".join(choices)
        )

    def _describe_engine(self) -> str:
        if not self.engine_weights:
            return "engines have other GPUs"
        return "engine offloaded while training" if self.offload_engine else "engine stays while training"


def compute_usable(device_bytes: int) -> int:
    """What may be planned for."""
    return int(device_bytes * (1 - RESERVE_FRACTION))


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Take the fastest choices that fit; when nothing fits, the leanest.

    Given up in this order: logits kept (8 % of the update of a 0.5B model), gathered once per update, engine kept
    beside the trainer (0.35 s per step), activations kept (a quarter of the update).
    """
    model = request.model
    num_sharded = model.num_parameters / request.world_size
    num_copies = request.num_models + request.num_frozen_models
    weights = 2 * model.num_parameters // request.tensor_parallel_size if request.memory_fraction else 0
    gathered_unit = max(model.num_block_parameters, (1 if model.is_tied else 2) * model.num_embedding_parameters)
    plan = MemoryPlan(
        device_bytes=request.device_bytes,
        engine_weights=weights,
        engine_kv_cache=max(int(request.memory_fraction * request.device_bytes) - weights, 0),
        parameters=0 if request.offload_parameters else int(BYTES_MASTER * num_sharded * num_copies),
        optimizer=0 if request.offload_optimizer else int(BYTES_MOMENTS * num_sharded * request.num_models),
        gradients=int(BYTES_MASTER * num_sharded * request.num_models),
        gathered=0,
        activations=0,
        logits=0,
        buckets=2 * min(request.bucket_bytes, 2 * model.num_parameters),
        recompute_blocks=False,
        keep_gathered=False,
        keep_logits=False,
        offload_engine=False,
    )
    chunk_logits = LOGIT_WORKSPACE_BYTES * request.chunk_tokens * model.vocabulary_size
    all_logits = 2 * request.micro_batch_tokens * model.vocabulary_size
    block_inputs = 2 * model.num_layers * model.hidden_size * request.micro_batch_tokens
    all_activations = model.activation_bytes_per_token * request.micro_batch_tokens
    one_block = all_activations // model.num_layers

    def choose(recompute: bool, keep_gathered: bool, keep_logits: bool, offload_engine: bool) -> MemoryPlan:
        return replace(
            plan,
            recompute_blocks=recompute,
            keep_gathered=keep_gathered,
            keep_logits=keep_logits,
            offload_engine=offload_engine,
            activations=block_inputs + one_block if recompute else all_activations,
            logits=chunk_logits + (all_logits if keep_logits else 0),
            gathered=(2 + 4) * (model.num_parameters if keep_gathered else 2 * gathered_unit),
        )

    recomputing = [False, True] if request.recompute_blocks is None else [request.recompute_blocks]
    candidates = [
        choose(recompute, keep_gathered, keep_logits, offload_engine)
        for recompute in recomputing
        for offload_engine in ((False, True) if weights else (False,))
        for keep_gathered in (True, False)
        for keep_logits in (True, False)
    ]
    for candidate in candidates:
        beside = candidate.engine_weights + candidate.engine_kv_cache if not candidate.offload_engine else 0
        residue = ENGINE_RESIDUE_BYTES if weights else 0
        if candidate.trainer_peak + residue + beside <= compute_usable(request.device_bytes):
            return candidate
    return candidates[-1]


def build_memory_request(
    job: ResolvedJob, model: ModelShape, device_bytes: int, *, chunk_tokens: int, bucket_bytes: int
) -> MemoryRequest:
    """What `job` asks of each GPU."""
    spec, training = job.spec, job.spec.training
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    has_engine = spec.rollout.placement is Placement.COLOCATED
    toggle = spec.model.gradient_checkpointing
    # Adapters are small: what is trained through them counts as frozen, and serves as its own reference.
    is_adapted = spec.model.lora is not None
    own_source = spec.reference is not None and spec.reference.source not in (None, spec.model.source)
    needs_reference = spec.algorithm.kl.placement is not KLPlacement.NONE and (own_source or not is_adapted)
    return MemoryRequest(
        model=model,
        device_bytes=device_bytes,
        world_size=job.layout.world_size,
        tensor_parallel_size=job.layout.tensor_parallel_size,
        memory_fraction=spec.rollout.memory_fraction if has_engine else 0.0,
        micro_batch_tokens=training.micro_batch_tokens or (training.micro_batch_sequences or 1) * longest,
        chunk_tokens=chunk_tokens,
        bucket_bytes=bucket_bytes,
        num_models=int(not is_adapted) + int(spec.critic is not None),
        num_frozen_models=int(is_adapted) + int(needs_reference),
        recompute_blocks=None if toggle is Toggle.AUTO else toggle is Toggle.ALWAYS,
        offload_optimizer=training.offload.optimizer,
        offload_parameters=training.offload.parameters,
    )


def read_model_shape(config: Any) -> ModelShape:
    """From a Hugging Face config of a dense decoder."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=head_size,
        vocabulary_size=config.vocab_size,
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
