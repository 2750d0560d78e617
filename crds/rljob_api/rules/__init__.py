"""The rules that a schema cannot say: one named function per rule, one list of rules.

The same rules serve `rljob validate`, `rljob run` and the operator's Validated condition; the CRD's CEL repeats those
that CEL can express, so that `kubectl apply` already refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rljob_api.findings import Finding, Severity
from rljob_api.rules.algorithm import ALGORITHM_RULES
from rljob_api.rules.checkpoint import CHECKPOINT_RULES
from rljob_api.rules.cluster import CLUSTER_RULES
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.rules.data import DATA_RULES
from rljob_api.rules.environment import ENVIRONMENT_RULES
from rljob_api.rules.lifecycle import LIFECYCLE_RULES
from rljob_api.rules.losses import LOSS_RULES
from rljob_api.rules.model import MODEL_RULES
from rljob_api.rules.placement import PLACEMENT_RULES
from rljob_api.rules.pods import POD_RULES
from rljob_api.rules.rollout import ROLLOUT_RULES
from rljob_api.rules.sizes import SIZE_RULES
from rljob_api.targets import Target
from rljob_api.v1alpha1.spec import RLJob

__all__ = ["RULES", "Rule", "RuleContext", "Target", "check_job"]

RULES: Final[tuple[Rule, ...]] = (
    *LIFECYCLE_RULES,
    *ALGORITHM_RULES,
    *LOSS_RULES,
    *MODEL_RULES,
    *DATA_RULES,
    *ROLLOUT_RULES,
    *PLACEMENT_RULES,
    *SIZE_RULES,
    *CHECKPOINT_RULES,
    *CLUSTER_RULES,
    *POD_RULES,
    *ENVIRONMENT_RULES,
)


def check_job(
    job: RLJob,
    *,
    model_config: Mapping[str, Any] | None = None,
    num_train_rows: int | None = None,
    target: Target = Target.KUBERNETES,
) -> list[Finding]:
    """Everything that is wrong or risky with a parsed job, errors first.

    Args:
        job: what `parse_job` returned.
        model_config: the model's config.json where it can be read: heads, context length.
        num_train_rows: rows of `data.train` where known: steps per epoch, dropped rows.
        target: cluster or local run.
    """
    context = RuleContext(job=job, model_config=model_config, num_train_rows=num_train_rows, target=target)
    findings = [finding for rule in RULES for finding in rule(context)]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)
