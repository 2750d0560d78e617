"""Checkpoints on disk: atomic publication, damage, retention, ownership, and which one a run resumes from."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from rljob_api.contract import ResolvedJob
from rljob_trainer.checkpoint import files
from rljob_trainer.checkpoint.records import compute_file_record
from rljob_trainer.errors import CheckpointError
from rljob_trainer.resume import choose_resume_point


def save(directory: Path, step: int, content: bytes = b"weights") -> files.Checkpoint:
    temporary = files.begin(directory, step)
    (temporary / "state").mkdir()
    path = temporary / "state" / "__0_0.distcp"
    path.write_bytes(content)
    records = [compute_file_record(temporary, path)]
    return files.publish(temporary, step=step, world_size=2, trainer_state={"step": step}, records=records)


def newest(directory: Path) -> tuple[int | None, list[str]]:
    reasons: list[str] = []
    found = files.find_newest(directory, reasons.append)
    return (None if found is None else found.step), reasons


def test_a_published_checkpoint_is_found(tmp_path):
    checkpoint = save(tmp_path, 20)
    assert checkpoint.path == tmp_path / "step-20"
    assert (tmp_path / "latest").read_text() == "step-20\n"
    assert newest(tmp_path) == (20, [])
    found = files.read_checkpoint(tmp_path / "step-20")
    assert isinstance(found, files.Checkpoint)
    assert files.read_trainer_state(found) == {"step": 20}
    assert found.manifest.world_size == 2


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert newest(tmp_path)[0] == 100


@pytest.mark.parametrize("stop_after", ["begin", "state", "manifest"])
def test_an_interrupted_save_keeps_the_last_good_one(tmp_path, stop_after):
    save(tmp_path, 20)
    temporary = files.begin(tmp_path, 40)
    if stop_after != "begin":
        (temporary / "state.bin").write_bytes(b"half")
    if stop_after == "manifest":
        shutil.copy(tmp_path / "step-20" / "manifest.json", temporary)
    assert newest(tmp_path) == (20, [])
    assert (tmp_path / "latest").read_text() == "step-20\n"
    files.begin(tmp_path, 41)
    assert not temporary.exists()  # leftovers go with the next save


def damage_remove(path):
    (path / "state" / "__0_0.distcp").unlink()


def damage_truncate(path):
    (path / "state" / "__0_0.distcp").write_bytes(b"")


def damage_flip(path):
    (path / "state" / "__0_0.distcp").write_bytes(b"wEights")


def damage_manifest(path):
    (path / "manifest.json").write_text('{"step": 40, "files": [')


def damage_no_manifest(path):
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_remove, "is missing"),
        (damage_truncate, "has 0 bytes, the manifest says 7"),
        (damage_flip, "checksum"),
        (damage_manifest, "damaged"),
        (damage_no_manifest, "interrupted"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(tmp_path, damage, reason):
    save(tmp_path, 20)
    damage(save(tmp_path, 40).path)
    step, reasons = newest(tmp_path)
    assert step == 20
    assert len(reasons) == 1
    assert "step-40" in reasons[0]
    assert reason in reasons[0]


def test_files_of_a_rank_that_the_driver_cannot_see_fail_the_save(tmp_path):
    """Shards on node-local disks (verl 4024): loud at save, not days later at resume."""
    save(tmp_path, 20)
    temporary = files.begin(tmp_path, 40)
    path = temporary / "__1_0.distcp"
    path.write_bytes(b"shard")
    records = [compute_file_record(temporary, path)]
    path.unlink()
    with pytest.raises(CheckpointError, match=r"not visible to the driver.*ReadWriteMany"):
        files.publish(temporary, step=40, world_size=2, trainer_state={}, records=records)
    assert newest(tmp_path) == (20, [])
    assert not temporary.exists()


def test_a_full_disk_fails_typed_and_keeps_the_last_good_one(tmp_path, monkeypatch):
    save(tmp_path, 20)
    temporary = files.begin(tmp_path, 40)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomically", full)
    with pytest.raises(CheckpointError, match="No space left"):
        files.publish(temporary, step=40, world_size=2, trainer_state={}, records=[])
    assert not temporary.exists()
    assert newest(tmp_path) == (20, [])


def test_retention_counts_complete_checkpoints_on_disk(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    damage_no_manifest(tmp_path / "step-40")
    assert files.prune(tmp_path, 2, 30) == [10]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-20", "step-30"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_retention_keeps_what_was_just_published_instead_of_a_newer_damaged_one(tmp_path, keep_last):
    damage_flip(save(tmp_path, 20).path)
    step, reasons = newest(tmp_path)
    assert step is None  # so the run starts anew
    assert len(reasons) == 1
    assert "step-20" in reasons[0]
    for published in (3, 5):
        save(tmp_path, published)
        files.prune(tmp_path, keep_last, published)
    assert newest(tmp_path) == (5, [])
    assert len(files.list_step_directories(tmp_path)) == keep_last


def test_retention_leaves_what_another_version_wrote(tmp_path):
    """Read by the version that wrote it, these may be days of training."""
    for step, change in ((20, {"version": 99}), (30, {"a_field_of_later": 1})):
        manifest = save(tmp_path, step).path / files.MANIFEST_FILE
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert newest(tmp_path)[0] is None
    save(tmp_path, 5)
    assert files.prune(tmp_path, 1, 5) == []
    assert [path.name for path in files.list_step_directories(tmp_path)] == ["step-30", "step-20", "step-5"]


def test_publishing_replaces_an_incomplete_directory_of_the_same_step(tmp_path):
    damage_no_manifest(save(tmp_path, 40).path)
    save(tmp_path, 40, b"again")
    assert newest(tmp_path) == (40, [])


def test_another_jobs_directory_is_refused_unless_adopted(tmp_path):
    claim = {"name": "job", "namespace": "default"}
    files.claim_run_directory(tmp_path, uid="first", adopt=False, **claim)
    files.claim_run_directory(tmp_path, uid="first", adopt=False, **claim)
    with pytest.raises(CheckpointError, match=r"'first' \(this job: 'second'\).*adopt: true"):
        files.claim_run_directory(tmp_path, uid="second", adopt=False, **claim)
    files.claim_run_directory(tmp_path, uid="second", adopt=True, **claim)
    assert json.loads((tmp_path / "owner.json").read_text())["uid"] == "second"
    with pytest.raises(CheckpointError):
        files.claim_run_directory(tmp_path, uid="first", adopt=False, **claim)


def test_a_directory_that_cannot_be_made_is_a_typed_failure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        files.claim_run_directory(tmp_path / "file" / "run", uid="u", name="j", namespace="n", adopt=False)


def resume(make_job, directory, *, floor=0, attempt=1, **checkpoint) -> tuple[int | None, bool | None]:
    job: ResolvedJob = make_job(run_directory=str(directory), floor=floor, checkpoint=checkpoint)
    job = job.model_copy(update={"attempt": attempt})
    point = choose_resume_point(job, lambda _: None)
    return (None, None) if point is None else (point.checkpoint.step, point.is_own)


def test_resume_auto_takes_the_newest_or_starts_anew(tmp_path, make_job):
    assert resume(make_job, tmp_path) == (None, None)
    save(tmp_path, 20)
    save(tmp_path, 40)
    assert resume(make_job, tmp_path) == (40, True)
    assert resume(make_job, tmp_path, floor=40) == (40, True)


def test_resume_below_the_floor_is_refused(tmp_path, make_job):
    with pytest.raises(CheckpointError, match="reached step 20"):
        resume(make_job, tmp_path, floor=20)
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"of step 20, below the floor of step 40"):
        resume(make_job, tmp_path, floor=40)


def test_resume_never_refuses_to_overwrite(tmp_path, make_job):
    assert resume(make_job, tmp_path, resume="Never") == (None, None)
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"Never, but .* step 20"):
        resume(make_job, tmp_path, resume="Never")


def test_resume_never_lets_a_retry_continue_from_the_jobs_own_checkpoint(tmp_path, make_job):
    assert resume(make_job, tmp_path, resume="Never", attempt=2) == (None, None)  # attempt 1 had saved nothing
    save(tmp_path, 20)
    assert resume(make_job, tmp_path, resume="Never", attempt=2) == (20, True)
    assert resume(make_job, tmp_path, resume="Never", attempt=2, floor=20) == (20, True)
    with pytest.raises(CheckpointError, match="below the floor of step 40"):
        resume(make_job, tmp_path, resume="Never", attempt=3, floor=40)


def test_resume_required_refuses_to_start_anew(tmp_path, make_job):
    with pytest.raises(CheckpointError, match="Required"):
        resume(make_job, tmp_path, resume="Required")
    save(tmp_path, 20)
    assert resume(make_job, tmp_path, resume="Required") == (20, True)


def test_resume_from_another_run(tmp_path, make_job):
    other = save(tmp_path / "other", 60).path
    run = tmp_path / "run"
    assert resume(make_job, run, resume_from_path=str(other)) == (60, False)
    with pytest.raises(CheckpointError, match="resumeFromPath"):
        resume(make_job, run, resume_from_path=str(tmp_path / "nothing"))
    save(run, 5)  # a restart of the run itself continues the run
    assert resume(make_job, run, resume_from_path=str(other)) == (5, True)


def save_until(directory: str, num_effects: int) -> None:
    """Save step 40 and apply retention; die by SIGKILL right before the n-th effect on the file system."""
    effects = 0

    def dying(call):
        def run(*arguments, **keywords):
            nonlocal effects
            effects += 1
            if effects == num_effects:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return run

    for owner, name in (
        *((os, name) for name in ("fsync", "replace", "mkdir", "unlink", "rmdir")),
        (Path, "write_bytes"),
        (Path, "open"),
    ):
        setattr(owner, name, dying(getattr(owner, name)))
    save(Path(directory), 40, b"newer weights")
    files.prune(Path(directory), 2, 40)
    os._exit(0)


def test_a_kill_before_any_effect_of_a_save_never_breaks_a_resume(tmp_path):
    """Every point of the save and of the retention after it, in processes of their own."""
    context = multiprocessing.get_context("fork")
    found = []
    for num_effects in range(1, 100):
        directory = tmp_path / str(num_effects)
        for step in (10, 20):
            save(directory, step)
        process = context.Process(target=save_until, args=(str(directory), num_effects))
        process.start()
        process.join(timeout=60)
        step, reasons = newest(directory)
        assert step in (20, 40), (num_effects, reasons)
        assert not [reason for reason in reasons if "step-20" in reason or "step-40" in reason], num_effects
        assert (directory / "latest").read_text() in ("step-20\n", "step-40\n")
        found.append(step)
        save(directory, 60)  # the next attempt's save works, and clears what was left
        files.prune(directory, 2, 60)
        assert newest(directory) == (60, [])
        assert not list(directory.glob("*.tmp"))
        assert len(files.list_step_directories(directory)) == 2  # nor remains of a deletion
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert num_effects > 12  # the points were really different ones
    assert found == sorted(found)  # old until it is published, new ever after
