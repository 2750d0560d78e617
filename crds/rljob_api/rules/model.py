"""Rules about `spec.critic` and `spec.model.lora`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.v1alpha1.algorithm import KLPlacement


def check_critic_warmup(context: RuleContext) -> Iterable[Finding]:
    """The policy is not updated while the critic warms up."""
    critic, total_steps = context.spec.critic, context.spec.training.total_steps
    if critic is not None and total_steps is not None and critic.warmup_steps >= total_steps:
        yield make_error(
            "spec.critic.warmupSteps",
            f"{critic.warmup_steps} of {total_steps} steps train the critic alone, so the policy is never trained; for "
            f"example {total_steps // 10}",
            FindingReason.CONFLICT,
        )


def check_adapted_reference(context: RuleContext) -> Iterable[Finding]:
    """With adapters the reference is the policy without them; the warm start trains adapters."""
    spec = context.spec
    own_reference = spec.reference is not None and spec.reference.source not in (None, spec.model.source)
    uses_reference = context.algorithm.kl.placement is not KLPlacement.NONE
    if spec.model.lora is not None and spec.warm_start is not None and uses_reference and not own_reference:
        yield make_warning(
            "spec.reference.source",
            "with model.lora the KL term refers to model.source as it is, not to the policy after the warm start; set "
            "it to an exported warm-started model, or set kl.placement: None",
        )


MODEL_RULES: Final[tuple[Rule, ...]] = (check_critic_warmup, check_adapted_reference)
