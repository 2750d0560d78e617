"""Rules about `spec.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.rules.context import Rule, RuleContext
from rljob_api.targets import Target
from rljob_api.v1alpha1.rollout import Resume

_STORAGE: Final = "spec.checkpoint.storage"


def check_storage(context: RuleContext) -> Iterable[Finding]:
    """In a cluster checkpoints need a volume: pods and their disks come and go."""
    storage = context.spec.checkpoint.storage
    if context.target is Target.LOCAL:
        return
    if storage.claim_name is None and storage.host_path is None:
        yield make_error(
            f"{_STORAGE}.claimName",
            "one of claimName and hostPath is required in a cluster; for example claimName: checkpoints",
            FindingReason.MISSING_FIELD,
        )
    if storage.claim_name is not None and storage.host_path is not None:
        yield make_error(
            f"{_STORAGE}.hostPath",
            f"claimName ({storage.claim_name}) and hostPath ({storage.host_path}) exclude each other; keep claimName",
            FindingReason.CONFLICT,
        )
    if storage.path is not None and (storage.path.startswith("/") or ".." in storage.path.split("/")):
        yield make_error(
            f"{_STORAGE}.path",
            f"{storage.path!r} must be a directory inside the volume, without a leading / and without ..; for example "
            "team-a/runs",
        )
    if storage.host_path is not None and context.spec.cluster.nodes > 1:
        yield make_warning(
            f"{_STORAGE}.hostPath",
            f"{storage.host_path} must be the same shared storage on all nodes, {context.spec.cluster.nodes} of them "
            "write parts of each checkpoint; a ReadWriteMany claim says so to the scheduler",
        )


def check_checkpoint_interval(context: RuleContext) -> Iterable[Finding]:
    """Without checkpoints every retry begins at step 0 (verl's documented script: save_freq -1)."""
    spec = context.spec
    every, total, retries = spec.checkpoint.every_steps, spec.training.total_steps, spec.failure_policy.max_retries
    path = "spec.checkpoint.everySteps"
    if retries == 0:
        return
    if every == 0:
        yield make_warning(
            path,
            f"0 saves only at the end, so each of up to {retries} retries begins at step 0; for example 20",
        )
    elif total is not None and every >= total:
        yield make_warning(
            path,
            f"{every} saves nothing before the end of {total} steps, so a retry begins at step 0; for example "
            f"{max(1, total // 5)}",
        )


def check_resume(context: RuleContext) -> Iterable[Finding]:
    """Contradictory orders about where to start."""
    checkpoint = context.spec.checkpoint
    if checkpoint.resume is Resume.NEVER and checkpoint.resume_from_path is not None:
        yield make_error(
            "spec.checkpoint.resume",
            "Never and resumeFromPath exclude each other; use resume: Auto, or remove resumeFromPath",
            FindingReason.CONFLICT,
        )
    if checkpoint.resume is Resume.NEVER and checkpoint.adopt:
        yield make_error(
            "spec.checkpoint.adopt",
            "true and resume: Never exclude each other; use resume: Auto, or adopt: false",
            FindingReason.CONFLICT,
        )


CHECKPOINT_RULES: Final[tuple[Rule, ...]] = (check_storage, check_checkpoint_interval, check_resume)
