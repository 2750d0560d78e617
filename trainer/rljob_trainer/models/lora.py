"""Low-rank adapters (arXiv 2106.09685) through peft: W x + alpha / rank B A x, where only A and B are trained.

Adapters live inside the blocks they belong to, so that sharding, recomputation and packed attention see nothing new.
Dropout is 0: log-probabilities of the same tokens must be the same in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rljob_api.v1alpha1.model import LoRA
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.models.sharding import ADAPTER_PART, ADAPTER_WRAPPER_PART

ADAPTER: Final = "default"
"""peft's name of the only adapter."""
BASE_WEIGHT: Final = f".{ADAPTER_WRAPPER_PART}weight"


def add_adapters(policy: PolicyModel, lora: LoRA) -> None:
    """Put adapters around linear layers of the blocks and freeze everything else. Before sharding, on any device.

    Raises:
        ConfigurationError: `targetModules` names no linear layer of the blocks.
    """
    # Runs without adapters do not pay for the import.
    from peft import LoraConfig, inject_adapter_in_model

    available = sorted(
        {
            name.rsplit(".", 1)[-1]
            for block in policy.blocks
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        }
    )
    unknown = sorted(set(lora.target_modules) - set(available))
    if unknown:
        raise ConfigurationError(
            f"spec.model.lora.targetModules: {unknown} are no linear layers of the model's blocks; it has "
            f"{', '.join(available)}"
        )
    targets = {
        f"{block_name}.{name}"
        for block_name, block in policy.causal_lm.named_modules()
        if any(block is candidate for candidate in policy.blocks)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in (lora.target_modules or available)
    }
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        target_modules=targets,
        lora_dropout=0.0,
    )
    with torch.device(next(policy.parameters()).device):
        inject_adapter_in_model(config, policy.causal_lm, adapter_name=ADAPTER)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(ADAPTER_PART in name)
    policy.eval()


@torch.no_grad()
def initialise_adapters(policy: PolicyModel, seed: int) -> None:
    """A uniform in +-1 / sqrt(input size), B zero: the model starts as its base. The same on every rank and at every
    world size: each draws the whole A (it is small) and keeps its rows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in nn.Module.named_parameters(policy):
        if f"{ADAPTER_PART}A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            _assign(parameter, whole)
        elif ADAPTER_PART in name:
            parameter.zero_()


def _assign(parameter: Tensor, whole: Tensor) -> None:
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(shard)
    else:
        parameter.copy_(whole)


def list_adapted_layers(module: nn.Module) -> list[Any]:
    """peft's layers, each with `base_layer`, `lora_A`, `lora_B` and `scaling`."""
    return [child for child in module.modules() if hasattr(child, "lora_A") and hasattr(child, "base_layer")]


@contextmanager
def adapters_off(policy: PolicyModel) -> Iterator[None]:
    """The base model: the reference of a KL term without a second copy."""
    layers = list_adapted_layers(policy)
    # Not enable_adapters(False): it switches requires_grad off, and FSDP2 keeps that for ever where the first forward
    # pass happens inside this block.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_parameter(module: nn.Module, name: str, get_full: Callable[[str], Tensor]) -> Tensor:
    """The parameter `name` of `module` with its adapter merged in, in the parameter's dtype, summed in float32.

    `get_full` gives whole tensors by their name in `module`; parameters without an adapter come back as they are.
    """
    tensor = get_full(name)
    if not name.endswith(BASE_WEIGHT):
        return tensor
    prefix = name.removesuffix(BASE_WEIGHT)
    layer: Any = module.get_submodule(prefix)
    low = get_full(f"{prefix}.lora_A.{ADAPTER}.weight").float()
    high = get_full(f"{prefix}.lora_B.{ADAPTER}.weight").float()
    return (tensor.float() + layer.scaling[ADAPTER] * (high @ low)).to(tensor.dtype)


def merge_state(policy: PolicyModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights by `PolicyModel` name, as a model without adapters has them."""
    scaling = {float(layer.scaling[ADAPTER]) for layer in list_adapted_layers(policy)}
    merged: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ADAPTER_PART in name:
            continue
        if name.endswith(BASE_WEIGHT):
            prefix = name.removesuffix(BASE_WEIGHT)
            low, high = weights[f"{prefix}.lora_A.{ADAPTER}.weight"], weights[f"{prefix}.lora_B.{ADAPTER}.weight"]
            (factor,) = scaling
            merged[f"{prefix}.weight"] = (tensor.float() + factor * (high.float() @ low.float())).to(tensor.dtype)
        else:
            merged[name.replace(ADAPTER_WRAPPER_PART, "")] = tensor
    return merged
