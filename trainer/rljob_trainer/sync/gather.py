"""From FSDP2 shards to full tensors, one unit at a time with the next gather in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.models.sharding import clean_parameter_name
from rljob_trainer.sync.buckets import Bucket, build_bucket


def iterate_units(policy: PolicyModel) -> list[tuple[nn.Module, list[tuple[str, str]]]]:
    """Sharding units with (Hugging Face name, name inside the unit) of the parameters each one gathers."""
    blocks = {id(block) for block in policy.blocks}
    units: list[tuple[nn.Module, list[tuple[str, str]]]] = []
    covered: set[str] = set()
    for module_name, module in policy.named_modules():
        if id(module) in blocks:
            # Not module.named_parameters(): the recomputation wrapper overrides it to hide its part of the names.
            names = [(f"{module_name}.{name}", name) for name, _ in nn.Module.named_parameters(module)]
            covered.update(name for name, _ in names)
            units.append((module, [(clean_parameter_name(name), local) for name, local in names]))
    rest = [name for name, _ in policy.named_parameters() if name not in covered]
    units.append((policy, [(clean_parameter_name(name), name) for name in rest]))
    return units


def gather_buckets(policy: PolicyModel, dtype: torch.dtype, *, publish: bool, bucket_bytes: int) -> Iterator[Bucket]:
    """Collective: every rank iterates to the end; only ranks with `publish` build and yield buckets.

    `unshard` gathers a whole block in one collective, already in the compute dtype. The next block is gathered while
    this one is copied out, so at most two blocks are unsharded at a time.
    """
    units = iterate_units(policy)
    pending: list[tuple[str, Tensor]] = []
    pending_bytes = 0
    handle = _unshard(units[0][0])
    for index, (module, names) in enumerate(units):
        next_handle = _unshard(units[index + 1][0]) if index + 1 < len(units) else None
        if handle is not None:
            handle.wait()
        if publish:
            for name, local_name in names:
                tensor = module.get_parameter(local_name).detach().to(dtype=dtype, copy=True)
                pending.append((name, tensor))
                pending_bytes += tensor.numel() * tensor.element_size()
        fsdp_module: Any = module
        fsdp_module.reshard()
        if pending_bytes >= bucket_bytes:
            yield build_bucket(pending)
            pending, pending_bytes = [], 0
        handle = next_handle
    if pending:
        yield build_bucket(pending)


def _unshard(module: nn.Module) -> Any:
    fsdp_module: Any = module
    return fsdp_module.unshard(async_op=True)
