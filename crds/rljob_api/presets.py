"""What `spec.algorithm.type` stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rljob_api.v1alpha1.algorithm import (
    AdvantageEstimator,
    Algorithm,
    AlgorithmType,
    Clip,
    DynamicSampling,
    LossAggregation,
    PolicyLoss,
    RolloutCorrection,
    RolloutCorrectionLevel,
)
from rljob_api.v1alpha1.rollout import Placement, Rollout


@dataclass(frozen=True)
class LossDefaults:
    """Defaults that belong to a policy loss, whichever preset chose it."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN


DEFAULTS_OF_LOSS: Final[dict[PolicyLoss, LossDefaults]] = {
    # arXiv 2507.18071, section 5.1: the sequence ratio is a geometric mean, so its clip range is tiny.
    PolicyLoss.GSPO: LossDefaults(3e-4, 4e-4, LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    # SAPO (arXiv 2511.20347) averages per sequence and has a soft gate instead of a clip range.
    PolicyLoss.SAPO: LossDefaults(loss_aggregation=LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    # arXiv 2507.20673: the log-ratio stays within +-0.4; the loss is one product per sequence.
    PolicyLoss.GMPO: LossDefaults(0.4, 0.4, LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    # arXiv 2602.04879: bounds of a divergence, not of a ratio.
    PolicyLoss.DPPO_TV: LossDefaults(0.15, 0.15),
    PolicyLoss.DPPO_KL: LossDefaults(0.05, 0.05),
    # arXiv 2505.22617: the covariance decides which tokens are clipped, the ratio only in the extreme.
    PolicyLoss.CLIP_COV: LossDefaults(1.0, 1.0),
}


@dataclass(frozen=True)
class Preset:
    """Estimator, loss and options of an algorithm; None takes the default of the policy loss."""

    estimator: AdvantageEstimator
    source: str
    policy_loss: PolicyLoss = PolicyLoss.PPO_CLIP
    loss_aggregation: LossAggregation | None = None
    normalize_by_std: bool = False
    clip_high: float | None = None
    dynamic_sampling: bool = False


PRESETS: Final[dict[AlgorithmType, Preset]] = {
    AlgorithmType.GRPO: Preset(AdvantageEstimator.GRPO, "arXiv 2402.03300", normalize_by_std=True),
    AlgorithmType.DR_GRPO: Preset(
        AdvantageEstimator.GRPO, "arXiv 2503.20783", loss_aggregation=LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM
    ),
    AlgorithmType.DAPO: Preset(
        AdvantageEstimator.GRPO, "arXiv 2503.14476", normalize_by_std=True, clip_high=0.28, dynamic_sampling=True
    ),
    AlgorithmType.GSPO: Preset(
        AdvantageEstimator.GRPO, "arXiv 2507.18071", policy_loss=PolicyLoss.GSPO, normalize_by_std=True
    ),
    AlgorithmType.CISPO: Preset(
        AdvantageEstimator.GRPO, "arXiv 2506.13585", policy_loss=PolicyLoss.CISPO, normalize_by_std=True
    ),
    AlgorithmType.PPO: Preset(AdvantageEstimator.GAE, "arXiv 1707.06347"),
    AlgorithmType.RLOO: Preset(AdvantageEstimator.RLOO, "arXiv 2402.14740"),
    AlgorithmType.REINFORCE_PLUS_PLUS: Preset(AdvantageEstimator.REINFORCE_PLUS_PLUS, "arXiv 2501.03262"),
    AlgorithmType.REINFORCE_PLUS_PLUS_BASELINE: Preset(
        AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE, "arXiv 2501.03262"
    ),
    AlgorithmType.REMAX: Preset(AdvantageEstimator.REMAX, "arXiv 2310.10505"),
    AlgorithmType.OPO: Preset(AdvantageEstimator.OPO, "arXiv 2505.23585"),
    AlgorithmType.GPG: Preset(AdvantageEstimator.GPG, "arXiv 2504.02546", policy_loss=PolicyLoss.GPG),
}

GROUP_ESTIMATORS: Final = frozenset(
    {
        AdvantageEstimator.GRPO,
        AdvantageEstimator.GRPO_PASS_K,
        AdvantageEstimator.RLOO,
        AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
        AdvantageEstimator.OPO,
        AdvantageEstimator.GPG,
        AdvantageEstimator.GDPO,
        AdvantageEstimator.OPTIMAL_TOKEN_BASELINE,
    }
)
"""Estimators whose baseline comes from the other samples of the prompt: one sample has no signal."""

STD_ESTIMATORS: Final = frozenset({AdvantageEstimator.GRPO, AdvantageEstimator.GRPO_PASS_K, AdvantageEstimator.GDPO})
"""Estimators that read `normalizeByStd`."""

CLIPPED_LOSSES: Final = frozenset(
    {
        PolicyLoss.PPO_CLIP,
        PolicyLoss.GSPO,
        PolicyLoss.CISPO,
        PolicyLoss.GMPO,
        PolicyLoss.DPPO_TV,
        PolicyLoss.DPPO_KL,
        PolicyLoss.CLIP_COV,
    }
)
"""Losses that read `clip.low` and `clip.high`."""

READERS_OF_LOSS_OPTIONS: Final[dict[str, frozenset[PolicyLoss]]] = {
    "sapo_tau_positive": frozenset({PolicyLoss.SAPO}),
    "sapo_tau_negative": frozenset({PolicyLoss.SAPO}),
    "dro_beta": frozenset({PolicyLoss.DRO}),
    "dppo_ratio_cap": frozenset({PolicyLoss.DPPO_TV, PolicyLoss.DPPO_KL}),
    "clip_cov_fraction": frozenset({PolicyLoss.CLIP_COV}),
    "clip_cov_low": frozenset({PolicyLoss.CLIP_COV}),
    "clip_cov_high": frozenset({PolicyLoss.CLIP_COV}),
    "kl_cov_fraction": frozenset({PolicyLoss.KL_COV}),
    "kl_cov_coefficient": frozenset({PolicyLoss.KL_COV}),
}
"""Which losses read a field of `lossOptions`."""

DISCOUNTED_ESTIMATORS: Final = frozenset({AdvantageEstimator.GAE, AdvantageEstimator.REINFORCE_PLUS_PLUS})
"""Estimators that read `gamma`."""


def compute_max_staleness_steps(rollout: Rollout) -> int:
    """`maxStalenessSteps`, by default one step where engines have GPUs of their own, else none."""
    if rollout.max_staleness_steps is not None:
        return rollout.max_staleness_steps
    return 1 if rollout.placement is Placement.SEPARATE else 0


def resolve_algorithm(algorithm: Algorithm, rollout: Rollout | None = None) -> Algorithm:
    """The algorithm with every optional part filled: what the user set, else the preset's, else the policy loss's.

    A policy loss that overrides the preset's brings its own clip range and aggregation: GSPO with PPO's clip range
    would never clip. `overlong_penalty` stays absent when absent: its length has no default.

    Args:
        algorithm: as written.
        rollout: decides whether samples may be of older weights, which a correction then is on for; default: not.
    """
    preset = PRESETS[algorithm.type]
    policy_loss = algorithm.policy_loss or preset.policy_loss
    of_loss = DEFAULTS_OF_LOSS.get(policy_loss, LossDefaults())
    keeps_loss = policy_loss is preset.policy_loss
    default_high = preset.clip_high if keeps_loss and preset.clip_high is not None else of_loss.clip_high
    default_aggregation = (preset.loss_aggregation if keeps_loss else None) or of_loss.loss_aggregation
    estimator = algorithm.advantage_estimator or preset.estimator
    default_normalize = preset.normalize_by_std if estimator is preset.estimator else estimator in STD_ESTIMATORS
    clip = algorithm.clip
    return algorithm.model_copy(
        update={
            "advantage_estimator": estimator,
            "policy_loss": policy_loss,
            "loss_aggregation": algorithm.loss_aggregation or default_aggregation,
            "normalize_by_std": default_normalize if algorithm.normalize_by_std is None else algorithm.normalize_by_std,
            "clip": Clip(
                low=of_loss.clip_low if clip.low is None else clip.low,
                high=default_high if clip.high is None else clip.high,
                dual=clip.dual,
            ),
            "dynamic_sampling": algorithm.dynamic_sampling or DynamicSampling(enabled=preset.dynamic_sampling),
            "rollout_correction": _resolve_correction(
                algorithm.rollout_correction,
                policy_loss,
                is_stale=rollout is not None and compute_max_staleness_steps(rollout) > 0,
            ),
        }
    )


def _resolve_correction(correction: RolloutCorrection, policy_loss: PolicyLoss, *, is_stale: bool) -> RolloutCorrection:
    """Samples of older weights get token weights, unless the loss's own ratio already corrects them (bypass)."""
    if correction.level is not None:
        return correction
    ratio_corrects = correction.bypass_old_log_probs and policy_loss is not PolicyLoss.GPG
    level = RolloutCorrectionLevel.TOKEN if is_stale and not ratio_corrects else RolloutCorrectionLevel.NONE
    return correction.model_copy(update={"level": level})
