"""`spec.data`, `spec.reward`, `spec.evaluation`, `spec.tracking`, `spec.warmStart`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, NonNegativeInt32, Path, PositiveInt32, Quantity, Seconds, StrEnum

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
    """Held-out prompts. Each file or directory is a validation set of its own, named after it
    (`/data/aime24.parquet` is aime24)."""
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
    """Hard limit per sample; the scoring process is killed after it. Http: limit of one request with its
    repetitions."""
    memory: Quantity | None = None
    """Math, Regex, Python: private memory the scoring process may use; it is killed above. Default 1Gi for Math, else
    no limit."""
    path: Path | None = None
    """Python: file with the function, as seen in the pods. Model: directory or id."""
    function: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Python: name of the function `f(prompt, response, answer, **row) -> float | dict`; default `score`."""
    pattern: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Regex: the first group (or the whole match) of the last match is compared with the answer."""
    url: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    """Http: endpoint; `POST {prompt, response, answer, fields}` returns {score}, a number or null."""
    batch_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Http: samples of one request; above 1 it is `POST {samples: [...]}` and returns {scores: [...]}."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=1024)] = 16
    """Http: requests at once."""
    authorization_env: (
        Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["REWARD_AUTHORIZATION"])]
        | None
    ) = None
    """Http: environment variable with the value of the Authorization header (`Bearer ...`), from `cluster.env` with a
    secretKeyRef or from `cluster.envFrom`."""
    flexible: bool = False
    """GSM8K: accept the last number of the response when there is no `####` line. Math: accept what follows "answer
    is", or the last expression, when there is no \\boxed answer."""


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
    pass_reward: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """A sample passes (pass@k) when its reward is at least this."""


class WandB(ApiModel):
    """Weights & Biases run."""

    project: Annotated[str, Field(min_length=1, max_length=128, examples=["rl"])]
    """Project name; WANDB_API_KEY (and WANDB_BASE_URL) come from the environment (`cluster.env`, `cluster.envFrom`)."""
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Team or user."""


class MLflow(ApiModel):
    """MLflow run."""

    tracking_uri: Annotated[str, Field(min_length=1, max_length=2048, examples=["http://mlflow.mlops.svc:5000"])]
    """Address of the tracking server; credentials (MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD)
    come from the environment (`cluster.env`, `cluster.envFrom`)."""
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
