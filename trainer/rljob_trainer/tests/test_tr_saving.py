"""The driver's side of saves that run beside the training: published when complete, one at a time, failures typed."""

import functools
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from rljob_trainer.checkpoint import files
from rljob_trainer.checkpoint.records import compute_file_record
from rljob_trainer.distributed.cluster import CHECKPOINT_GROUP, Cluster
from rljob_trainer.distributed.waiting import Actor
from rljob_trainer.errors import CheckpointError, TransientError
from rljob_trainer.saving import CheckpointSaver

pytestmark = pytest.mark.ray


class Rank:
    """Writes one file when it is told to; fails or dies on request."""

    def __init__(self, rank, control):
        self.rank, self.control = rank, Path(control)

    def start_save(self, directory):
        self.directory = Path(directory)

    def finish_save(self):
        deadline = time.monotonic() + 120
        while not (self.control / "go").exists() and time.monotonic() < deadline:
            if (self.control / f"fail-{self.rank}").exists():
                raise CheckpointError("checkpoint state at /x: No space left on device; the storage is full")
            if (self.control / f"die-{self.rank}").exists():
                time.sleep(1)  # its peers notice first
                sys.exit(1)
            if (self.control / f"die-{1 - self.rank}").exists():
                raise TransientError("checkpoint state at /x: Connection closed by peer")
            time.sleep(0.02)
        path = self.directory / f"shard-{self.rank}"
        path.write_bytes(b"weights")
        return [compute_file_record(self.directory, path)]


class Setting:
    """A saver over two ranks, and what it told the loop."""

    def __init__(self, make_job, directory):
        self.run, self.control = directory / "run", directory / "control"
        self.run.mkdir()
        self.control.mkdir()
        actor_class = ray.remote(num_cpus=0, concurrency_groups={CHECKPOINT_GROUP: 1})(Rank)
        self.actors = [actor_class.remote(rank, str(self.control)) for rank in range(2)]
        cluster = SimpleNamespace(ranks=[Actor(actor, f"rank {i}", "node") for i, actor in enumerate(self.actors)])
        cluster.call_ranks = functools.partial(Cluster.call_ranks, cluster)
        self.notes, self.published, self.heartbeats = [], [], []
        self.saver = CheckpointSaver(
            make_job(run_directory=str(self.run), checkpoint={"keep_last": 2}),
            cluster,
            heartbeat=lambda: self.heartbeats.append(1),
            note=self.notes.append,
            on_published=self.published.append,
        )

    def tell(self, word):
        (self.control / word).touch()

    def take_back(self, word):
        (self.control / word).unlink()

    def collect_until(self, is_done):
        deadline = time.monotonic() + 120
        while not is_done():
            assert time.monotonic() < deadline
            self.saver.collect()
            time.sleep(0.02)


@pytest.fixture
def setting(actor_ray, make_job, tmp_path):
    setting = Setting(make_job, tmp_path)
    yield setting
    for actor in setting.actors:
        ray.kill(actor)


def test_training_goes_on_until_every_rank_has_written(setting):
    state = {"step": 3, "sampler": {"position": 7}}
    setting.saver.start(3, state)
    setting.saver.collect()
    assert setting.published == []
    assert files.list_step_directories(setting.run) == []
    setting.tell("go")
    setting.collect_until(lambda: setting.published)
    (checkpoint,) = setting.published
    assert (checkpoint.step, checkpoint.path) == (3, setting.run / "step-3")
    assert files.read_trainer_state(checkpoint) == state
    assert {record.path for record in checkpoint.manifest.files} == {"shard-0", "shard-1", "trainer.json"}
    setting.saver.collect()
    setting.saver.wait()
    assert len(setting.published) == 1


def test_a_second_save_waits_for_the_first_and_old_ones_go(setting):
    setting.saver.start(1, {})
    threading.Timer(0.5, setting.tell, ["go"]).start()
    setting.saver.start(2, {})
    assert [checkpoint.step for checkpoint in setting.published] == [1]
    assert setting.notes == ["checkpoint of step 2: waiting until that of step 1 is written"]
    assert setting.heartbeats  # bytes that arrive are progress
    setting.saver.start(3, {})
    setting.saver.wait()
    assert [checkpoint.step for checkpoint in setting.published] == [1, 2, 3]
    assert [path.name for path in files.list_step_directories(setting.run)] == ["step-3", "step-2"]


def test_a_failed_save_surfaces_at_the_next_step_and_the_last_good_one_stands(setting):
    setting.tell("go")
    setting.saver.start(1, {})
    setting.saver.wait()
    setting.take_back("go")
    setting.saver.start(2, {})
    setting.tell("fail-1")  # the other rank still writes
    with pytest.raises(CheckpointError, match="the storage is full"):
        setting.collect_until(lambda: False)
    assert not list(setting.run.glob("*.tmp"))
    assert files.find_newest(setting.run, lambda _: None).step == 1
    setting.saver.settle()  # nothing is left to settle
    assert [checkpoint.step for checkpoint in setting.published] == [1]


def test_a_run_that_fails_otherwise_keeps_a_save_that_was_nearly_written(setting):
    setting.saver.start(1, {})
    threading.Timer(0.5, setting.tell, ["go"]).start()
    setting.saver.settle()
    assert [checkpoint.step for checkpoint in setting.published] == [1]
    assert setting.notes == []


def test_a_lost_rank_is_named_and_hides_no_other_failure(setting):
    """Its peer's collective breaks first, which is no failure of the storage and not the peer's fault."""
    setting.saver.start(1, {})
    setting.tell("die-1")
    with pytest.raises(TransientError, match="rank 1 is gone"):
        setting.collect_until(lambda: False)
    assert setting.published == []
    setting.saver.settle()
    assert "checkpoint of step 1 was not finished when the run failed" in setting.notes[-1]
    assert files.list_step_directories(setting.run) == []
