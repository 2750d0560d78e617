"""The directory of a local run: job.json, and a lock against a second run in it."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path
from typing import Final

from rljob_api.contract import ResolvedJob

JOB_FILE: Final = "job.json"
_LOCK_FILE: Final = ".lock"


class RunDirectoryError(ValueError):
    """The run directory cannot be used."""


def derive_uid(run_directory: Path) -> str:
    """A stable UID: the same directory is the same run, so that it resumes its own checkpoints."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, run_directory.as_uri()))


def lock_run_directory(run_directory: Path) -> int:
    """Create the directory and lock it. Returns the lock's descriptor, which the trainer inherits: the lock lasts as
    long as either lives.

    Raises:
        RunDirectoryError: it cannot be created, or another run holds it.
    """
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunDirectoryError(f"{run_directory}: {error.strerror}; choose another with --run-directory") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunDirectoryError(
            f"{run_directory} is in use by another run; wait for it, or choose another with --run-directory"
        ) from None
    return descriptor


def write_job_file(resolved: ResolvedJob) -> Path:
    """job.json, complete or not there at all."""
    path = Path(resolved.paths.run_directory) / JOB_FILE
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(resolved.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path
