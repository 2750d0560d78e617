"""Which processes count as an engine's, and when they have ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rljob_trainer.engines.child_guard import end_processes, list_descendants, read_start_time

DEADLINE_SECONDS = 60.0
UNTIL_KILLED = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
STAYS = UNTIL_KILLED + "time.sleep(1000)"
FIRST_THREAD_ENDS = UNTIL_KILLED + (
    "import ctypes, threading; threading.Thread(target=time.sleep, args=(1000,)).start(); "
    "ctypes.CDLL(None).pthread_exit(None)"
)
ENDS_WHEN_ASKED = "import time; print('up', flush=True); time.sleep(1000)"


def test_the_manager_of_shared_memory_is_not_taken_for_an_engines_process():
    """Ended with the first engine that needed it, no later one could be handed weights (broken pipe)."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.ones(3).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    managers = [pid for pid in children if b"torch_shm_manager" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(managers) == 1
    assert managers[0] not in [pid for pid, _ in list_descendants(os.getpid())]
    assert tensor.sum() == 3


@pytest.fixture
def start_child():
    children = []

    def start(code):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout.readline() == b"up\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize(
    ("code", "is_killed"),
    [
        pytest.param(ENDS_WHEN_ASKED, False, id="ends when it is asked to"),
        pytest.param(STAYS, True, id="ignores SIGTERM"),
        pytest.param(FIRST_THREAD_ENDS, True, id="a zombie with a thread that runs"),
    ],
)
def test_processes_have_ended_when_end_processes_returns(code, is_killed, start_child):
    """A stopped engine whose process still ended had not given its GPU memory back."""
    child = start_child(code)
    pid, started = child.pid, read_start_time(child.pid)
    if code == FIRST_THREAD_ENDS:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while read_start_time(pid) is not None:
            assert time.monotonic() < deadline, "the first thread still runs"
            time.sleep(0.01)
    assert end_processes([(pid, started)], timeout_seconds=0.5 if is_killed else DEADLINE_SECONDS) == [pid] * is_killed
    assert child.poll() is not None


def test_another_process_of_the_same_pid_is_left_alone(start_child):
    child = start_child(ENDS_WHEN_ASKED)
    pid, started = child.pid, read_start_time(child.pid)
    assert end_processes([(pid, started - 1)]) == []
    assert child.poll() is None
