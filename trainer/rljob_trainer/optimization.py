"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rljob_api.v1alpha1.rollout import Schedule, Training


def build_optimizer(module: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW over all trainable parameters (decoupled weight decay on every tensor, as verl and TRL do)."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        weight_decay=training.weight_decay,
        # One kernel over all parameters: a loop over them is bound by launches on small models.
        fused=all(parameter.is_cuda for parameter in parameters) or None,
    )
    if training.offload.optimizer:
        keep_state_on_host(optimizer)
    return optimizer


def keep_state_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Moments live in host memory (pinned, allocated once) between steps, and on the device of their parameter only
    during one. Where parameters are in host memory themselves nothing moves."""
    host: dict[tuple[int, str], Tensor] = {}

    def fetch(*_: Any) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = _with_local(value, _get_local(value).to(_get_local(parameter).device))

    def store(*_: Any) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or not value.ndim:
                    continue  # the step count stays where the kernel wants it
                local, key = _get_local(value), (id(parameter), name)
                if key not in host:
                    host[key] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                if local.data_ptr() != host[key].data_ptr():
                    host[key].copy_(local)
                state[name] = _with_local(value, host[key])

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(store)


def _get_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor like `like`, its memory being `local`, wherever that is."""
    if not isinstance(like, DTensor):
        return local
    # Not DTensor.from_local: with a mesh of GPUs it copies host memory to the GPU. FSDP2 makes its shards like this.
    return DTensor(local, like._spec, requires_grad=False)


def compute_learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int, min_ratio: float = 0.0
) -> float:
    """Learning rate of a 1-based step: linear warm-up to `peak` at `warmup_steps`, then down to `min_ratio` of it.

    A function of the step alone, so a resumed run cannot restart its schedule; it stays where it ended past
    `total_steps`. Linear over 100 steps gives peak x (1 - 51/100) at step 51.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    fraction = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    fraction = min(max(fraction, 0.0), 1.0)
    if schedule is Schedule.CONSTANT:
        return peak
    share = 1.0 - fraction if schedule is Schedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * fraction))
    return peak * (min_ratio + (1.0 - min_ratio) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
