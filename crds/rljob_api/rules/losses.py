"""Rules about the policy loss: its constants, its aggregation, and the correction between trainer and engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic.alias_generators import to_camel

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.presets import CLIPPED_LOSSES, READERS_OF_LOSS_OPTIONS
from rljob_api.rules.context import Rule, RuleContext, is_changed
from rljob_api.v1alpha1.algorithm import (
    LossAggregation,
    PolicyLoss,
    RejectionScope,
    RejectionStatistic,
    RolloutCorrectionLevel,
)

CORRECTION: Final = "spec.algorithm.rolloutCorrection"


def check_clip(context: RuleContext) -> Iterable[Finding]:
    """Clip ranges that the policy loss does not read."""
    clip, loss = context.spec.algorithm.clip, context.algorithm.policy_loss
    for name, readers in (
        ("low", CLIPPED_LOSSES),
        ("high", CLIPPED_LOSSES),
        ("dual", frozenset({PolicyLoss.PPO_CLIP})),
    ):
        if is_changed(clip, name) and loss not in readers:
            names = ", ".join(sorted(readers))
            yield make_warning(
                f"spec.algorithm.clip.{name}",
                f"has no effect with {loss}, only {names} read it; remove it, or set policyLoss: PPOClip",
                FindingReason.NO_EFFECT,
            )


def check_loss_options(context: RuleContext) -> Iterable[Finding]:
    """Constants of losses that are not used."""
    options, loss = context.spec.algorithm.loss_options, context.algorithm.policy_loss
    for name, readers in READERS_OF_LOSS_OPTIONS.items():
        if is_changed(options, name) and loss not in readers:
            yield make_warning(
                f"spec.algorithm.lossOptions.{to_camel(name)}",
                f"has no effect with {loss}; remove it, or set policyLoss: {min(readers)}",
                FindingReason.NO_EFFECT,
            )
    if options.clip_cov_low >= options.clip_cov_high:
        yield make_error(
            "spec.algorithm.lossOptions.clipCovLow",
            f"{options.clip_cov_low:g} must be less than clipCovHigh ({options.clip_cov_high:g}); for example 1 and 5",
        )


def check_loss_aggregation(context: RuleContext) -> Iterable[Finding]:
    """GMPO is one product per sequence: sums over its tokens mean nothing."""
    algorithm = context.algorithm
    if (
        algorithm.policy_loss is PolicyLoss.GMPO
        and algorithm.loss_aggregation is not LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN
    ):
        yield make_error(
            "spec.algorithm.lossAggregation",
            f"{algorithm.loss_aggregation} does not fit policyLoss GMPO, whose loss is one product per sequence; use "
            "SequenceMeanTokenMean",
            FindingReason.CONFLICT,
        )


def check_rollout_correction(context: RuleContext) -> Iterable[Finding]:
    """Fields of the weights without weights, and an empty band."""
    correction = context.algorithm.rollout_correction
    if correction.level is RolloutCorrectionLevel.NONE:
        for name in ("truncation", "floor", "normalize"):
            if is_changed(correction, name):
                yield make_warning(
                    f"{CORRECTION}.{name}",
                    "has no effect while level is None; set level: Token or Sequence, or remove it",
                    FindingReason.NO_EFFECT,
                )
    if correction.floor is not None and correction.floor >= correction.truncation:
        yield make_error(
            f"{CORRECTION}.floor",
            f"{correction.floor:g} must be less than truncation ({correction.truncation:g}); for example 0.5 and 2",
        )


def check_rejection(context: RuleContext) -> Iterable[Finding]:
    """Bounds of rejection rules."""
    for index, rule in enumerate(context.spec.algorithm.rollout_correction.rejection):
        path = f"{CORRECTION}.rejection[{index}]"
        is_ratio = rule.statistic is RejectionStatistic.K1
        if is_ratio and rule.scope is RejectionScope.SEQUENCE_MAX:
            yield make_error(
                f"{path}.scope",
                "SequenceMax has no meaning for the signed K1; use statistic K2 or K3",
                FindingReason.CONFLICT,
            )
        if rule.lower is not None and not is_ratio:
            yield make_error(
                f"{path}.lower",
                f"{rule.statistic} is never negative and has no lower bound; remove lower, or use statistic K1",
                FindingReason.CONFLICT,
            )
        elif rule.lower is not None and rule.lower >= rule.upper:
            yield make_error(
                f"{path}.lower", f"{rule.lower:g} must be less than upper ({rule.upper:g}); for example 0.7 and 1.4"
            )


def check_bypass(context: RuleContext) -> Iterable[Finding]:
    """With the engine's log-probabilities as the old ones the ratio is the weight: it would count twice."""
    correction, loss = context.algorithm.rollout_correction, context.algorithm.policy_loss
    if not correction.bypass_old_log_probs:
        return
    if correction.level is not RolloutCorrectionLevel.NONE and loss is not PolicyLoss.GPG:
        yield make_error(
            f"{CORRECTION}.level",
            f"with bypassOldLogProbs the ratio of {loss} corrects the mismatch already; use level: None, or "
            "policyLoss: GPG, which has no ratio",
            FindingReason.CONFLICT,
        )
    if correction.normalize:
        yield make_error(
            f"{CORRECTION}.normalize",
            "needs the mean weight of the whole step, which is not known while the policy moves; set it to false, or "
            "bypassOldLogProbs: false",
            FindingReason.CONFLICT,
        )


LOSS_RULES: Final[tuple[Rule, ...]] = (
    check_clip,
    check_loss_options,
    check_loss_aggregation,
    check_rollout_correction,
    check_rejection,
    check_bypass,
)
