"""`spec.rollout`, `spec.training`, `spec.checkpoint`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, Path, PositiveInt32, ShortText, StrEnum


class Engine(StrEnum):
    """Rollout engine."""

    SGLANG = "SGLang"
    VLLM = "VLLM"
    NATIVE = "Native"


class Placement(StrEnum):
    """Whether engines share the trainer's GPUs."""

    COLOCATED = "Colocated"
    SEPARATE = "Separate"


class Rollout(ApiModel):
    """How responses are generated."""

    engine: Engine = Engine.SGLANG
    """SGLang, VLLM, or the built-in Native engine (CPU, small models)."""
    engine_version: (
        Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+)?([a-z0-9.]+)?$", max_length=32, examples=["0.5.16"])]
        | None
    ) = None
    """Version of the engine in the image; decides environment and arguments. Default: the image catalogue's."""
    placement: Placement = Placement.COLOCATED
    """Colocated engines share the trainer's GPUs. Separate engines have those that `cluster.ranksPerNode` leaves of
    `cluster.gpusPerNode`, and generate the next step's samples while the ranks train."""
    max_staleness_steps: Annotated[int, Field(ge=0, le=1)] | None = None
    """How many steps older than the policy the weights of a sample may be. 1 lets rollout run one step ahead of the
    training, 0 makes them wait for each other. Default: 1 with Separate, 0 with Colocated (which allows no more)."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """GPUs of one engine replica; must divide nodes x ranksPerNode, with Separate what is left for engines:
    nodes x (gpusPerNode - ranksPerNode)."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 8
    """Responses per prompt (the group of GRPO)."""
    max_response_tokens: PositiveInt32 = 1024
    """Longest response, in tokens."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Sampling temperature; also applied to the trainer's log-probabilities."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the importance ratio is approximate (warned)."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of GPU memory for the engine's weights and KV cache."""
    over_sample: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Start this many times `promptsPerStep` groups, train on the first to be complete and abort the others, whose
    prompts come again in the next epoch. Saves the wait for the longest responses, and favours short ones."""
    max_concurrent_samples: PositiveInt32 | None = None
    """Sequences decoded at once per engine; default by engine."""
    timeout_seconds: PositiveInt32 = 3600
    """Deadline of one rollout phase."""
    engine_args: Annotated[dict[str, Any], Field(max_length=128)] = {}
    """Passed to the engine's constructor unchanged; keys the operator owns are refused."""


class Strategy(StrEnum):
    """How the trainer shards."""

    FSDP2 = "FSDP2"


class Schedule(StrEnum):
    """Learning-rate schedule after the warm-up."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"


class Offload(ApiModel):
    """What lives in host memory between phases."""

    parameters: bool = False
    """Shards and gradients live in host memory; blocks are copied to the GPU when used, and the optimizer steps on the
    CPU."""
    optimizer: bool = False
    """Optimizer moments live in host memory, and on the GPU during an optimizer step only."""


class Training(ApiModel):
    """The optimizer loop. World size = nodes x ranksPerNode and is never typed here."""

    strategy: Strategy = Strategy.FSDP2
    """Sharding strategy."""
    prompts_per_step: PositiveInt32 = 128
    """Prompts of one rollout; sequences = prompts x `rollout.samplesPerPrompt`."""
    mini_batch_prompts: PositiveInt32 | None = None
    """Prompts per optimizer update; must divide `promptsPerStep`. Default: promptsPerStep (one update)."""
    micro_batch_tokens: PositiveInt32 | None = None
    """Token budget of one forward/backward per rank. Default 8192, at least one longest sequence."""
    micro_batch_sequences: PositiveInt32 | None = None
    """Sequences of one forward/backward per rank, instead of a token budget."""
    epochs_per_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes over one rollout."""
    total_steps: PositiveInt32 | None = None
    """Rollout steps to train. Exactly one of totalSteps and totalEpochs."""
    total_epochs: PositiveInt32 | None = None
    """Passes over the training prompts. Exactly one of totalSteps and totalEpochs."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Peak learning rate of the policy."""
    schedule: Schedule = Schedule.CONSTANT
    """Schedule after the warm-up."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of `learningRate` that Linear and Cosine end at."""
    warmup_steps: NonNegativeInt32 = 0
    """Linear learning-rate warm-up, in rollout steps."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    """AdamW weight decay."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW beta 1."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW beta 2."""
    gradient_clip: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Largest global gradient norm."""
    max_nan_steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Consecutive updates skipped for NaN/Inf before the job fails (exit code 72)."""
    offload: Offload = Offload()
    """Host offload."""
    sequence_parallel_size: Annotated[int, Field(ge=1, le=128)] = 1
    """Ranks that share the tokens of a pack (Ulysses); must divide the ranks and the model's attention heads. Each
    rank then holds 1/size of the activations of a micro-batch of size x microBatchTokens."""
    collective_timeout_seconds: PositiveInt32 = 1800
    """Deadline of one collective operation between ranks."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 42
    """Seed of data order, sampling and initialisation."""


class Resume(StrEnum):
    """Whether a run continues from its checkpoints."""

    AUTO = "Auto"
    NEVER = "Never"
    REQUIRED = "Required"


class CheckpointStorage(ApiModel):
    """Where checkpoints live. Exactly one of claimName and hostPath in a cluster; `path` is a subdirectory (or
    the directory of a local run)."""

    claim_name: ShortText | None = None
    """PersistentVolumeClaim, mounted at /var/lib/rljob in every pod; ReadWriteMany when nodes > 1."""
    host_path: Annotated[str, Field(pattern=r"^/", max_length=1024, examples=["/mnt/shared"])] | None = None
    """Directory of the node, mounted at /var/lib/rljob; must be shared storage when nodes > 1."""
    path: Path | None = None
    """Local runs: directory of the run. In a cluster: subdirectory of the volume."""


class Checkpoint(ApiModel):
    """Checkpoints: written atomically, loadable at any world size."""

    every_steps: NonNegativeInt32 = 20
    """Save after every so many steps, and always at the end; 0 saves only at the end and on stop."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Complete checkpoints kept on disk."""
    storage: CheckpointStorage = CheckpointStorage()
    """Where they live."""
    resume: Resume = Resume.AUTO
    """Auto: from the newest complete checkpoint, else from the start. Never: the first attempt refuses to find one,
    later attempts resume. Required: fail without one."""
    resume_from_path: Path | None = None
    """Start from this checkpoint directory of another run (weights and optimizer)."""
    adopt: bool = False
    """Take over the checkpoints of a deleted RLJob of the same name (another UID)."""
    export_every_steps: NonNegativeInt32 = 0
    """Also export the policy in Hugging Face format every so many steps; the last step is always exported unless
    `exportAtEnd` is false."""
    export_at_end: bool = True
    """Export the trained policy in Hugging Face format at the end."""
