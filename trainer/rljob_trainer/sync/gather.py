"""From FSDP2 shards to flat buckets of full tensors, one unit at a time with the next gather in flight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rljob_trainer.models.lora import merge_parameter
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.models.sharding import ADAPTER_PART, clean_parameter_name
from rljob_trainer.sync.buckets import Bucket, TensorEntry, compute_size, plan_buckets, view_entry
from rljob_trainer.sync.device_memory import share_device_memory


def iterate_units(policy: PolicyModel) -> list[tuple[nn.Module, list[tuple[str, str]]]]:
    """Sharding units with (Hugging Face name, name inside the unit) of the parameters each one gathers."""
    blocks = {id(block) for block in policy.blocks}
    units: list[tuple[nn.Module, list[tuple[str, str]]]] = []
    covered: set[str] = set()
    for module_name, module in policy.named_modules():
        if id(module) in blocks:
            # Not module.named_parameters(): the recomputation wrapper overrides it to hide its part of the names.
            names = [
                (f"{module_name}.{name}", name)
                for name, _ in nn.Module.named_parameters(module)
                # Engines get adapters as part of the weight they belong to.
                if ADAPTER_PART not in name
            ]
            covered.update(name for name, _ in names)
            units.append((module, [(clean_parameter_name(name), local) for name, local in names]))
    rest = [name for name, _ in policy.named_parameters() if name not in covered and ADAPTER_PART not in name]
    units.append((policy, [(clean_parameter_name(name), name) for name in rest]))
    return units


def gather_buckets(
    policy: PolicyModel,
    dtype: torch.dtype,
    *,
    publish: bool,
    bucket_bytes: int,
    devices: Sequence[int] = (0,),
) -> Iterator[Bucket]:
    """Collective: every rank iterates to the end; only ranks with `publish` build and yield buckets.

    Buckets live where the model computes: on a GPU they are exported by handle, also when shards are offloaded to the
    host; on a CPU they are host memory. On GPUs each bucket comes once for every one of `devices`, in this order, as a
    copy in that GPU's memory: a handle can be opened only by processes that see the GPU.
    """
    shapes = [
        (name, tuple(module.get_parameter(local).shape))
        for module, names in iterate_units(policy)
        for name, local in names
    ]
    tensors = _iterate_tensors(policy)
    device = get_compute_device(policy)
    for entries in plan_buckets(shapes, dtype, bucket_bytes) if publish else []:
        bytes_ = torch.empty(compute_size(entries), dtype=torch.uint8, device=device)
        _fill(bytes_, entries, tensors)
        if device.type != "cuda":
            yield Bucket(entries, bytes_.numpy())
            continue
        copies = [share_device_memory(bytes_.to(torch.device("cuda", index), non_blocking=True)) for index in devices]
        # The receiver's mapping keeps the memory alive, so that it returns to the allocator as soon as it was read.
        del bytes_
        for memory in copies:
            yield Bucket(entries, memory)
    for _ in tensors:
        pass  # every gather on ranks that only take part, the release of the last unit on the others
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def gather_tensors(policy: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor in `dtype`) of every parameter, one at a time. Collective: iterate to the end.

    Copies: FSDP frees what it gathered by resizing it, which NumPy's view of a tensor forbids for good.
    """
    for name, tensor, _ in _iterate_tensors(policy):
        yield name, tensor.to(dtype, copy=True)


def get_compute_device(policy: PolicyModel) -> torch.device:
    """Where the sharded `policy` is gathered to; its shards may be offloaded to the host."""
    parameter: Any = next(policy.parameters())
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type != "cuda":
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def _fill(bytes_: Tensor, entries: list[TensorEntry], tensors: Iterator[tuple[str, Tensor, bool]]) -> None:
    """Copy the next tensors into the bucket, in as few kernels as the gathers allow."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for index, entry in enumerate(entries):
        name, tensor, is_last_of_unit = next(tensors)
        assert name == entry.name, f"weight hand-over: {name} arrived where {entry.name} was planned"
        targets.append(view_entry(bytes_, entry))
        sources.append(tensor)
        # A gathered unit is freed when the next tensor is asked for.
        if is_last_of_unit or index + 1 == len(entries):
            torch._foreach_copy_(targets, sources)
            targets, sources = [], []


def _iterate_tensors(policy: PolicyModel) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, full tensor, whether its unit ends) in the order of `iterate_units`.

    `unshard` gathers a whole block in one collective, already in the compute dtype, and the next block is gathered
    while this one is copied out, so at most two are unsharded at a time. One rank has nothing to gather: its shards
    are the tensors, and are cast as they are copied.
    """
    units = iterate_units(policy)
    is_whole = all(_count_ranks(parameter) == 1 for parameter in policy.parameters())
    handle = None if is_whole else _unshard(units[0][0])
    for index, (module, names) in enumerate(units):
        next_handle = None if is_whole or index + 1 == len(units) else _unshard(units[index + 1][0])
        fsdp_module: Any = module
        if is_whole:
            fsdp_module.reshard()
        elif handle is not None:
            handle.wait()
        for position, (name, local_name) in enumerate(names):
            tensor = merge_parameter(module, local_name, functools.partial(_get_tensor, module))
            yield name, tensor, position + 1 == len(names)
        if not is_whole:
            fsdp_module.reshard()
        handle = next_handle


def _get_tensor(module: nn.Module, name: str) -> Tensor:
    parameter: Any = module.get_parameter(name).detach()
    local = getattr(parameter, "to_local", None)
    tensor: Tensor = parameter if local is None else local()
    return tensor


def _count_ranks(parameter: Any) -> int:
    mesh = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


def _unshard(module: nn.Module) -> Any:
    fsdp_module: Any = module
    return fsdp_module.unshard(async_op=True)
