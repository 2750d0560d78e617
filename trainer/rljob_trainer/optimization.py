"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from rljob_api.v1alpha1.rollout import Schedule, Training


def build_optimizer(module: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW over all trainable parameters (decoupled weight decay on every tensor, as verl and TRL do)."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        weight_decay=training.weight_decay,
        # One kernel over all parameters: a loop over them is bound by launches on small models.
        fused=all(parameter.is_cuda for parameter in parameters) or None,
    )


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
