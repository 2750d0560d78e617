"""Valid and supported are two verdicts: which valid fields today's build does not implement yet.

One row per feature. `validate` and `render` warn with these findings; the operator and `run` refuse them. Switching a
feature on is `built=True` in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_warning
from rljob_api.presets import resolve_algorithm
from rljob_api.v1alpha1.algorithm import (
    AdvantageEstimator,
    KLControllerType,
    KLPlacement,
    LossAggregation,
    PolicyLoss,
    RolloutCorrectionLevel,
)
from rljob_api.v1alpha1.base import StrEnum
from rljob_api.v1alpha1.cluster import Fabric, GangScheduler
from rljob_api.v1alpha1.data import RewardType
from rljob_api.v1alpha1.model import Toggle
from rljob_api.v1alpha1.rollout import Engine, Placement
from rljob_api.v1alpha1.spec import RLJobSpec


@dataclass(frozen=True)
class Feature:
    """A value of a field, and whether it is built."""

    path: str
    """Field path."""
    value: str
    """The value (or kind of value) that asks for the feature."""
    is_used: Callable[[RLJobSpec], bool]
    """Whether a spec asks for it."""
    alternative: str
    """What works today."""
    built: bool = False


def _list_choices(
    path: str, values: type[StrEnum], get: Callable[[RLJobSpec], StrEnum | None], built: dict[StrEnum, bool]
) -> list[Feature]:
    """One row per value of an enum; `built` names every value, so that a new one cannot be forgotten."""
    missing = set(values) - set(built)
    if missing:
        raise LookupError(f"{path}: no verdict about {', '.join(sorted(missing))}")
    working = ", ".join(str(value) for value, is_built in built.items() if is_built)

    def make(value: StrEnum) -> Callable[[RLJobSpec], bool]:
        return lambda spec: get(spec) is value

    return [Feature(path, str(value), make(value), f"use {working}", is_built) for value, is_built in built.items()]


_ESTIMATORS: Final[dict[StrEnum, bool]] = {
    AdvantageEstimator.GRPO: True,
    AdvantageEstimator.GRPO_PASS_K: True,
    AdvantageEstimator.RLOO: True,
    AdvantageEstimator.REINFORCE_PLUS_PLUS: True,
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE: True,
    AdvantageEstimator.OPO: True,
    AdvantageEstimator.GPG: True,
    AdvantageEstimator.GAE: True,
    AdvantageEstimator.REMAX: True,
    AdvantageEstimator.GDPO: True,
    AdvantageEstimator.OPTIMAL_TOKEN_BASELINE: True,
}
_POLICY_LOSSES: Final[dict[StrEnum, bool]] = {
    PolicyLoss.PPO_CLIP: True,
    PolicyLoss.GSPO: True,
    PolicyLoss.CISPO: True,
    PolicyLoss.GPG: True,
    PolicyLoss.SAPO: True,
    PolicyLoss.DRO: True,
    PolicyLoss.DPPO_TV: True,
    PolicyLoss.DPPO_KL: True,
    PolicyLoss.GMPO: True,
    PolicyLoss.CLIP_COV: True,
    PolicyLoss.KL_COV: True,
}
_AGGREGATIONS: Final[dict[StrEnum, bool]] = {
    LossAggregation.TOKEN_MEAN: True,
    LossAggregation.TOKEN_SUM: True,
    LossAggregation.SEQUENCE_MEAN_TOKEN_SUM: True,
    LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM: True,
    LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN: True,
}
_KL_PLACEMENTS: Final[dict[StrEnum, bool]] = {
    KLPlacement.NONE: True,
    KLPlacement.LOSS: True,
    KLPlacement.REWARD: True,
}
_KL_CONTROLLERS: Final[dict[StrEnum, bool]] = {KLControllerType.FIXED: True, KLControllerType.ADAPTIVE: True}
_CORRECTIONS: Final[dict[StrEnum, bool]] = {
    RolloutCorrectionLevel.NONE: True,
    RolloutCorrectionLevel.TOKEN: True,
    RolloutCorrectionLevel.SEQUENCE: True,
}
_ENGINES: Final[dict[StrEnum, bool]] = {Engine.NATIVE: True, Engine.SGLANG: True, Engine.VLLM: True}
_FABRICS: Final[dict[StrEnum, bool]] = {
    Fabric.AUTO: True,
    Fabric.TCP: True,
    Fabric.ROCE: False,
    Fabric.INFINIBAND: False,
    Fabric.EFA: False,
}
_GANG_SCHEDULERS: Final[dict[StrEnum, bool]] = {
    GangScheduler.NONE: True,
    GangScheduler.VOLCANO: False,
    GangScheduler.KAI: False,
    GangScheduler.YUNIKORN: False,
}
_REWARDS: Final[dict[RewardType, bool]] = {
    RewardType.GSM8K: True,
    RewardType.REGEX: True,
    RewardType.PYTHON: True,
    RewardType.MATH: True,
    RewardType.HTTP: True,
    RewardType.MODEL: True,
}


def _uses_reward(kind: RewardType) -> Callable[[RLJobSpec], bool]:
    return lambda spec: any(function.type is kind for function in spec.reward.functions)


def _uses_dynamic_sampling(spec: RLJobSpec) -> bool:
    sampling = resolve_algorithm(spec.algorithm, spec.rollout).dynamic_sampling
    return sampling is not None and sampling.enabled


FEATURES: Final[tuple[Feature, ...]] = (
    *_list_choices(
        "spec.algorithm.advantageEstimator",
        AdvantageEstimator,
        lambda spec: resolve_algorithm(spec.algorithm, spec.rollout).advantage_estimator,
        _ESTIMATORS,
    ),
    *_list_choices(
        "spec.algorithm.policyLoss",
        PolicyLoss,
        lambda spec: resolve_algorithm(spec.algorithm, spec.rollout).policy_loss,
        _POLICY_LOSSES,
    ),
    *_list_choices(
        "spec.algorithm.lossAggregation",
        LossAggregation,
        lambda spec: resolve_algorithm(spec.algorithm, spec.rollout).loss_aggregation,
        _AGGREGATIONS,
    ),
    *_list_choices(
        "spec.algorithm.kl.placement", KLPlacement, lambda spec: spec.algorithm.kl.placement, _KL_PLACEMENTS
    ),
    *_list_choices(
        "spec.algorithm.kl.controller.type",
        KLControllerType,
        lambda spec: spec.algorithm.kl.controller.type,
        _KL_CONTROLLERS,
    ),
    *_list_choices(
        "spec.algorithm.rolloutCorrection.level",
        RolloutCorrectionLevel,
        lambda spec: resolve_algorithm(spec.algorithm, spec.rollout).rollout_correction.level,
        _CORRECTIONS,
    ),
    Feature(
        "spec.algorithm.dynamicSampling",
        "enabled",
        _uses_dynamic_sampling,
        "set dynamicSampling: {enabled: false} and clip.high: 0.28",
        built=True,
    ),
    Feature(
        "spec.algorithm.overlongPenalty",
        "set",
        lambda spec: spec.algorithm.overlong_penalty is not None,
        "remove it, or use a Python reward function",
        built=True,
    ),
    Feature(
        "spec.algorithm.maskTruncated",
        "true",
        lambda spec: spec.algorithm.mask_truncated,
        "set it to false",
        built=True,
    ),
    Feature(
        "spec.critic",
        "set",
        lambda spec: spec.critic is not None,
        "use algorithm.type: GRPO without a critic",
        built=True,
    ),
    Feature(
        "spec.model.lora",
        "set",
        lambda spec: spec.model.lora is not None,
        "remove it: all weights are trained",
        built=True,
    ),
    Feature(
        "spec.model.gradientCheckpointing",
        "Always",
        lambda spec: spec.model.gradient_checkpointing is Toggle.ALWAYS,
        "use Auto or Never",
        built=True,
    ),
    *_list_choices("spec.rollout.engine", Engine, lambda spec: spec.rollout.engine, _ENGINES),
    Feature(
        "spec.rollout.placement",
        "Separate",
        lambda spec: spec.rollout.placement is Placement.SEPARATE,
        "use Colocated",
        built=True,
    ),
    Feature("spec.rollout.overSample", "more than 1", lambda spec: spec.rollout.over_sample > 1, "use 1.0", built=True),
    *(
        Feature("spec.reward.functions[].type", str(kind), _uses_reward(kind), "use GSM8K, Math or Http", built)
        for kind, built in _REWARDS.items()
    ),
    Feature(
        "spec.training.sequenceParallelSize",
        "more than 1",
        lambda spec: spec.training.sequence_parallel_size > 1,
        "use 1",
        built=True,
    ),
    Feature(
        "spec.training.offload.parameters",
        "true",
        lambda spec: spec.training.offload.parameters,
        "set it to false",
        built=True,
    ),
    Feature(
        "spec.training.offload.optimizer",
        "true",
        lambda spec: spec.training.offload.optimizer,
        "set it to false",
        built=True,
    ),
    Feature(
        "spec.checkpoint.exportEverySteps",
        "more than 0",
        lambda spec: spec.checkpoint.export_every_steps > 0,
        "use 0: the trained policy is exported at the end",
        built=True,
    ),
    Feature(
        "spec.tracking.tensorboard", "true", lambda spec: spec.tracking.tensorboard, "read metrics.jsonl", built=True
    ),
    Feature(
        "spec.tracking.wandb", "set", lambda spec: spec.tracking.wandb is not None, "read metrics.jsonl", built=True
    ),
    Feature(
        "spec.tracking.mlflow", "set", lambda spec: spec.tracking.mlflow is not None, "read metrics.jsonl", built=True
    ),
    Feature(
        "spec.cluster.queueName",
        "set",
        lambda spec: spec.cluster.queue_name is not None,
        "remove it: the job starts without admission",
    ),
    *_list_choices(
        "spec.cluster.gangScheduler", GangScheduler, lambda spec: spec.cluster.gang_scheduler, _GANG_SCHEDULERS
    ),
    *_list_choices("spec.network.fabric", Fabric, lambda spec: spec.network.fabric, _FABRICS),
    Feature("spec.trainer", "set", lambda spec: spec.trainer is not None, "remove it: RLJob's own trainer runs"),
)


def find_unsupported(spec: RLJobSpec) -> list[Finding]:
    """Warnings (`NotSupportedYet`) about valid fields whose feature is not built."""
    return [
        make_warning(
            feature.path,
            f"{'' if feature.value == 'set' else f'{feature.value} is '}valid but not built yet; {feature.alternative}",
            FindingReason.NOT_SUPPORTED_YET,
        )
        for feature in FEATURES
        if not feature.built and feature.is_used(spec)
    ]


def list_supported() -> list[Feature]:
    """All features, in document order, for the reference page."""
    return list(FEATURES)
