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
    ABS_STRAIGHT_THROUGH = "AbsStraightThrough"
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
    """Estimator per token. StraightThrough has the value of the named estimator and the gradient of K2, which is the
    unbiased gradient of the KL (for `placement: Loss`)."""
    controller: KLController = KLController()
    """Fixed or adaptive coefficient."""


class Clip(ApiModel):
    """Clipping of the importance ratio."""

    low: Annotated[float, Field(ge=0, le=100)] | None = None
    """Ratio is clipped below at 1 - low (GMPO: log-ratio at -low; DPPO: bound of the divergence for negative
    advantages). Default by policy loss: 0.2 (GSPO 0.0003, GMPO 0.4, DPPOTV 0.15, DPPOKL 0.05, ClipCov 1)."""
    high: Annotated[float, Field(ge=0, le=100)] | None = None
    """Ratio is clipped above at 1 + high (GMPO: log-ratio at high; DPPO: bound of the divergence for positive
    advantages). Default by policy loss: 0.2 (DAPO 0.28, GSPO 0.0004, GMPO 0.4, DPPOTV 0.15, DPPOKL 0.05, ClipCov 1)."""
    dual: Annotated[float, Field(gt=1, le=1000)] = 3.0
    """PPOClip: upper bound of the loss for negative advantages, as a multiple of |advantage| (dual-clip PPO, arXiv
    1912.09729); 1000 never binds."""


class LossOptions(ApiModel):
    """Constants of single policy losses; a constant of a loss that is not used is warned about."""

    sapo_tau_positive: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """SAPO: steepness of the gate for positive advantages (arXiv 2511.20347)."""
    sapo_tau_negative: Annotated[float, Field(gt=0, le=1000)] = 1.05
    """SAPO: steepness of the gate for negative advantages."""
    dro_beta: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """DRO: weight of the squared log-ratio to the old policy (arXiv 2405.19107)."""
    dppo_ratio_cap: Annotated[float, Field(ge=1, le=1e6)] = 20.0
    """DPPOTV, DPPOKL: largest importance ratio (arXiv 2602.04879)."""
    clip_cov_fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """ClipCov: share of a mini-batch's tokens that lose their gradient, at least one (arXiv 2505.22617)."""
    clip_cov_low: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """ClipCov: tokens must have a larger covariance of advantage and log-probability than this."""
    clip_cov_high: Annotated[float, Field(ge=-1e6, le=1e6)] = 5.0
    """ClipCov: tokens must have a smaller covariance than this."""
    kl_cov_fraction: Annotated[float, Field(gt=0, le=1)] = 2e-3
    """KLCov: share of a mini-batch's tokens, those of highest covariance, that get a KL penalty, at least one
    (arXiv 2505.22617; 2e-4 for 32B models there)."""
    kl_cov_coefficient: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """KLCov: weight of |log-ratio| on those tokens."""


class DynamicSampling(ApiModel):
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): groups whose rewards are all equal are dropped, and other
    prompts are rolled out in their place. Groups are judged by the reward before the overlong penalty."""

    enabled: bool = False
    """Whether constant groups are dropped."""
    max_refills: NonNegativeInt32 = 3
    """At most this many extra rollout rounds per step; a batch that is still short is completed with constant groups,
    which have no advantage but count in the denominators."""


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


class RejectionStatistic(StrEnum):
    """Mismatch of a token, with d = log pi_trainer - log pi_engine: K1 -d, K2 d^2/2, K3 exp(d) - 1 - d."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class RejectionScope(StrEnum):
    """What is judged and rejected: a token, or a sequence by the sum, mean or largest value of its tokens."""

    TOKEN = "Token"
    SEQUENCE_SUM = "SequenceSum"
    SEQUENCE_MEAN = "SequenceMean"
    SEQUENCE_MAX = "SequenceMax"


class RejectionRule(ApiModel):
    """Tokens or sequences outside the bounds are left out of the loss."""

    statistic: RejectionStatistic
    """K1, K2 or K3."""
    scope: RejectionScope = RejectionScope.TOKEN
    """Token, or how the tokens of a sequence are combined (SequenceMax: K2 and K3 only)."""
    upper: Annotated[float, Field(gt=0, le=1e9)]
    """Largest value kept. K1: as a probability ratio engine/trainer, for example 1.4."""
    lower: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Smallest value kept, K1 only, as a probability ratio engine/trainer, for example 0.7."""


class RolloutCorrection(ApiModel):
    """Importance correction for the mismatch of trainer and engine log-probabilities."""

    level: RolloutCorrectionLevel | None = None
    """Token or sequence weights pi_trainer/pi_engine that multiply the token losses; None: no weights. Default: Token
    where samples may be of older weights (`rollout.maxStalenessSteps`) and the loss's ratio does not correct that
    already (`bypassOldLogProbs`), else None."""
    truncation: Annotated[float, Field(gt=0, le=1e9)] = 2.0
    """Weights above this are truncated to it."""
    floor: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """IcePop (arXiv 2510.18855): weights outside [floor, truncation] become 0 instead of being truncated."""
    normalize: bool = False
    """Divide the weights by their mean over the step's samples."""
    rejection: Annotated[list[RejectionRule], Field(max_length=8)] = []
    """Rules that must all hold; what breaks one is left out of the loss and its denominators."""
    bypass_old_log_probs: bool = False
    """Take the engine's log-probabilities for those of the old policy and skip the pass that computes them: the ratio
    of the policy loss then corrects the mismatch too. Rejections, and weights (policy loss GPG only), follow the policy
    as it is trained; rejected tokens stay in the denominators."""


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
    GSPO, SAPO and GMPO SequenceMeanTokenMean)."""
    normalize_by_std: bool | None = None
    """Divide group advantages by the group's standard deviation. Default by preset: true (DrGRPO false)."""
    kl: KL = KL()
    """KL term to the reference policy."""
    clip: Clip = Clip()
    """Ratio clipping."""
    loss_options: LossOptions = LossOptions()
    """Constants of single policy losses."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token (GAE, REINFORCE++)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE lambda."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the entropy bonus."""
    dynamic_sampling: DynamicSampling | None = None
    """Dropping of constant groups. Default by preset: off (DAPO on)."""
    overlong_penalty: OverlongPenalty | None = None
    """Soft length penalty, added to the reward; off when absent."""
    mask_truncated: bool = False
    """Leave responses that hit the length limit out of the loss (numerator and denominator)."""
    rollout_correction: RolloutCorrection = RolloutCorrection()
    """Importance correction between engine and trainer log-probabilities."""
