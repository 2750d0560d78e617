"""Weights from safetensors files straight into shards: no rank ever holds the whole model.

The model is built without memory (meta device), sharded, and only then given memory; each rank reads its own rows of
each tensor. What cannot be read like that (names or layouts that transformers converts while loading, weights in
pickles) is loaded whole and cut afterwards; `load_sharded` says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.packed_attention import ATTENTION_NAME
from rljob_trainer.models.policy import PolicyModel, load_causal_lm, load_config
from rljob_trainer.models.sharding import ADAPTER_PART, ADAPTER_WRAPPER_PART, CHECKPOINT_WRAPPER_PART
from rljob_trainer.models.value import HEAD_NAME, ValueModel, load_value_config, load_value_model

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
LFS_POINTER: Final = b"version https://git-lfs"

Model = TypeVar("Model", PolicyModel, ValueModel)


def load_sharded_policy(
    source: str,
    revision: str | None,
    *,
    field: str,
    device: torch.device,
    shard: Callable[[PolicyModel], None],
    parameter_device: torch.device | None = None,
) -> tuple[PolicyModel, str | None]:
    """The policy on `device`, cut by `shard`; and, where every rank had to load it whole, why. Not collective.

    `parameter_device`: of the shards, where `shard` offloads parameters.

    Raises:
        ConfigurationError: weights are missing, damaged, or do not fit the config.
    """

    def build() -> PolicyModel | str:
        config = load_config(source, revision, field=field)
        causal_lm = build_on_meta(
            lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
        )
        return causal_lm if isinstance(causal_lm, str) else PolicyModel(causal_lm)

    def load_whole() -> PolicyModel:
        return PolicyModel(load_causal_lm(source, revision, field=field))

    return _load(build, load_whole, shard, device, parameter_device or device, source, revision, field)


def load_sharded_value_model(
    source: str,
    revision: str | None,
    *,
    field: str,
    device: torch.device,
    shard: Callable[[ValueModel], None],
    parameter_device: torch.device | None = None,
) -> tuple[ValueModel, str | None]:
    """The critic, as `load_sharded_policy`; a head that the checkpoint does not have is zero (`load_value_model`)."""

    def build() -> ValueModel | str:
        config = load_value_config(source, revision, field=field)
        classifier = build_on_meta(
            lambda: AutoModelForTokenClassification.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
            )
        )
        if isinstance(classifier, str):
            return classifier
        if not isinstance(getattr(classifier, HEAD_NAME, None), nn.Linear):
            return f"{type(classifier).__name__} has no linear head {HEAD_NAME!r}"
        return ValueModel(classifier)

    def load_whole() -> ValueModel:
        return load_value_model(source, revision, field=field)

    prefix = f"{HEAD_NAME}."
    return _load(build, load_whole, shard, device, parameter_device or device, source, revision, field, prefix)


def _load(
    build: Callable[[], Model | str],
    load_whole: Callable[[], Model],
    shard: Callable[[Model], None],
    device: torch.device,
    parameter_device: torch.device,
    source: str,
    revision: str | None,
    field: str,
    zero_prefix: str | None = None,
) -> tuple[Model, str | None]:
    model = build()
    files = model if isinstance(model, str) else find_tensor_files(source, revision, field=field)
    plan = files if isinstance(files, str) else plan_reads(cast(nn.Module, model), files, zero_prefix)
    if isinstance(model, str) or isinstance(files, str) or isinstance(plan, str):
        whole = load_whole()
        whole.to(device)
        shard(whole)
        return whole, str(plan)
    shard(model)
    materialise(model, device, parameter_device)
    plan = plan_reads(model, files, zero_prefix)  # recomputation renamed the parameters
    assert not isinstance(plan, str)
    read_shards(model, files, plan, field=field)
    return model, None


def build_on_meta(make: Callable[[], Any]) -> nn.Module | str:
    """What `make` returns, built on the meta device, with buffers computed on the CPU; or why that is not possible.

    Buffers that are no part of a checkpoint (rotary frequencies) come from the model's own `_init_weights`, which is
    also what transformers relies on after building on the meta device.
    """
    with torch.device("meta"):
        model = make()
    for name, module in model.named_modules():
        empty = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for key, buffer in empty.items():
            module._buffers[key] = torch.full_like(buffer, _get_marker(buffer.dtype), device="cpu")
        if empty:
            model._init_weights(module)
        for key, buffer in empty.items():
            if bool((_get_buffer(module, key) == _get_marker(buffer.dtype)).any()):
                return f"{type(model).__name__} does not initialise its buffer {name}.{key} by itself"
    return model.eval()


def _get_marker(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialisation leaves behind."""
    if dtype is torch.bool:
        return True
    return -12345.0 if dtype.is_floating_point else -123


def _get_buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def find_tensor_files(source: str, revision: str | None, *, field: str) -> Mapping[str, Path] | str:
    """Tensor name -> safetensors file of a model directory or hub id, or why there are none.

    Raises:
        ConfigurationError: a file is damaged, or a Git LFS pointer.
    """
    directory = Path(source)
    if not directory.is_dir():
        try:
            patterns = ["*.safetensors", "*.json"]
            directory = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            return f"{source!r} has no local copy ({error})"
    index = directory / INDEX_FILE
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    weights = directory / WEIGHTS_FILE
    if not weights.exists():
        return f"{source!r} has no {WEIGHTS_FILE}"
    with open_tensors(weights, field=field) as file:
        return dict.fromkeys(file.keys(), weights)


def open_tensors(path: Path, *, field: str) -> Any:
    """A safetensors file, mapped into memory: only what is read is loaded.

    Raises:
        ConfigurationError: damaged, missing, or a Git LFS pointer.
    """
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if is_pointer:
            raise ConfigurationError(
                f"{field}: {path} is a Git LFS pointer, not the weights; run `git lfs pull` in its directory"
            )
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{field}: weights in {path} cannot be read: {error}") from error


def plan_reads(
    module: nn.Module, files: Mapping[str, Path], zero_prefix: str | None = None
) -> dict[str, str | None] | str:
    """Parameter -> tensor of the checkpoint, or which parameter has none under its own name.

    Tied parameters appear once; any of their names will do. Adapters, and missing ones below `zero_prefix`,
    map to None: zeros.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    plan: dict[str, str | None] = {}
    for candidates in names.values():
        tensors = [get_tensor_name(name) for name in candidates]
        found = next((tensor for tensor in tensors if tensor in files), None)
        is_new = ADAPTER_PART in tensors[0] or (zero_prefix is not None and tensors[0].startswith(zero_prefix))
        if found is None and not is_new:
            return f"the checkpoint has no tensor {tensors[0]!r}"
        plan[candidates[0]] = found
    return plan


def get_tensor_name(name: str) -> str:
    """The Hugging Face name of a parameter of `PolicyModel` or `ValueModel`."""
    return name.replace(CHECKPOINT_WRAPPER_PART, "").replace(ADAPTER_WRAPPER_PART, "").split(".", 1)[1]


def materialise(module: nn.Module, device: torch.device, parameter_device: torch.device) -> None:
    """Give the parameters of a sharded module built on meta uninitialised memory; buffers keep their values."""
    buffers = [
        (child, key, buffer)
        for child in module.modules()
        for key, buffer in child.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    module.to_empty(device=parameter_device)
    for child, key, buffer in buffers:
        child._buffers[key] = buffer.to(device)


@torch.no_grad()
def read_shards(module: nn.Module, files: Mapping[str, Path], plan: Mapping[str, str | None], *, field: str) -> None:
    """Read this rank's rows of each parameter in `plan`, file by file. Not collective.

    Host memory on top of the shards: the rows of one tensor.

    Raises:
        ConfigurationError: damaged files, or a shape other than the model's.
    """
    parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, tensor_name in plan.items():
        if tensor_name is None:
            _locate_shard(parameters[name])[0].zero_()
        else:
            by_file.setdefault(files[tensor_name], []).append((tensor_name, parameters[name]))
    for path, wanted in by_file.items():
        with open_tensors(path, field=field) as file:
            for tensor_name, parameter in wanted:
                stored = file.get_slice(tensor_name)
                if list(stored.get_shape()) != list(parameter.shape):
                    raise ConfigurationError(
                        f"{field}: {tensor_name!r} in {path} has shape {list(stored.get_shape())}, config.json asks "
                        f"for {list(parameter.shape)}; the weights belong to another config.json"
                    )
                local, start, stop = _locate_shard(parameter)
                if local.numel():
                    local.copy_(stored[start:stop])


def _locate_shard(parameter: Tensor) -> tuple[Tensor, int, int]:
    """The local memory of a parameter, and which rows of the whole it holds."""
    num_rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return parameter, 0, num_rows
    if tuple(parameter.placements) != (Shard(0),):
        raise ValueError(f"expected shards of dimension 0 over one mesh dimension, got {parameter.placements}")
    local: Tensor = parameter.to_local()
    # As torch.chunk cuts: equal parts rounded up, the last ones smaller or empty.
    rows_per_rank = -(-num_rows // parameter.device_mesh.size())
    start = min(parameter.device_mesh.get_local_rank() * rows_per_rank, num_rows)
    stop = min(start + rows_per_rank, num_rows)
    if local.shape[0] != stop - start:
        raise ValueError(f"the shard has {local.shape[0]} rows, expected {stop - start} of {num_rows}")
    return local, start, stop
