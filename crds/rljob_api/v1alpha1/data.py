"""`spec.data`, `spec.reward`, `spec.evaluation`, `spec.tracking`, `spec.warmStart`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, Path, PositiveInt32, Seconds, StrEnum

FieldName = Annotated[str, Field(min_length=1, max_length=128)]


class OverlongPrompts(StrEnum):
    """What happens to prompts longer than `maxPromptTokens`."""

    DROP = "Drop"
    FAIL = "Fail"
    TRUNCATE_LEFT = "TruncateLeft"


class Data(ApiModel):
    """Prompts. JSONL, Parquet and Hugging Face datasets saved to disk; a row's prompt is text or a list of chat
    messages."""

    train: Annotated[list[Path], Field(min_length=1, max_length=256, examples=[["/data/train.jsonl"]])]
    """Files or directories of training prompts, as seen in the pods."""
    validation: Annotated[list[Path], Field(max_length=256)] = []
    """Files or directories of held-out prompts."""
    prompt_field: FieldName = "prompt"
    """Column with the prompt: text, or a list of {role, content}."""
    answer_field: FieldName = "answer"
    """Column with the gold answer."""
    max_prompt_tokens: PositiveInt32 = 512
    """Longest prompt after the chat template, in tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.DROP
    """Drop (counted), Fail, or TruncateLeft."""
    shuffle_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seed of the epoch shuffles; default `training.seed`."""
    system_prompt: Annotated[str, Field(max_length=16384)] | None = None
    """System message put before text prompts."""
    chat_template: Annotated[str, Field(max_length=65536)] | None = None
    """Jinja chat template that replaces the tokenizer's."""


class RewardType(StrEnum):
    """Where a reward comes from."""

    GSM8K = "GSM8K"
    MATH = "Math"
    REGEX = "Regex"
    PYTHON = "Python"
    HTTP = "Http"
    MODEL = "Model"


class RewardFunction(ApiModel):
    """One reward function; the reward of a sample is the weighted sum over all of them."""

    type: RewardType
    """Kind of function."""
    name: (
        Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", examples=["format"])]
        | None
    ) = None
    """Name in metrics; default the type in lower case."""
    weight: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """Factor of this function in the sum."""
    timeout_seconds: Seconds = 10
    """Hard limit per sample; the scoring process is killed after it."""
    path: Path | None = None
    """Python: file with the function, as seen in the pods. Model: directory or id."""
    function: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Python: name of the function `f(prompt, response, answer, **row) -> float | dict`; default `score`."""
    pattern: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Regex: the first group (or the whole match) of the last match is compared with the answer."""
    url: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    """Http: endpoint that takes {prompt, response, answer} and returns {score}."""
    flexible: bool = False
    """GSM8K: accept the last number of the response when there is no `####` line."""


class OnRewardError(StrEnum):
    """What a failing reward function does to the job."""

    FAIL_JOB = "FailJob"
    DROP_SAMPLE = "DropSample"


class Reward(ApiModel):
    """How responses are scored."""

    functions: Annotated[list[RewardFunction], Field(min_length=1, max_length=16, examples=[[{"type": "GSM8K"}]])]
    """Weighted functions."""
    on_error: OnRewardError = OnRewardError.FAIL_JOB
    """FailJob ends the job (exit code 73); DropSample leaves the sample out, counted."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Scoring processes."""


class Evaluation(ApiModel):
    """Held-out evaluation on `data.validation`."""

    every_steps: NonNegativeInt32 = 10
    """Evaluate after every so many steps (and at the end); 0 switches it off."""
    before_training: bool = True
    """Also evaluate before the first step."""
    max_prompts: PositiveInt32 = 256
    """At most so many held-out prompts."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per held-out prompt."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 is greedy."""


class WandB(ApiModel):
    """Weights & Biases run."""

    project: Annotated[str, Field(min_length=1, max_length=128, examples=["rl"])]
    """Project name; the API key comes from the environment (`cluster.envFrom`)."""
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Team or user."""


class MLflow(ApiModel):
    """MLflow run."""

    tracking_uri: Annotated[str, Field(min_length=1, max_length=2048, examples=["http://mlflow.mlops.svc:5000"])]
    """Address of the tracking server."""
    experiment: Annotated[str, Field(min_length=1, max_length=256)] = "rljob"
    """Experiment name."""


class Tracking(ApiModel):
    """Where metrics go besides Prometheus. JSONL files are always written next to the checkpoints."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""
    wandb: WandB | None = None
    """Also log to Weights & Biases."""
    mlflow: MLflow | None = None
    """Also log to MLflow."""
    sample_every_steps: NonNegativeInt32 = 10
    """Dump prompts, responses and rewards of every so many steps; 0 switches it off."""


class SupervisedWarmStart(ApiModel):
    """A supervised phase on prompt-answer pairs before RL, with the same model and optimizer settings."""

    data: Annotated[list[Path], Field(min_length=1, max_length=256, examples=[["/data/warmstart.jsonl"]])]
    """Files with the columns `data.promptField` and `responseField`."""
    response_field: FieldName = "response"
    """Column with the target response."""
    steps: Annotated[PositiveInt32, Field(examples=[100])]
    """Optimizer steps."""
    rows_per_step: PositiveInt32 = 64
    """Rows per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    """Peak learning rate."""


class WarmStart(ApiModel):
    """What happens before RL."""

    supervised: SupervisedWarmStart
    """Supervised phase."""
