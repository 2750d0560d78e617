"""`spec.model`, `spec.critic`, `spec.reference`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, PositiveInt32, ShortText, StrEnum


class DType(StrEnum):
    """Compute dtype."""

    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class Toggle(StrEnum):
    """A three-way switch."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Attention(StrEnum):
    """Attention implementation of the trainer."""

    AUTO = "Auto"
    VARLEN = "Varlen"
    SDPA = "SDPA"


class LoRA(ApiModel):
    """Low-rank adapters (arXiv 2106.09685). Only they are trained and saved; engines and exports get them merged into
    the weights, and the reference of a KL term is the model without them. There is no dropout: log-probabilities of the
    same tokens must be the same in every pass."""

    rank: Annotated[int, Field(ge=1, le=1024, examples=[32])]
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=65536)] | None = None
    """Scale numerator; default 2 x rank."""
    target_modules: Annotated[list[ShortText], Field(max_length=64)] = []
    """Names of the linear modules that get adapters; empty means all linear layers of the blocks."""


class Model(ApiModel):
    """The policy model."""

    source: Annotated[str, Field(min_length=1, max_length=1024, examples=["Qwen/Qwen3-8B"])]
    """Hugging Face model id or directory in the pod (config.json, weights, tokenizer)."""
    revision: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Revision of a Hugging Face model id."""
    dtype: DType = DType.BFLOAT16
    """Compute dtype of trainer and engine; optimizer master weights are float32."""
    attention: Attention = Attention.AUTO
    """Auto: packed variable-length kernel on GPUs, exact SDPA fallback on CPUs."""
    gradient_checkpointing: Toggle = Toggle.AUTO
    """Recompute activations in the backward pass. Auto: on GPUs where the memory plan says that they do not fit."""
    compile: Toggle = Toggle.AUTO
    """Compile the decoder blocks (torch.compile, static shapes). Auto: on GPUs with BFloat16."""
    lora: LoRA | None = None
    """Train adapters instead of all weights."""


class Critic(ApiModel):
    """The value model (PPO only)."""

    source: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A causal LM, or a classifier with one label whose head is kept. Default: the policy as it is after the warm
    start, with a new head that starts at 0."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Peak learning rate of the critic; schedule, warm-up, weight decay and gradient clip are those of `training`."""
    warmup_steps: NonNegativeInt32 = 0
    """First rollout steps in which only the critic is trained."""
    value_clip: Annotated[float, Field(gt=0, le=1000)] = 0.5
    """Values further than this from those before the update gain nothing (clipped value loss)."""
    epochs_per_step: PositiveInt32 | None = None
    """Passes over the batch; default `training.epochsPerStep`."""


class Reference(ApiModel):
    """The reference policy; loaded only when a KL term uses it."""

    source: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Default: `model.source` at the start of training."""
