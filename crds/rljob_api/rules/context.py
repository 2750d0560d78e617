"""What a rule sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rljob_api.findings import Finding
from rljob_api.presets import resolve_algorithm
from rljob_api.resolve import (
    compute_engine_gpus_per_node,
    compute_longest_sequence_tokens,
    compute_ranks_per_node,
    compute_world_size,
)
from rljob_api.targets import Target
from rljob_api.v1alpha1.algorithm import AdvantageEstimator, Algorithm
from rljob_api.v1alpha1.base import ApiModel
from rljob_api.v1alpha1.spec import RLJob, RLJobSpec


@dataclass(frozen=True)
class RuleContext:
    """A job, what is known about its model and data, and the sizes derived from it."""

    job: RLJob
    model_config: Mapping[str, Any] | None
    num_train_rows: int | None
    target: Target

    @property
    def spec(self) -> RLJobSpec:
        """The spec as the user wrote it."""
        return self.job.spec

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm with its preset applied."""
        return resolve_algorithm(self.spec.algorithm, self.spec.rollout)

    @property
    def estimator(self) -> AdvantageEstimator:
        """Advantage estimator after the preset."""
        return self.algorithm.advantage_estimator or AdvantageEstimator.GRPO

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one worker pod; 0 when undefined."""
        return compute_ranks_per_node(self.spec.cluster)

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0 when undefined."""
        return compute_world_size(self.spec.cluster)

    @property
    def engine_slots_per_node(self) -> int:
        """Places for tensor parallel ranks of engines in a pod: GPUs of their own, else the trainer's ranks; 0 when
        undefined."""
        return compute_engine_gpus_per_node(self.spec) or self.ranks_per_node

    @property
    def num_engine_slots(self) -> int:
        """Of the job."""
        return self.spec.cluster.nodes * self.engine_slots_per_node

    @property
    def engine_slot_name(self) -> str:
        """What a slot is, in the plural, for messages."""
        return "engine GPUs" if compute_engine_gpus_per_node(self.spec) else "ranks"

    @property
    def longest_sequence_tokens(self) -> int:
        """Longest prompt plus longest response."""
        return compute_longest_sequence_tokens(self.spec)

    @property
    def mini_batch_prompts(self) -> int:
        """Prompts per optimizer update."""
        return self.spec.training.mini_batch_prompts or self.spec.training.prompts_per_step

    def get_model_number(self, *names: str) -> int | None:
        """The first of these keys of the model's config.json (or of its text_config) that is a number."""
        if self.model_config is None:
            return None
        nested = self.model_config.get("text_config")
        for config in (self.model_config, nested if isinstance(nested, Mapping) else {}):
            for name in names:
                value = config.get(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None


Rule = Callable[[RuleContext], Iterable[Finding]]


def is_changed(model: ApiModel, name: str) -> bool:
    """Whether a field (by its Python name) differs from its default.

    Not `model_fields_set`: in an object from the API server every field with a default is set.
    """
    return bool(getattr(model, name) != type(model).model_fields[name].default)


def list_divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]


def find_nearest(values: list[int], wanted: int, count: int = 4) -> str:
    """A few values around a wanted one, ascending, as text."""
    nearest = sorted(values, key=lambda value: (abs(value - wanted), value))[:count]
    return ", ".join(str(value) for value in sorted(nearest))
