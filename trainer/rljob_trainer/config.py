"""From job.json and the environment to a checked job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob_api.contract import ResolvedJob
from rljob_api.names import CONFIG_PATH, ENV_ATTEMPT, ENV_CONFIG, ENV_RESUME_FLOOR_STEP
from rljob_api.presets import compute_max_staleness_steps, resolve_algorithm
from rljob_api.supported import find_unsupported
from rljob_api.v1alpha1.algorithm import Algorithm, KLPlacement, PolicyLoss, RolloutCorrection
from rljob_api.v1alpha1.rollout import Placement
from rljob_trainer.algorithms.policy_losses import PolicyLossOptions
from rljob_trainer.algorithms.rollout_correction import CorrectionOptions
from rljob_trainer.distributed.engine_layout import check_engine_layout
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.telemetry.trackers.hub import check_libraries
from rljob_trainer.update import LossSettings

MAX_ERRORS_SHOWN = 5


def load_job(environment: Mapping[str, str]) -> ResolvedJob:
    """Read, validate and check the job.

    Raises:
        ConfigurationError: the file is missing or not a resolved job (with field paths), or asks for what this trainer
            does not do.
    """
    path = Path(environment.get(ENV_CONFIG, CONFIG_PATH))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{ENV_CONFIG}: {path} cannot be read ({error.strerror}); give the path of job.json"
        ) from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if isinstance(document, dict):
        document |= _read_overrides(environment)
    try:
        job = ResolvedJob.model_validate(document)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_describe(error)}") from error
    check_job(job)
    algorithm = resolve_algorithm(job.spec.algorithm, job.spec.rollout)
    return make_paths_absolute(job.model_copy(update={"spec": job.spec.model_copy(update={"algorithm": algorithm})}))


def make_paths_absolute(job: ResolvedJob) -> ResolvedJob:
    """Relative paths of a local run are relative to the driver's directory; actors may have another one."""

    def resolve(path: str | None) -> str | None:
        return path if path is None or not Path(path).exists() else str(Path(path).absolute())

    spec = job.spec
    functions = [function.model_copy(update={"path": resolve(function.path)}) for function in spec.reward.functions]
    update: dict[str, Any] = {
        "model": spec.model.model_copy(update={"source": resolve(spec.model.source)}),
        "reward": spec.reward.model_copy(update={"functions": functions}),
        "checkpoint": spec.checkpoint.model_copy(
            update={"resume_from_path": resolve(spec.checkpoint.resume_from_path)}
        ),
    }
    if spec.critic is not None:
        update["critic"] = spec.critic.model_copy(update={"source": resolve(spec.critic.source)})
    if spec.reference is not None:
        update["reference"] = spec.reference.model_copy(update={"source": resolve(spec.reference.source)})
    run_directory = str(Path(job.paths.run_directory).absolute())
    return job.model_copy(
        update={
            "spec": spec.model_copy(update=update),
            "paths": job.paths.model_copy(update={"run_directory": run_directory}),
        }
    )


def _read_overrides(environment: Mapping[str, str]) -> dict[str, int]:
    """The environment wins: an in-place retry reuses the mounted file."""
    overrides: dict[str, int] = {}
    for variable, key in ((ENV_ATTEMPT, "attempt"), (ENV_RESUME_FLOOR_STEP, "resumeFloorStep")):
        value = environment.get(variable)
        if value is None or value == "":
            continue
        if not value.isdecimal():
            raise ConfigurationError(f"{variable}={value!r} is not a whole number; use for example {variable}=1")
        overrides[key] = int(value)
    return overrides


def _describe(error: ValidationError) -> str:
    parts = [
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']} (got {item['input']!r:.80})"
        for item in error.errors()[:MAX_ERRORS_SHOWN]
    ]
    more = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def check_job(job: ResolvedJob) -> None:
    """What the operator and `rljob run` refuse, checked once more where it would otherwise train something else.

    Raises:
        ConfigurationError: an unsupported or inconsistent field.
    """
    spec, layout, training = job.spec, job.layout, job.spec.training
    check_libraries(spec.tracking)
    unsupported = find_unsupported(spec)
    if unsupported:
        raise ConfigurationError("; ".join(finding.format() for finding in unsupported))
    if layout.world_size != layout.num_nodes * layout.ranks_per_node:
        raise ConfigurationError(
            f"layout.worldSize: {layout.world_size} is not {layout.num_nodes} nodes x {layout.ranks_per_node} ranks"
        )
    _check_gpus(job)
    check_engine_layout(job.engine, layout)
    mini = training.mini_batch_prompts
    if mini is not None and training.prompts_per_step % mini:
        raise ConfigurationError(
            f"spec.training.miniBatchPrompts: {mini} does not divide promptsPerStep {training.prompts_per_step}; "
            f"use {training.prompts_per_step}"
        )
    if (training.total_steps is None) == (training.total_epochs is None):
        raise ConfigurationError(
            "spec.training: set exactly one of totalSteps and totalEpochs, for example totalSteps: 100"
        )
    if (training.micro_batch_tokens is None) == (training.micro_batch_sequences is None):
        raise ConfigurationError(
            "spec.training: job.json must have exactly one of microBatchTokens and microBatchSequences, for example "
            "microBatchTokens: 8192"
        )


def _check_gpus(job: ResolvedJob) -> None:
    """Each GPU belongs to one rank, or, with `placement: Separate`, to engines; those do not share and run ahead."""
    layout, rollout = job.layout, job.spec.rollout
    is_separate = rollout.placement is Placement.SEPARATE
    if layout.gpus_per_node and layout.gpus_per_node != layout.ranks_per_node + layout.engine_gpus_per_node:
        raise ConfigurationError(
            f"spec.cluster.ranksPerNode: {layout.ranks_per_node} ranks and {layout.engine_gpus_per_node} GPUs for "
            f"engines on {layout.gpus_per_node} GPUs; a rank has one GPU, so use ranksPerNode: {layout.gpus_per_node}, "
            "rollout.placement: Separate, or gpusPerNode: 0 to train on CPUs"
        )
    if bool(layout.engine_gpus_per_node) != (is_separate and layout.gpus_per_node > 0):
        raise ConfigurationError(
            f"layout.engineGpusPerNode: {layout.engine_gpus_per_node} does not fit spec.rollout.placement "
            f"{rollout.placement} with {layout.gpus_per_node} GPUs per node; with Separate it is gpusPerNode - "
            "ranksPerNode, else 0"
        )
    if compute_max_staleness_steps(rollout) and not is_separate:
        raise ConfigurationError(
            f"spec.rollout.maxStalenessSteps: {rollout.max_staleness_steps} needs engines that run beside training; "
            "use 0, or placement: Separate"
        )


def compute_updates_per_rollout(job: ResolvedJob) -> int:
    """Optimizer updates between two rollouts."""
    training = job.spec.training
    mini = training.mini_batch_prompts or training.prompts_per_step
    return training.prompts_per_step // mini * training.epochs_per_step


def build_loss_settings(job: ResolvedJob) -> LossSettings:
    """What the ranks minimise."""
    algorithm = job.spec.algorithm
    if algorithm.policy_loss is None or algorithm.loss_aggregation is None:
        raise ConfigurationError("spec.algorithm: job.json is not resolved (policyLoss and lossAggregation are needed)")
    correction = algorithm.rollout_correction
    return LossSettings(
        policy_loss=algorithm.policy_loss,
        aggregation=algorithm.loss_aggregation,
        temperature=job.spec.rollout.temperature,
        norm_tokens=job.spec.rollout.max_response_tokens,
        entropy_coefficient=algorithm.entropy_coefficient,
        loss_kl_estimator=algorithm.kl.estimator if algorithm.kl.placement is KLPlacement.LOSS else None,
        options=build_policy_loss_options(algorithm),
        bypass_correction=build_correction_options(correction) if correction.bypass_old_log_probs else None,
    )


def build_policy_loss_options(algorithm: Algorithm) -> PolicyLossOptions:
    """The constants of a resolved algorithm's policy loss."""
    clip, options = algorithm.clip, algorithm.loss_options
    if clip.low is None or clip.high is None:
        raise ConfigurationError("spec.algorithm.clip: job.json is not resolved (low and high are needed)")
    is_clip_cov = algorithm.policy_loss is PolicyLoss.CLIP_COV
    return PolicyLossOptions(
        clip_low=clip.low,
        clip_high=clip.high,
        clip_dual=clip.dual,
        ratio_cap=options.dppo_ratio_cap,
        tau_positive=options.sapo_tau_positive,
        tau_negative=options.sapo_tau_negative,
        dro_beta=options.dro_beta,
        cov_fraction=options.clip_cov_fraction if is_clip_cov else options.kl_cov_fraction,
        cov_low=options.clip_cov_low,
        cov_high=options.clip_cov_high,
        kl_cov_coefficient=options.kl_cov_coefficient,
    )


def build_correction_options(correction: RolloutCorrection) -> CorrectionOptions:
    """The resolved rollout correction as the algorithm's function takes it."""
    if correction.level is None:
        raise ConfigurationError("spec.algorithm.rolloutCorrection: job.json is not resolved (level is needed)")
    return CorrectionOptions(
        level=correction.level,
        truncation=correction.truncation,
        floor=correction.floor,
        normalize=correction.normalize,
        rejection=tuple(correction.rejection),
    )
