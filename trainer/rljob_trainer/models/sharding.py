"""FSDP2 sharding of a policy or critic: one unit per decoder block, one for the rest."""

from __future__ import annotations

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rljob_api.v1alpha1.model import DType
from rljob_trainer.models.policy import PREFIX, TORCH_DTYPES, PolicyModel
from rljob_trainer.models.value import ValueModel

CHECKPOINT_WRAPPER_PART = "_checkpoint_wrapped_module."


def shard_policy(policy: PolicyModel | ValueModel, mesh: DeviceMesh, dtype: DType, *, recompute_blocks: bool) -> None:
    """Shard in place. Parameters stay float32 masters; with BFloat16 they are gathered and used in bfloat16, and
    gradients are reduced in float32."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype is DType.FLOAT32 else TORCH_DTYPES[dtype], reduce_dtype=torch.float32
    )
    if recompute_blocks:
        _wrap_blocks(policy)
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


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
    """The Hugging Face name of a parameter of `PolicyModel`: without our prefix and the recomputation wrapper's "
    "part."""
    return name.replace(CHECKPOINT_WRAPPER_PART, "").removeprefix(PREFIX)
