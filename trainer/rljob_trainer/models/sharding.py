"""FSDP2 sharding of a policy or critic: one unit per decoder block, one for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar, cast

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rljob_api.v1alpha1.model import DType
from rljob_trainer.models.log_probs import score_logits
from rljob_trainer.models.policy import PREFIX, TORCH_DTYPES, PolicyModel
from rljob_trainer.models.value import ValueModel

CHECKPOINT_WRAPPER_PART = "_checkpoint_wrapped_module."
ADAPTER_WRAPPER_PART = "base_layer."
ADAPTER_PART = ".lora_"
"""In the names of adapter weights; see `models.lora`."""
COMPILED_SHAPES: Final = 64
"""Compiled versions of one function: sizes of packs, with and without gradient, per kind of layer."""

T = TypeVar("T")


def shard_policy(
    policy: PolicyModel | ValueModel,
    mesh: DeviceMesh,
    dtype: DType,
    *,
    recompute_blocks: bool,
    keep_gathered: bool = False,
    offload_parameters: bool = False,
) -> None:
    """Shard in place. Parameters stay float32 masters; with BFloat16 they are gathered and used in bfloat16, and
    gradients are reduced in float32.

    Args:
        recompute_blocks: keep only the inputs of blocks for the backward pass.
        keep_gathered: see `iterate_micro_batches`.
        offload_parameters: shards and their gradients live in host memory; the optimizer steps there.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload_parameters else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype is DType.FLOAT32 else TORCH_DTYPES[dtype], reduce_dtype=torch.float32
    )
    if recompute_blocks:
        _wrap_blocks(policy)
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    policy.keep_gathered = keep_gathered


def iterate_micro_batches(policy: PolicyModel | ValueModel, micro_batches: Sequence[T]) -> Iterator[T]:
    """The micro-batches of one optimizer update; each must run its backward pass before the next is taken.

    With `keep_gathered` parameters are gathered once, and gradients are added up locally in float32 and reduced
    once, in the last backward pass, instead of in each: num_parameters x (compute dtype + 4) bytes more. Afterwards
    parameters are sharded again, as the optimizer needs them.
    """
    modules = [cast(FSDPModule, module) for module in [*policy.blocks, policy]]
    is_kept = policy.keep_gathered and len(micro_batches) > 1
    try:
        for index, micro_batch in enumerate(micro_batches):
            if is_kept:
                is_last = index + 1 == len(micro_batches)
                for module in modules:
                    module.set_reshard_after_forward(False, recurse=False)
                    module.set_reshard_after_backward(is_last, recurse=False)
                    module.set_requires_gradient_sync(is_last, recurse=False)
            yield micro_batch
    finally:
        if is_kept:
            for module in modules:
                module.set_reshard_after_forward(module is not modules[-1], recurse=False)
                module.set_reshard_after_backward(True, recurse=False)
                module.set_requires_gradient_sync(True, recurse=False)


def compile_model(policy: PolicyModel | ValueModel, backend: str = "inductor") -> None:
    """Compile each block and the scoring of logits, before sharding: gathers stay outside the compiled code.

    Shapes are static, so packs need a layout with a budget. A shape costs some ten seconds the first time; falling
    back to uncompiled code without a word would cost two thirds of the speed in every step, hence the limit raises.
    """
    torch._dynamo.config.recompile_limit = COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in policy.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, backend=backend)
    if isinstance(policy, PolicyModel):
        policy.head_options = replace(
            policy.head_options, score=torch.compile(score_logits, dynamic=False, backend=backend), pad_chunks=True
        )


def _wrap_blocks(policy: PolicyModel | ValueModel) -> None:
    wrapped = {
        id(block): checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT) for block in policy.blocks
    }
    for parent in list(policy.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wrapped:
                setattr(parent, name, wrapped[id(child)])
    policy.blocks = list(wrapped.values())


def clean_parameter_name(name: str) -> str:
    """The Hugging Face name of a parameter of `PolicyModel`: without our prefix and the parts of wrappers."""
    return name.replace(CHECKPOINT_WRAPPER_PART, "").replace(ADAPTER_WRAPPER_PART, "").removeprefix(PREFIX)
