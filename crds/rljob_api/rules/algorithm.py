"""Rules about `spec.algorithm`, `spec.critic` and `spec.reference`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.presets import DISCOUNTED_ESTIMATORS, GROUP_ESTIMATORS, STD_ESTIMATORS
from rljob_api.rules.context import Rule, RuleContext, is_changed
from rljob_api.v1alpha1.algorithm import (
    AdvantageEstimator,
    KLControllerType,
    KLEstimator,
    KLPlacement,
    PolicyLoss,
)

VALUE_OF_STRAIGHT_THROUGH: Final = {
    KLEstimator.K1_STRAIGHT_THROUGH: KLEstimator.K1,
    KLEstimator.ABS_STRAIGHT_THROUGH: KLEstimator.ABS,
    KLEstimator.K3_STRAIGHT_THROUGH: KLEstimator.K3,
}


def check_group_size(context: RuleContext) -> Iterable[Finding]:
    """With one sample per prompt the baseline equals the reward and every advantage is degenerate (verl accepts it)."""
    num_samples = context.spec.rollout.samples_per_prompt
    if context.estimator in GROUP_ESTIMATORS and num_samples < 2:
        yield make_error(
            "spec.rollout.samplesPerPrompt",
            f"{num_samples} leaves nothing to compare with: {context.estimator} takes its baseline from the other "
            "samples of the prompt and needs 2 or more; for example 8",
        )


def check_critic(context: RuleContext) -> Iterable[Finding]:
    """Only GAE reads values."""
    if context.spec.critic is not None and context.estimator is not AdvantageEstimator.GAE:
        yield make_error(
            "spec.critic",
            f"{context.estimator} uses no critic; remove spec.critic, or set spec.algorithm.type: PPO",
            FindingReason.CONFLICT,
        )


def check_reference(context: RuleContext) -> Iterable[Finding]:
    """Only a KL term reads the reference policy."""
    if context.spec.reference is not None and context.algorithm.kl.placement is KLPlacement.NONE:
        yield make_error(
            "spec.reference",
            "no KL term uses the reference policy; remove spec.reference, or set spec.algorithm.kl.placement to "
            "Loss or Reward",
            FindingReason.CONFLICT,
        )


def check_kl(context: RuleContext) -> Iterable[Finding]:
    """KL fields that nothing reads (verl's scripts set `kl_coef` without `use_kl_in_reward`, which does nothing)."""
    kl = context.spec.algorithm.kl
    path = "spec.algorithm.kl"
    if kl.placement is KLPlacement.NONE:
        for name in ("coefficient", "estimator", "controller"):
            if is_changed(kl, name):
                yield make_warning(
                    f"{path}.{name}",
                    "has no effect while kl.placement is None; set kl.placement: Reward or Loss, or remove it",
                    FindingReason.NO_EFFECT,
                )
        return
    if kl.coefficient == 0:
        yield make_warning(
            f"{path}.coefficient",
            "0 loads the reference model only to report KL; set kl.placement: None to save its memory, or for example "
            "0.001",
        )
    if kl.placement is KLPlacement.REWARD and kl.estimator in VALUE_OF_STRAIGHT_THROUGH:
        value = VALUE_OF_STRAIGHT_THROUGH[kl.estimator]
        yield make_warning(
            f"{path}.estimator",
            f"{kl.estimator} differs from {value} in the gradient only, and a reward has none; use {value}, or "
            "kl.placement: Loss",
            FindingReason.NO_EFFECT,
        )
    if kl.placement is KLPlacement.REWARD and context.estimator is AdvantageEstimator.GDPO:
        yield make_error(
            f"{path}.placement",
            "GDPO normalises each reward function by itself, which leaves no place for a KL reward; use "
            "kl.placement: Loss",
            FindingReason.CONFLICT,
        )
    if kl.controller.type is KLControllerType.ADAPTIVE and kl.placement is KLPlacement.LOSS:
        yield make_error(
            f"{path}.controller.type",
            "Adaptive works with kl.placement: Reward only; use Fixed, or kl.placement: Reward",
            FindingReason.CONFLICT,
        )
    if kl.controller.type is KLControllerType.FIXED:
        for name, alias in (("target", "target"), ("horizon_samples", "horizonSamples")):
            if is_changed(kl.controller, name):
                yield make_warning(
                    f"{path}.controller.{alias}",
                    "has no effect with controller.type: Fixed; set it to Adaptive, or remove this field",
                    FindingReason.NO_EFFECT,
                )


def check_unused_estimator_fields(context: RuleContext) -> Iterable[Finding]:
    """Fields that the chosen estimator does not read."""
    algorithm = context.spec.algorithm
    unused: list[tuple[str, str, str]] = []
    if algorithm.normalize_by_std is not None and context.estimator not in STD_ESTIMATORS:
        unused.append(("normalizeByStd", "GRPO, GRPOPassK and GDPO", "remove it"))
    if is_changed(algorithm, "gamma") and context.estimator not in DISCOUNTED_ESTIMATORS:
        unused.append(("gamma", "GAE and ReinforcePlusPlus", "remove it"))
    if is_changed(algorithm, "gae_lambda") and context.estimator is not AdvantageEstimator.GAE:
        unused.append(("gaeLambda", "GAE", "remove it"))
    for name, readers, fix in unused:
        yield make_warning(
            f"spec.algorithm.{name}",
            f"has no effect with {context.estimator}, only {readers} read it; {fix}",
            FindingReason.NO_EFFECT,
        )


def check_loss_without_ratio(context: RuleContext) -> Iterable[Finding]:
    """GPG has no importance ratio: its gradient is biased from the second update of a rollout on."""
    training = context.spec.training
    num_updates = -(-training.prompts_per_step // context.mini_batch_prompts) * training.epochs_per_step
    if context.algorithm.policy_loss is PolicyLoss.GPG and num_updates > 1:
        yield make_warning(
            "spec.algorithm.policyLoss",
            f"GPG has no importance ratio, yet each rollout gets {num_updates} updates; use one update "
            "(miniBatchPrompts = promptsPerStep, epochsPerStep: 1), or policyLoss: PPOClip",
        )


def check_dynamic_sampling(context: RuleContext) -> Iterable[Finding]:
    """Constant groups can only be dropped where there are groups."""
    sampling = context.algorithm.dynamic_sampling
    if sampling is None:
        return
    if not sampling.enabled and is_changed(sampling, "max_refills"):
        yield make_warning(
            "spec.algorithm.dynamicSampling.maxRefills",
            "has no effect while enabled is false; set enabled: true, or remove it",
            FindingReason.NO_EFFECT,
        )
    if sampling.enabled and context.estimator not in GROUP_ESTIMATORS:
        yield make_error(
            "spec.algorithm.dynamicSampling.enabled",
            f"{context.estimator} has no groups to drop; set enabled: false, or a group estimator, for example GRPO",
            FindingReason.CONFLICT,
        )


def check_overlong_penalty(context: RuleContext) -> Iterable[Finding]:
    """The penalised zone lies inside the response limit."""
    penalty = context.spec.algorithm.overlong_penalty
    limit = context.spec.rollout.max_response_tokens
    if penalty is not None and penalty.buffer_tokens >= limit:
        yield make_error(
            "spec.algorithm.overlongPenalty.bufferTokens",
            f"{penalty.buffer_tokens} must be less than spec.rollout.maxResponseTokens ({limit}); for example "
            f"{max(1, limit // 5)}",
        )


ALGORITHM_RULES: Final[tuple[Rule, ...]] = (
    check_group_size,
    check_critic,
    check_reference,
    check_kl,
    check_unused_estimator_fields,
    check_loss_without_ratio,
    check_dynamic_sampling,
    check_overlong_penalty,
)
