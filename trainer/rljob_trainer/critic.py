"""`CriticRank`: one rank's share of the critic, a model and an optimizer of its own (PPO)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.algorithm import AdvantageEstimator, Algorithm
from rljob_trainer.checkpoint.state import StatePart
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.models.value import ValueModel
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import FloatArray, MiniBatch, TrainRow, ValueMetrics
from rljob_trainer.update import Ranks
from rljob_trainer.value_update import apply_value_update, compute_row_values


def uses_critic(algorithm: Algorithm) -> bool:
    """Only generalised advantage estimation reads values."""
    return algorithm.advantage_estimator is AdvantageEstimator.GAE


class CriticRank:
    """Computes values and moves them towards the returns. All methods are collective over the ranks."""

    def __init__(
        self,
        job: ResolvedJob,
        model: ValueModel,
        ranks: Ranks,
        device: torch.device,
        on_micro_batch: Callable[[], None],
    ) -> None:
        """`model` is sharded and on `device`."""
        if job.spec.critic is None:
            raise ConfigurationError("spec.critic: job.json is not resolved (PPO needs it); for example critic: {}")
        self._settings, self._training = job.spec.critic, job.spec.training
        self._model, self._ranks, self._device, self._on_micro_batch = model, ranks, device, on_micro_batch
        self._optimizer = build_optimizer(model, self._training)

    @property
    def state(self) -> StatePart:
        """What a checkpoint holds of it: weights and optimizer."""
        return StatePart(self._model, self._optimizer)

    def start_from_policy(self, policy: PolicyModel) -> None:
        """Take over the decoder of the policy as it is now (after the warm start); the head stays."""
        self._model.copy_backbone(policy)

    def compute_values(self, micro_batches: list[list[TrainRow]]) -> list[list[FloatArray]]:
        """Values per row."""
        return compute_row_values(self._model, micro_batches, device=self._device, on_micro_batch=self._on_micro_batch)

    def update(self, batch: MiniBatch) -> ValueMetrics:
        """One optimizer update; `batch.learning_rate` is the critic's."""
        return apply_value_update(
            self._model,
            self._optimizer,
            batch,
            value_clip=self._settings.value_clip,
            gradient_clip=self._training.gradient_clip,
            ranks=self._ranks,
            device=self._device,
            on_micro_batch=self._on_micro_batch,
        )
