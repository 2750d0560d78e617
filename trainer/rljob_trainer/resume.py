"""Which checkpoint a run starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.rollout import Resume
from rljob_trainer.checkpoint import files
from rljob_trainer.checkpoint.base_model import check_base_model
from rljob_trainer.checkpoint.files import Checkpoint
from rljob_trainer.errors import CheckpointError


@dataclass(frozen=True)
class ResumePoint:
    """Where to start."""

    checkpoint: Checkpoint
    is_own: bool
    """False: another run's checkpoint (`resumeFromPath`): its weights and optimizer, but step 0 and a new data "
    "order."""


def choose_resume_point(
    job: ResolvedJob, report: Callable[[str], None], on_file: Callable[[], None] = lambda: None
) -> ResumePoint | None:
    """The newest complete checkpoint of the run, else `resumeFromPath`, else None.

    The driver decides for all ranks. `report` is told which newer directories were skipped, and why. `resume: Never`
    is about the job's first attempt: a later one (a retry, or after a suspension) finds what the job itself saved.

    Raises:
        CheckpointError: Never with checkpoints present before the first attempt, Required without one, nothing at or
            above the floor, or an unusable `resumeFromPath`.
    """
    spec = job.spec.checkpoint
    directory = Path(job.paths.run_directory)
    newest = files.find_newest(directory, report, on_file)
    if newest is not None:
        if spec.resume is Resume.NEVER and job.attempt == 1:
            raise CheckpointError(
                f"spec.checkpoint.resume: Never, but {directory} holds a checkpoint of step {newest.step}; use "
                "resume: Auto to "
                "continue from it, or another spec.checkpoint.storage.path to start anew"
            )
        if newest.step < job.resume_floor_step:
            raise CheckpointError(
                f"the newest complete checkpoint in {directory} is of step {newest.step}, below the floor of step "
                f"{job.resume_floor_step} that an earlier attempt reached; is the storage the same?"
            )
        return ResumePoint(newest, is_own=True)
    if job.resume_floor_step > 0:
        raise CheckpointError(
            f"no complete checkpoint in {directory}, but an earlier attempt reached step {job.resume_floor_step}; is "
            "the "
            "storage the same?"
        )
    if spec.resume_from_path is not None:
        found = files.read_checkpoint(Path(spec.resume_from_path))
        problem = found if isinstance(found, str) else files.verify_contents(found, on_file)
        if problem is not None or isinstance(found, str):
            raise CheckpointError(
                f"spec.checkpoint.resumeFromPath: {spec.resume_from_path}: {problem}; give a complete step-<n> "
                "directory"
            )
        return ResumePoint(found, is_own=False)
    if spec.resume is Resume.REQUIRED:
        raise CheckpointError(
            f"spec.checkpoint.resume: Required, but {directory} holds no complete checkpoint; use resume: Auto to "
            "start anew"
        )
    return None


def check_adapters(job: ResolvedJob, resume: ResumePoint | None, base_model: str) -> None:
    """A run with adapters continues only from adapters on the same base model.

    Raises:
        CheckpointError: the checkpoint holds something else.
    """
    if resume is None:
        return
    path = resume.checkpoint.path
    saved = str(files.read_trainer_state(resume.checkpoint).get("base_model", ""))
    check_base_model(saved, base_model, path=path, source=job.spec.model.source)


def describe_start(resume: ResumePoint | None) -> str:
    """Where the run starts from, for the log."""
    if resume is None:
        return "from the beginning"
    return f"resumed from {resume.checkpoint.path}" if resume.is_own else f"weights of {resume.checkpoint.path}"
