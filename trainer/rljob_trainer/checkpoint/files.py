"""The run directory on disk: owner, manifests, atomic publication, retention. Written by the driver only.

A checkpoint exists once its directory `step-<n>` holds a manifest whose files all have the recorded size. It is written
as `step-<n>.tmp`: state, then manifest, flushed, then renamed; `latest` moves only after. A kill at any moment leaves
either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rljob_api.names import LATEST_FILE, MANIFEST_FILE, OWNER_FILE, compute_step_directory_name
from rljob_trainer.checkpoint.records import FileRecord
from rljob_trainer.errors import CheckpointError

MANIFEST_VERSION: Final = 2
TRAINER_STATE_FILE: Final = "trainer.json"
STEP_DIRECTORY: Final = re.compile(r"^step-(\d+)$")
TEMPORARY_SUFFIX: Final = ".tmp"
FREE_SPACE_FACTOR: Final = 1.1


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of."""

    step: int
    world_size: int
    time: str
    """RFC 3339, UTC."""
    files: list[FileRecord]
    version: int = MANIFEST_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    manifest: Manifest


def sync_directory(path: Path) -> None:
    """Flush directory entries (names, renames)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file: readers see the old or the new content."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def claim_run_directory(directory: Path, *, uid: str, name: str, namespace: str, adopt: bool) -> None:
    """Create the run directory or check that it is ours.

    Raises:
        CheckpointError: it belongs to another job (a deleted one of the same name, for example), or is not writable.
    """
    owner_path = directory / OWNER_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if owner_path.exists():
            owner = json.loads(owner_path.read_text(encoding="utf-8"))
            if owner.get("uid") == uid:
                return
            if not adopt:
                raise CheckpointError(
                    f"{directory} holds the state of another RLJob with UID {owner.get('uid')!r} (this job: {uid!r}); "
                    "set "
                    "spec.checkpoint.adopt: true to take it over, spec.checkpoint.resumeFromPath to start from one "
                    "of its "
                    "checkpoints, or another spec.checkpoint.storage.path"
                )
        write_atomically(owner_path, json.dumps({"uid": uid, "name": name, "namespace": namespace}) + "\n")
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{owner_path} is not JSON ({error}); remove it if the directory is this job's"
        ) from error
    except OSError as error:
        raise CheckpointError(f"run directory {directory} cannot be used: {error}") from error


def read_checkpoint(path: Path) -> Checkpoint | str:
    """The checkpoint in `path`, or why it is not complete."""
    manifest_path = path / MANIFEST_FILE
    if not manifest_path.exists():
        return f"{path.name}: no {MANIFEST_FILE} (the save was interrupted)"
    try:
        document = json.loads(manifest_path.read_text(encoding="utf-8"))
        files = [FileRecord(**record) for record in document.pop("files")]
        manifest = Manifest(files=files, **document)
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        return f"{path.name}: {MANIFEST_FILE} is damaged ({error!r})"
    if manifest.version != MANIFEST_VERSION:
        return f"{path.name}: manifest version {manifest.version}, this trainer reads {MANIFEST_VERSION}"
    for record in manifest.files:
        file = path / record.path
        if not file.exists():
            return f"{path.name}: {record.path} is missing"
        if file.stat().st_size != record.num_bytes:
            return f"{path.name}: {record.path} has {file.stat().st_size} bytes, the manifest says {record.num_bytes}"
    return Checkpoint(manifest.step, path, manifest)


def verify_contents(checkpoint: Checkpoint, on_file: Callable[[], None] = lambda: None) -> str | None:
    """None, or which file does not have the recorded checksum."""
    for record in checkpoint.manifest.files:
        crc = 0
        with (checkpoint.path / record.path).open("rb") as file:
            while block := file.read(16 * 2**20):
                crc = zlib.crc32(block, crc)
        if crc != record.crc32:
            return f"{checkpoint.path.name}: {record.path} has checksum {crc:08x}, the manifest says {record.crc32:08x}"
        on_file()
    return None


def list_step_directories(directory: Path) -> list[Path]:
    """`step-<n>` directories, newest first, complete or not."""
    if not directory.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in directory.iterdir() if (match := STEP_DIRECTORY.match(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def find_newest(
    directory: Path, report: Callable[[str], None], on_file: Callable[[], None] = lambda: None
) -> Checkpoint | None:
    """The newest complete, undamaged checkpoint; `report` is told why newer ones were skipped."""
    for path in list_step_directories(directory):
        checkpoint = read_checkpoint(path)
        problem = checkpoint if isinstance(checkpoint, str) else verify_contents(checkpoint, on_file)
        if problem is None and isinstance(checkpoint, Checkpoint):
            return checkpoint
        report(f"checkpoint skipped: {problem}")
    return None


def begin(directory: Path, step: int) -> Path:
    """An empty temporary directory for the checkpoint of `step`; leftovers of interrupted saves are removed."""
    try:
        for leftover in directory.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(leftover)
        temporary = directory / f"{compute_step_directory_name(step)}{TEMPORARY_SUFFIX}"
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint of step {step} in {directory}: {error}") from error
    return temporary


def publish(
    temporary: Path, *, step: int, world_size: int, trainer_state: dict[str, Any], records: Sequence[FileRecord]
) -> Checkpoint:
    """Write trainer state and manifest, flush, rename, move `latest`.

    Raises:
        CheckpointError: a rank's files cannot be seen from here (storage that is not shared), or an I/O failure. The
            temporary directory is removed: what was the newest checkpoint stays it.
    """
    directory = temporary.parent
    final = directory / temporary.name.removesuffix(TEMPORARY_SUFFIX)
    try:
        for record in records:
            path = temporary / record.path
            if not path.exists() or path.stat().st_size != record.num_bytes:
                raise CheckpointError(
                    f"checkpoint of step {step}: {path} was written by its rank but is not visible to the driver; "
                    "spec.checkpoint.storage must be one volume shared by all pods (ReadWriteMany)"
                )
        state_path = temporary / TRAINER_STATE_FILE
        write_atomically(state_path, json.dumps(trainer_state, allow_nan=False))
        content = state_path.read_bytes()
        state_record = FileRecord(TRAINER_STATE_FILE, len(content), zlib.crc32(content))
        manifest = Manifest(
            step=step,
            world_size=world_size,
            time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            files=[*records, state_record],
        )
        write_atomically(temporary / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1))
        if final.exists():
            # Only an incomplete or damaged directory can be here: complete ones are resumed from, not rewritten.
            shutil.rmtree(final)
        os.replace(temporary, final)
        sync_directory(directory)
        write_atomically(directory / LATEST_FILE, f"{final.name}\n")
    except OSError as error:
        discard(temporary)
        raise CheckpointError(f"checkpoint of step {step} in {directory}: {error}") from error
    except CheckpointError:
        discard(temporary)
        raise
    return Checkpoint(step, final, manifest)


def check_free_space(directory: Path) -> None:
    """Before a save: is there room for another checkpoint of the newest one's size and a tenth?

    Raises:
        CheckpointError: there is not; nothing was written yet.
    """
    found = (read_checkpoint(path) for path in list_step_directories(directory))
    newest = next((checkpoint for checkpoint in found if isinstance(checkpoint, Checkpoint)), None)
    if newest is None:
        return
    num_bytes = sum(record.num_bytes for record in newest.manifest.files)
    num_needed, num_free = int(num_bytes * FREE_SPACE_FACTOR), shutil.disk_usage(directory).free
    if num_free < num_needed:
        raise CheckpointError(
            f"{directory} has {num_free:,} bytes free, a checkpoint needs {num_needed:,} (step {newest.step} took "
            f"{num_bytes:,}); free space, use larger storage, or lower spec.checkpoint.keepLast; step {newest.step} "
            "stands"
        )


def measure_bytes(directory: Path) -> int:
    """Bytes of all files below `directory` so far."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # temporary names of the writers come and go
            total += path.stat().st_size
    return total


def discard(temporary: Path) -> None:
    """Remove an unfinished checkpoint, so that a full disk has room again."""
    shutil.rmtree(temporary, ignore_errors=True)


def prune(directory: Path, keep_last: int, published_step: int) -> list[int]:
    """Delete all but the newest `keep_last` complete checkpoints up to `published_step`; returns the steps deleted.

    The checkpoint just published is always kept. A run starts from the newest undamaged checkpoint, so one of a later
    step whose files have the recorded sizes was skipped, and reported, for its checksums: it goes, or it would count as
    complete and cost a good one its place. Directories without a manifest are what a save or a deletion that was cut
    short left behind; they go as well. A manifest that cannot be read may be another version's, and stays.

    Raises:
        CheckpointError: they cannot be deleted.
    """
    try:
        return _prune(directory, keep_last, published_step)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: checkpoints beyond spec.checkpoint.keepLast: {keep_last} cannot be deleted: {error}"
        ) from error


def _prune(directory: Path, keep_last: int, published_step: int) -> list[int]:
    found = [(_parse_step(path), path) for path in list_step_directories(directory)]
    complete = [step for step, path in found if isinstance(read_checkpoint(path), Checkpoint)]
    kept = [step for step in complete if step <= published_step][:keep_last]
    deleted: list[int] = []
    for step, path in found:
        is_remains = not (path / MANIFEST_FILE).exists()
        if not is_remains and (step not in complete or step in kept):
            continue  # one that this version cannot read may be another version's
        # Manifest first: a deletion cut short must not look like a checkpoint.
        (path / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)
        if not is_remains:
            deleted.append(step)
    return deleted


def _parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read_trainer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `publish` was given."""
    state: dict[str, Any] = json.loads((checkpoint.path / TRAINER_STATE_FILE).read_text(encoding="utf-8"))
    return state
