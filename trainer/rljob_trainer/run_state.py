"""What a run knows outside its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """Everything outside the ranks that a resumed run needs; saved as it is after each step."""

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    kl_coefficient: float = 0.0
    num_nan_steps: int = 0
    """Updates skipped for NaN or Inf so far."""
    num_nan_steps_in_a_row: int = 0
    """Of the policy."""
    num_critic_nan_steps_in_a_row: int = 0
    """Apart from the policy's: a healthy critic must not hide a policy that never updates."""
    num_tokens_total: int = 0
    is_warm_started: bool = False
    base_model: str = ""
    """Fingerprint of the weights that adapters belong to; empty without `model.lora`."""
