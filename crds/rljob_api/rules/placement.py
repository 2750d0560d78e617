"""Rules about `spec.rollout.placement`: engines with GPUs of their own, and how stale their samples may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.presets import compute_max_staleness_steps
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.rules.losses import CORRECTION
from rljob_api.v1alpha1.algorithm import RolloutCorrectionLevel
from rljob_api.v1alpha1.data import RewardType
from rljob_api.v1alpha1.rollout import Placement

_EXAMPLE_ENGINE_SHARE: Final = 4
"""One GPU in so many is for engines in the examples of messages."""


def check_separate_gpus(context: RuleContext) -> Iterable[Finding]:
    """A pod's GPUs are split: `ranksPerNode` train, the others generate."""
    cluster = context.spec.cluster
    gpus, ranks = cluster.gpus_per_node, cluster.ranks_per_node
    if context.spec.rollout.placement is not Placement.SEPARATE or gpus == 0:
        return
    if gpus == 1:
        yield make_error(
            "spec.cluster.gpusPerNode",
            "1 GPU cannot be split between ranks and engines with spec.rollout.placement Separate; use for example "
            "gpusPerNode: 2 with ranksPerNode: 1, or placement: Colocated",
            FindingReason.CONFLICT,
        )
    elif ranks is None or ranks == gpus:
        num_engine_gpus = max(1, gpus // _EXAMPLE_ENGINE_SHARE)
        given = "required" if ranks is None else f"{ranks} leaves no GPU for engines"
        yield make_error(
            "spec.cluster.ranksPerNode",
            f"{given} with spec.rollout.placement Separate and gpusPerNode {gpus}; for example use ranksPerNode: "
            f"{gpus - num_engine_gpus}, which leaves {num_engine_gpus} of the {gpus} GPUs of a pod to engines",
            FindingReason.MISSING_FIELD if ranks is None else FindingReason.CONFLICT,
        )


def check_staleness(context: RuleContext) -> Iterable[Finding]:
    """Engines that share the trainer's GPUs do not run while it trains."""
    rollout = context.spec.rollout
    if rollout.placement is Placement.COLOCATED and rollout.max_staleness_steps:
        yield make_error(
            "spec.rollout.maxStalenessSteps",
            f"{rollout.max_staleness_steps} lets rollout run ahead of the training, which needs engines with GPUs of "
            "their own; use 0, or placement: Separate",
            FindingReason.CONFLICT,
        )


def check_stale_correction(context: RuleContext) -> Iterable[Finding]:
    """Samples of older weights are off policy; somebody switched off what accounts for that."""
    correction = context.algorithm.rollout_correction
    staleness = compute_max_staleness_steps(context.spec.rollout)
    if staleness and correction.level is RolloutCorrectionLevel.NONE and not correction.bypass_old_log_probs:
        yield make_warning(
            f"{CORRECTION}.level",
            f"None takes samples of weights that are {staleness} step old for the policy's own, which biases every "
            "gradient; use Token, Sequence, or bypassOldLogProbs: true",
        )


def check_separate_reward_models(context: RuleContext) -> Iterable[Finding]:
    """The plan of a GPU's memory does not know them, and with Separate nobody makes room for them."""
    spec = context.spec
    if spec.rollout.placement is not Placement.SEPARATE or spec.cluster.gpus_per_node == 0:
        return
    for index, function in enumerate(spec.reward.functions):
        if function.type is RewardType.MODEL:
            yield make_warning(
                f"spec.reward.functions[{index}].type",
                "Model puts a copy of the reward model on every GPU of a pod, where it scores while ranks train and "
                "engines generate; leave room with training.microBatchTokens and rollout.memoryFraction, or use Http",
            )


PLACEMENT_RULES: Final[tuple[Rule, ...]] = (
    check_separate_gpus,
    check_staleness,
    check_stale_correction,
    check_separate_reward_models,
)
