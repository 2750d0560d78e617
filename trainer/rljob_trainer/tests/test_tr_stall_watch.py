"""Who waits for whom when a run hangs: the stacks of driver, ranks and engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from rljob_trainer.distributed.waiting import PROBE_GROUP, Actor
from rljob_trainer.engines.actor import EngineActor
from rljob_trainer.stacks import format_stacks
from rljob_trainer.stall_watch import Silence, StallWatch, collect_stacks
from rljob_trainer.worker import TrainWorker


def wait_for_a_peer(has_begun: threading.Event, event: threading.Event) -> None:
    has_begun.set()
    event.wait()


@contextmanager
def waiting_thread(name: str) -> Iterator[None]:
    has_begun, event = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_for_a_peer, args=(has_begun, event), name=name, daemon=True)
    thread.start()
    assert has_begun.wait(timeout=60)
    try:
        yield
    finally:
        event.set()
        thread.join()


def test_stacks_show_each_thread_with_its_name_and_where_it_is():
    with waiting_thread("a-collective"):
        text = format_stacks()
    assert "thread a-collective:\n" in text
    assert "in wait_for_a_peer" in text
    assert "format_stacks" not in text  # not the asking thread


def test_a_silence_is_told_once_until_there_is_a_new_heartbeat():
    silence = Silence(60)
    assert not silence.is_too_long(1000.0, now=0)
    assert not silence.is_too_long(1000.0, now=59)
    assert silence.is_too_long(1000.0, now=60)
    assert not silence.is_too_long(1000.0, now=500)
    assert not silence.is_too_long(900.0, now=501)  # the clock of the heartbeat may be set back
    assert silence.is_too_long(900.0, now=561)


def test_a_watch_writes_the_drivers_stacks():
    written: list[str] = []
    with StallWatch(0.0, get_heartbeat=lambda: 1.0, get_actors=lambda: [], write=written.append):
        deadline = time.monotonic() + 120
        while len(written) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert "spec.failurePolicy.stallTimeoutSeconds" in written[0]
    assert "thread MainThread:\n" in written[1]
    assert "in test_a_watch_writes_the_drivers_stacks" in written[1]


@pytest.mark.parametrize("actor_class", [TrainWorker, EngineActor])
def test_ranks_and_engines_can_be_asked(actor_class):
    with waiting_thread("a-collective"):
        text = actor_class.format_stacks(object())
    assert "in wait_for_a_peer" in text


class Hanging:
    """As ranks and engines: answers beside what it does. They themselves take ten seconds each to import torch."""

    def get_pid(self) -> int:
        return os.getpid()

    def format_stacks(self) -> str:
        return format_stacks()

    def wait_in_a_collective(self) -> None:
        threading.Event().wait()

    def watch(self) -> None:
        threading.Event().wait()


@pytest.mark.ray
def test_ranks_and_engines_tell_where_they_are_and_who_does_not_is_named(actor_ray):
    cls = ray.remote(num_cpus=0, concurrency_groups={PROBE_GROUP: 1})(Hanging)
    ranks = [Actor(cls.remote(), f"rank {index}", "node") for index in range(4)]
    engine = Actor(cls.remote(), "engine 0", "node", is_engine=True)
    pids = ray.get([actor.handle.get_pid.remote() for actor in (*ranks, engine)], timeout=300)
    hung = [rank.handle.wait_in_a_collective.remote() for rank in ranks]
    watching = engine.handle.watch.remote()
    ray.wait([*hung, watching], timeout=1)
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[3], signal.SIGKILL)
    ray.wait([hung[3]], timeout=60)
    try:
        texts = collect_stacks([*ranks, engine], timeout_seconds=10)
    finally:
        os.kill(pids[2], signal.SIGKILL)
    by_label = {text.partition(":\n")[0]: text for text in texts}
    assert set(by_label) == {
        "stacks of rank 0, rank 1",  # the same: once
        "stacks of rank 2",
        "stacks of rank 3",
        "stacks of engine 0",
    }
    assert "in wait_in_a_collective" in by_label["stacks of rank 0, rank 1"]
    assert "no answer within 10 s" in by_label["stacks of rank 2"]
    assert "ActorDiedError" in by_label["stacks of rank 3"]
    assert "in watch" in by_label["stacks of engine 0"]
