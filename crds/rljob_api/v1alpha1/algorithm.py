"""`spec.algorithm`: which advantage estimator, which policy loss, which options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, PositiveInt32, StrEnum


class AlgorithmType(StrEnum):
    """A preset of estimator, loss and options; every part can be overridden."""

    GRPO = "GRPO"
    DR_GRPO = "DrGRPO"
    DAPO = "DAPO"
    GSPO = "GSPO"
    CISPO = "CISPO"
    PPO = "PPO"
    RLOO = "RLOO"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    REINFORCE_PLUS_PLUS_BASELINE = "ReinforcePlusPlusBaseline"
    REMAX = "ReMax"
    OPO = "OPO"
    GPG = "GPG"


class AdvantageEstimator(StrEnum):
    """How rewards become per-token advantages."""

    GAE = "GAE"
    GRPO = "GRPO"
    GRPO_PASS_K = "GRPOPassK"
    RLOO = "RLOO"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    REINFORCE_PLUS_PLUS_BASELINE = "ReinforcePlusPlusBaseline"
    REMAX = "ReMax"
    OPO = "OPO"
    GPG = "GPG"
    GDPO = "GDPO"
    OPTIMAL_TOKEN_BASELINE = "OptimalTokenBaseline"


class PolicyLoss(StrEnum):
    """The per-token policy objective."""

    PPO_CLIP = "PPOClip"
    GSPO = "GSPO"
    SAPO = "SAPO"
    CISPO = "CISPO"
    GPG = "GPG"
    DRO = "DRO"
    DPPO_TV = "DPPOTV"
    DPPO_KL = "DPPOKL"
    GMPO = "GMPO"
    CLIP_COV = "ClipCov"
    KL_COV = "KLCov"


class LossAggregation(StrEnum):
    """How per-token losses of a mini-batch become one number (global denominators)."""

    TOKEN_MEAN = "TokenMean"
    TOKEN_SUM = "TokenSum"
    SEQUENCE_MEAN_TOKEN_SUM = "SequenceMeanTokenSum"
    SEQUENCE_MEAN_TOKEN_SUM_NORM = "SequenceMeanTokenSumNorm"
    SEQUENCE_MEAN_TOKEN_MEAN = "SequenceMeanTokenMean"


class KLPlacement(StrEnum):
    """Where the KL term to the reference policy enters."""

    NONE = "None"
    REWARD = "Reward"
    LOSS = "Loss"


class KLEstimator(StrEnum):
    """Sample estimator of KL(policy || reference); see Schulman, "Approximating KL divergence" (2020)."""

    K1 = "K1"
    ABS = "Abs"
    K2 = "K2"
    K3 = "K3"
    K1_STRAIGHT_THROUGH = "K1StraightThrough"
    K3_STRAIGHT_THROUGH = "K3StraightThrough"


class KLControllerType(StrEnum):
    """Whether the KL coefficient follows a target."""

    FIXED = "Fixed"
    ADAPTIVE = "Adaptive"


class KLController(ApiModel):
    """Controller of the KL coefficient (used with `placement: Reward`)."""

    type: KLControllerType = KLControllerType.FIXED
    """Fixed keeps `coefficient`; Adaptive moves it towards `target`."""
    target: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """KL in nats per token that Adaptive aims at."""
    horizon_samples: PositiveInt32 = 10_000
    """Samples over which Adaptive corrects a full error."""


class KL(ApiModel):
    """The KL term to the reference policy. Without a placement no reference model is loaded."""

    placement: KLPlacement = KLPlacement.NONE
    """None: no KL term. Reward: subtracted from token rewards. Loss: added to the loss."""
    coefficient: Annotated[float, Field(ge=0, le=1000)] = 0.001
    """Weight of the KL term."""
    estimator: KLEstimator = KLEstimator.K3
    """Estimator per token."""
    controller: KLController = KLController()
    """Fixed or adaptive coefficient."""


class Clip(ApiModel):
    """Clipping of the importance ratio."""

    low: Annotated[float, Field(ge=0, le=100)] | None = None
    """Ratio is clipped below at 1 - low. Default by `algorithm.type`: 0.2 (GSPO 0.0003)."""
    high: Annotated[float, Field(ge=0, le=100)] | None = None
    """Ratio is clipped above at 1 + high. Default by `algorithm.type`: 0.2 (DAPO 0.28, GSPO 0.0004, CISPO 0.2)."""
    dual: Annotated[float, Field(gt=1, le=1000)] = 3.0
    """Upper bound of the loss for negative advantages, as a multiple of |advantage| (dual-clip PPO, arXiv 1912.09729);
    1000 never binds."""


class DynamicSampling(ApiModel):
    """DAPO's dynamic sampling: groups whose rewards are all equal are dropped and prompts are refilled."""

    enabled: bool = False
    """Whether constant groups are dropped."""
    max_refills: NonNegativeInt32 = 3
    """At most this many extra rollout rounds per step."""


class OverlongPenalty(ApiModel):
    """DAPO's soft penalty for responses close to the length limit (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: PositiveInt32
    """Length of the penalised zone before `rollout.maxResponseTokens`, in tokens."""
    factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Penalty at the limit, in reward units."""


class RolloutCorrectionLevel(StrEnum):
    """Granularity of the importance weights between trainer and engine."""

    NONE = "None"
    TOKEN = "Token"
    SEQUENCE = "Sequence"


class RolloutCorrection(ApiModel):
    """Importance correction for the mismatch of trainer and engine log-probabilities."""

    level: RolloutCorrectionLevel = RolloutCorrectionLevel.NONE
    """Token or sequence weights; None switches the correction off."""
    truncation: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Weights above this are truncated to it."""


class Algorithm(ApiModel):
    """Which RL algorithm trains the policy. `type` is a preset; every other field overrides a part of it."""

    type: AlgorithmType = AlgorithmType.GRPO
    """The preset: estimator, policy loss and options."""
    advantage_estimator: AdvantageEstimator | None = None
    """Overrides the preset's advantage estimator."""
    policy_loss: PolicyLoss | None = None
    """Overrides the preset's policy loss."""
    loss_aggregation: LossAggregation | None = None
    """Overrides how token losses are aggregated. Default by preset: TokenMean (DrGRPO SequenceMeanTokenSumNorm,
    GSPO SequenceMeanTokenMean)."""
    normalize_by_std: bool | None = None
    """Divide group advantages by the group's standard deviation. Default by preset: true (DrGRPO false)."""
    kl: KL = KL()
    """KL term to the reference policy."""
    clip: Clip = Clip()
    """Ratio clipping."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token (GAE, REINFORCE++)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE lambda."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the entropy bonus."""
    dynamic_sampling: DynamicSampling | None = None
    """Dropping of constant groups. Default by preset: off (DAPO on)."""
    overlong_penalty: OverlongPenalty | None = None
    """Soft length penalty; off when absent."""
    mask_truncated: bool = False
    """Leave responses that hit the length limit out of the loss (numerator and denominator)."""
    rollout_correction: RolloutCorrection = RolloutCorrection()
    """Importance correction between engine and trainer log-probabilities."""
