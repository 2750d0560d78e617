"""Sharded model and optimizer state through torch.distributed.checkpoint: loadable at any world size."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from rljob_trainer.checkpoint.records import FileRecord, compute_file_record
from rljob_trainer.errors import CheckpointError

STATE_DIRECTORY: Final = "state"
REFERENCE_KEY: Final = "reference"


def save_state(
    directory: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None
) -> list[FileRecord]:
    """Write this rank's shards; rank 0 also writes DCP's metadata. Collective. Returns the files of this rank.

    Raises:
        CheckpointError: the storage is full or not writable.
    """
    target = directory / STATE_DIRECTORY
    with _storage_errors(target):
        save_distributed(_collect(policy, optimizer, reference), checkpoint_id=str(target))
        torch.save(torch.get_rng_state(), target / f"rng-{dist.get_rank()}.pt")
        # DCP names data files `__<rank>_<n>.distcp`; each rank checks what it wrote itself, in parallel.
        own = [*target.glob(f"__{dist.get_rank()}_*.distcp"), target / f"rng-{dist.get_rank()}.pt"]
        if dist.get_rank() == 0:
            own.append(target / ".metadata")
        return [compute_file_record(directory, path) for path in sorted(own)]


def load_state(
    directory: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None
) -> None:
    """Load into already sharded modules, resharding where the world size differs. Collective.

    Raises:
        CheckpointError: the state does not fit this model.
    """
    source = directory / STATE_DIRECTORY
    with _storage_errors(source):
        state = _collect(policy, optimizer, reference)
        load_distributed(state, checkpoint_id=str(source))
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if reference is not None:
            set_model_state_dict(reference, state[REFERENCE_KEY])
        rng = source / f"rng-{dist.get_rank()}.pt"
        if rng.exists():
            torch.set_rng_state(torch.load(rng, weights_only=True))


def _collect(policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    if reference is not None:
        state[REFERENCE_KEY] = get_model_state_dict(reference)
    return state


def gather_full_weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters on the CPU of rank 0 (empty on the others). Collective."""
    state: dict[str, Any] = get_model_state_dict(
        policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return state


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn I/O failures of any rank into one typed failure that names the path."""
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        full = any(_is_disk_full(failure[0]) for failure in error.failures.values())
        raise CheckpointError(_describe(path, causes, full)) from error
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(_describe(path, repr(error), _is_disk_full(error))) from error


def _is_disk_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or "No space left" in str(error)


def _describe(path: Path, causes: str, full: bool) -> str:
    advice = "; the storage is full: free space or lower spec.checkpoint.keepLast" if full else ""
    return f"checkpoint state at {path}: {causes}{advice}"
