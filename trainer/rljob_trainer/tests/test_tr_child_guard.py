"""Which processes count as an engine's."""

import os
from pathlib import Path

import torch

from rljob_trainer.engines.child_guard import list_descendants


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
