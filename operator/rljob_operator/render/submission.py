"""Body of `POST /api/jobs/`: the driver's command and what changes between attempts on one cluster."""

from __future__ import annotations

import shlex
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_api.names import ENV_ATTEMPT, ENV_RESUME_FLOOR_STEP, LABEL_JOB, LABEL_JOB_UID
from rljob_operator.render.types import make_error

TRAINER_COMMAND: Final = ("python", "-m", "rljob_trainer")
CONTAINER_STDOUT: Final = "/proc/1/fd/1"
"""Stdout of the container's first process; the kubelet's log."""

# Ray runs the entrypoint with `sh -c` (dash on Debian: no pipefail, no PIPESTATUS), so bash is named.
# * tee copies the driver's output to the container's stdout, for `kubectl logs`. Where that cannot be opened, tee says
#   so in the job's log and goes on.
# * Ray stops a job by signalling every process below the entrypoint: bash stays to report the driver's own exit code,
#   tee stays to deliver the driver's last line. SIGPIPE must not let a broken container log end the training.
_TEED: Final = (
    "trap : INT TERM; {command} 2>&1 | (trap '' INT TERM PIPE; exec tee -a {stdout}); exit ${{PIPESTATUS[0]}}"
)


def build_entrypoint(command: tuple[str, ...], container_stdout: str = CONTAINER_STDOUT) -> str:
    """Shell command that runs `command`, copies its output to the head pod's stdout, and exits with its code."""
    script = _TEED.format(command=shlex.join(command), stdout=shlex.quote(container_stdout))
    return f"exec bash -c {shlex.quote(script)}"


def render_submission(
    resolved: ResolvedJob, attempt: int, submission_id: str, resume_floor_step: int
) -> dict[str, Any]:
    """The submission of one attempt; repeating it with the same id is harmless.

    Raises:
        ValueError: attempt below 1 or a negative step.
    """
    if attempt < 1 or resume_floor_step < 0:
        raise ValueError(f"attempt {attempt} must be at least 1 and resume_floor_step {resume_floor_step} at least 0")
    trainer = resolved.spec.trainer
    command = TRAINER_COMMAND if trainer is None else tuple(trainer.command)
    environment = {} if trainer is None else {variable.name: variable.value or "" for variable in trainer.env}
    environment |= {ENV_ATTEMPT: str(attempt), ENV_RESUME_FLOOR_STEP: str(resume_floor_step)}
    return {
        "entrypoint": build_entrypoint(command),
        "submission_id": submission_id,
        "runtime_env": {"env_vars": environment},
        "metadata": {LABEL_JOB: resolved.name, LABEL_JOB_UID: resolved.uid, "rljob.io/attempt": str(attempt)},
    }


def check_submission(resolved: ResolvedJob) -> list[Finding]:
    """Ray's runtime environment carries plain values only."""
    if resolved.spec.trainer is None:
        return []
    return [
        make_error(
            "InvalidValue",
            f"spec.trainer.env[{index}].valueFrom",
            f"{variable.name} comes from a reference, which a Ray job cannot resolve; put it into spec.cluster.env",
        )
        for index, variable in enumerate(resolved.spec.trainer.env)
        if variable.value_from is not None
    ]
