"""The contract between operator and trainer: job.json in, progress and one result line out.

The only module both sides import for it. Schema changes are additive within `SCHEMA_VERSION`.
"""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

from pydantic import Field

from rljob_api.names import RESULT_KEY, TRAINER_PORT
from rljob_api.v1alpha1.base import ApiModel, StrEnum
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_api.v1alpha1.rollout import Engine
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import CheckpointStatus, ProgressStatus, Time

SCHEMA_VERSION: Final = 1


class Layout(ApiModel):
    """Ranks and engines, derived from the spec once."""

    num_nodes: Annotated[int, Field(ge=1)]
    """Worker pods (1 for a local run)."""
    ranks_per_node: Annotated[int, Field(ge=1)]
    """Trainer ranks per worker pod."""
    gpus_per_node: Annotated[int, Field(ge=0)]
    """GPUs per worker pod; 0 on CPUs."""
    world_size: Annotated[int, Field(ge=1)]
    """num_nodes x ranks_per_node."""
    engine_gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs per worker pod that only engines use (`rollout.placement: Separate`); 0: they share those of the ranks."""
    tensor_parallel_size: Annotated[int, Field(ge=1)]
    """Engine slots of one engine replica."""
    num_engines: Annotated[int, Field(ge=1)]
    """num_nodes x engine_slots_per_node / tensor_parallel_size."""

    @property
    def engine_slots_per_node(self) -> int:
        """Places for tensor parallel ranks of engines in a worker pod: GPUs of their own, else the trainer's ranks."""
        return self.engine_gpus_per_node or self.ranks_per_node


class Paths(ApiModel):
    """Directories as the driver and every rank see them."""

    run_directory: str
    """Owner file, metrics.jsonl, samples.jsonl, `latest`, `step-<n>/` and `export/`."""


class Server(ApiModel):
    """Where the driver serves progress, health and metrics."""

    port: Annotated[int, Field(ge=0, le=65535)] = TRAINER_PORT
    """0 takes a free port and prints it."""


class ResolvedJob(ApiModel):
    """job.json: everything the trainer needs, with no default left to resolve."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    name: str
    """Name of the RLJob (or of the local run)."""
    namespace: str = "default"
    """Namespace; `local` for a local run."""
    uid: str
    """UID of the RLJob; a local run derives a stable one from its directory."""
    attempt: Annotated[int, Field(ge=1)] = 1
    """Attempt; the environment (RLJOB_ATTEMPT) wins."""
    resume_floor_step: Annotated[int, Field(ge=0)] = 0
    """Resume no earlier than this step; the environment (RLJOB_RESUME_FLOOR_STEP) wins."""
    spec: RLJobSpec
    """The spec with every default resolved."""
    layout: Layout
    """Ranks and engines."""
    engine: Engine
    """Rollout engine."""
    engine_version: str | None = None
    """Engine version the environment was rendered for; None for Native."""
    ip_family: IPFamily
    """IPv4 or IPv6; Auto only in local runs."""
    paths: Paths
    """Directories."""
    server: Server = Server()
    """Progress server."""


class TrainerState(StrEnum):
    """What the driver is doing."""

    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class TrainerPhase(StrEnum):
    """Phase of the step the driver is in; every phase refreshes the heartbeat."""

    SETUP = "setup"
    WARM_START = "warmStart"
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    SYNC = "sync"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    DONE = "done"


class Verdict(ApiModel):
    """Why the driver ended (or is about to)."""

    exit_code: int
    """See `rljob_api.reasons.ExitCode`."""
    reason: str
    """A `FailureReason`, or Completed or Stopped."""
    message: str
    """For people: what went wrong, with field, value and a value that works."""


class Progress(ApiModel):
    """`GET /v1/progress`."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    job_uid: str
    """UID from job.json."""
    attempt: int
    """Attempt that reports."""
    state: TrainerState
    """State of the driver."""
    phase: TrainerPhase
    """Current phase."""
    heartbeat_time: Time
    """Last sign of progress inside the phase (a rollout counts finished samples, a train phase micro-batches)."""
    start_time: Time
    """Start of the driver."""
    resumed_from_step: int | None = None
    """Checkpoint step this attempt started from; None: from the beginning."""
    progress: ProgressStatus = ProgressStatus()
    """Statistics of the last finished step."""
    checkpoint: CheckpointStatus | None = None
    """Newest complete checkpoint."""
    verdict: Verdict | None = None
    """Set once the outcome is known."""


class StopRequest(ApiModel):
    """`POST /v1/stop`: finish or drop the step, publish a checkpoint, exit 143."""

    deadline_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """After this the driver exits with what the last checkpoint holds."""


class Result(ApiModel):
    """The driver's last line: `{"rljobResult": {...}}`; the server dies with the driver, the log does not."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    verdict: Verdict
    """Outcome."""
    progress: Progress
    """Final progress."""


def format_result_line(result: Result) -> str:
    """One line of strict JSON, to be printed last."""
    return json.dumps({RESULT_KEY: result.model_dump(mode="json", exclude_none=True)}, allow_nan=False)


def find_result(log: str) -> Result | None:
    """The last result line in a log, or None.

    Ray prefixes and interleaves lines, so the marker may stand anywhere in a line. A damaged line is skipped in
    favour of an earlier one: half a line is what a killed driver leaves.
    """
    marker = f'{{"{RESULT_KEY}":'
    for line in reversed(log.splitlines()):
        start = line.find(marker)
        if start < 0:
            continue
        try:
            document, _ = json.JSONDecoder().raw_decode(line[start:])
            return Result.model_validate(document[RESULT_KEY])
        except ValueError:
            continue
    return None
