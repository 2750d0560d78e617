"""`RLJobSpec` and `RLJob`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, Seconds
from rljob_api.v1alpha1.cluster import Cluster, Network, Trainer
from rljob_api.v1alpha1.data import Data, Evaluation, Reward, Tracking, WarmStart
from rljob_api.v1alpha1.failure import FailurePolicy
from rljob_api.v1alpha1.model import Critic, Model, Reference
from rljob_api.v1alpha1.rollout import Checkpoint, Rollout, Training
from rljob_api.v1alpha1.status import RLJobStatus

GROUP = "rljob.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RLJob"
PLURAL = "rljobs"


class RLJobSpec(ApiModel):
    """What to train, on what, with which pods. The operator never writes here."""

    algorithm: Algorithm = Algorithm()
    """RL algorithm."""
    model: Model
    """Policy model."""
    critic: Critic | None = None
    """Value model (PPO); defaults apply when absent."""
    reference: Reference | None = None
    """Reference policy; defaults apply when a KL term uses it."""
    data: Data
    """Prompts."""
    reward: Reward
    """Scoring."""
    rollout: Rollout = Rollout()
    """Generation."""
    training: Training = Training()
    """Optimisation."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints and resume."""
    warm_start: WarmStart | None = None
    """Optional supervised phase before RL."""
    tracking: Tracking = Tracking()
    """Where metrics go."""
    evaluation: Evaluation = Evaluation()
    """Held-out evaluation."""
    cluster: Cluster = Cluster()
    """Pods."""
    network: Network = Network()
    """Addresses and interconnect."""
    failure_policy: FailurePolicy = FailurePolicy()
    """Retries and deadlines."""
    suspend: bool = False
    """Checkpoint, release the cluster and wait; false resumes."""
    active_deadline_seconds: Seconds | None = None
    """Longest running time over all attempts, queueing and suspension excluded."""
    ttl_seconds_after_finished: NonNegativeInt32 | None = None
    """Delete the RLJob this long after it finished; absent keeps it (the cluster is always released)."""
    keep_cluster_on_failure_seconds: NonNegativeInt32 = 0
    """Keep a failed job's cluster so long for debugging."""
    trainer: Trainer | None = None
    """Run another trainer instead of ours."""


class RLJob(ApiModel):
    """An RL post-training run."""

    api_version: Literal["rljob.io/v1alpha1"] = "rljob.io/v1alpha1"
    """rljob.io/v1alpha1."""
    kind: Literal["RLJob"] = "RLJob"
    """RLJob."""
    metadata: Annotated[dict[str, Any], Field()]
    """Kubernetes object metadata."""
    spec: RLJobSpec
    """Desired run."""
    status: RLJobStatus | None = None
    """Observed state."""
