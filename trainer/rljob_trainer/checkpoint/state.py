"""Sharded model and optimizer state through torch.distributed.checkpoint: loadable at any world size."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
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
from rljob_trainer.distributed.process_group import is_broken_collective
from rljob_trainer.errors import CheckpointError, TransientError
from rljob_trainer.models.sharding import CHECKPOINT_WRAPPER_PART

STATE_DIRECTORY: Final = "state"
WRITE_TIMEOUT_SECONDS: Final = 3600.0
"""For the slowest rank's files."""
FULL_BYTES: Final = 2**20
"""Storage with less than this free is full."""


@dataclass(frozen=True)
class StatePart:
    """One sharded model of the run, and the optimizer that trains it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    trainable_only: bool = False
    """Adapters: the frozen base is not saved, and not touched by a load."""

    @property
    def options(self) -> StateDictOptions | None:
        """Of torch's functions on state dicts."""
        return StateDictOptions(ignore_frozen_params=True, strict=False) if self.trainable_only else None


StateParts = Mapping[str, StatePart]
"""By name (policy, reference, critic): the first level of the checkpoint's keys."""


class StateWriter:
    """Writes snapshots of the state behind the training's back, one at a time. Every rank has one.

    `start` copies the shards to host memory (pinned on GPUs, and then kept for the next save), which is all that the
    training waits for. The writing has a thread and a process group of its own, so that its collectives never mix with
    those of the updates.
    """

    def __init__(self, *, use_gpu: bool) -> None:
        """Collective: makes the process group."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_SECONDS))
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._stager = BlockingAsyncStager(cache_staged_state_dict=use_gpu)
        self._pending: Future[list[FileRecord]] | None = None

    def start(self, directory: Path, parts: StateParts) -> None:
        """Snapshot `parts`, and begin to write them into an existing directory. Collective.

        Raises:
            RuntimeError: the last snapshot is still being written.
        """
        if self._pending is not None and not self._pending.done():
            raise RuntimeError("the last checkpoint is still being written")
        snapshot = self._stager.stage(collect_state(parts))
        self._pending = self._executor.submit(self._write, directory, snapshot, torch.get_rng_state())

    def finish(self) -> list[FileRecord]:
        """Wait until every rank has written the snapshot of the last `start`; the files of this rank.

        Raises:
            CheckpointError: the storage is full or not writable. TransientError: another rank is lost.
        """
        if self._pending is None:
            raise RuntimeError("no checkpoint was started")
        return self._pending.result()

    def close(self) -> None:
        """Wait for the thread."""
        self._executor.shutdown(wait=True)

    def _write(self, directory: Path, snapshot: dict[str, Any], rng_state: torch.Tensor) -> list[FileRecord]:
        """Write this rank's shards; rank 0 also writes DCP's metadata."""
        target = directory / STATE_DIRECTORY
        rank = dist.get_rank()
        with _storage_errors(target):
            save_distributed(snapshot, checkpoint_id=str(target), process_group=self._group)
            torch.save(rng_state, target / f"rng-{rank}.pt")
            # DCP names data files `__<rank>_<n>.distcp`; each rank checks what it wrote itself, in parallel.
            own = [*target.glob(f"__{rank}_*.distcp"), target / f"rng-{rank}.pt"]
            if rank == 0:
                own.append(target / ".metadata")
            return [compute_file_record(directory, path) for path in sorted(own)]


def load_state(directory: Path, parts: StateParts) -> None:
    """Load into already sharded modules, resharding where the world size differs. Collective. Optimizers get moments
    and step counts; their hyperparameters stay.

    Raises:
        CheckpointError: the state does not fit these models. TransientError: another rank is lost.
    """
    source = directory / STATE_DIRECTORY
    with _storage_errors(source):
        state = collect_state(parts)
        # Weight decay, betas and the kernel are the job's as it is now, which may differ from the one that saved.
        groups = {name: state[name]["optimizer"].pop("param_groups") for name in parts if "optimizer" in state[name]}
        load_distributed(state, checkpoint_id=str(source))
        for name, part in parts.items():
            if part.optimizer is None:
                set_model_state_dict(part.module, state[name]["model"])
            else:
                set_state_dict(
                    part.module,
                    part.optimizer,
                    model_state_dict=state[name]["model"],
                    optim_state_dict=state[name]["optimizer"] | {"param_groups": groups[name]},
                    options=part.options,
                )
        rng = source / f"rng-{dist.get_rank()}.pt"
        if rng.exists():
            torch.set_rng_state(torch.load(rng, weights_only=True))


def collect_state(parts: StateParts) -> dict[str, Any]:
    """Sharded state (DTensors that share memory with the modules) by part, then `model` or `optimizer`."""
    state: dict[str, Any] = {}
    for name, part in parts.items():
        if part.optimizer is None:
            state[name] = {"model": get_model_state_dict(part.module)}
        else:
            is_fresh = not part.optimizer.state
            model, optimizer = get_state_dict(part.module, part.optimizer, options=part.options)
            if is_fresh:
                # torch fills moments by a step with gradients of 0, and counts it: the bias correction of the first
                # updates would be that of the second and third.
                for moments in part.optimizer.state.values():
                    moments["step"].zero_()
            if part.trainable_only:
                # torch leaves frozen tensors in that have a second name (a head tied to the embedding).
                names = {
                    name.replace(CHECKPOINT_WRAPPER_PART, "")
                    for name, parameter in part.module.named_parameters()
                    if parameter.requires_grad
                }
                model = {name: tensor for name, tensor in model.items() if name in names}
            state[name] = {"model": model, "optimizer": optimizer}
    return state


def gather_full_weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters on the CPU of rank 0 (empty on the others). Collective."""
    state: dict[str, Any] = get_model_state_dict(
        policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return state


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn I/O failures of any rank into one typed failure that names the path. A peer that is lost meanwhile is none:
    the checkpoint before this one stands, and the job is to be tried again."""
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        full = any(_is_disk_full(path, failure[0]) for failure in error.failures.values())
        if not full and any(is_broken_collective(failure[0]) for failure in error.failures.values()):
            raise TransientError(_describe(path, causes, full)) from error
        raise CheckpointError(_describe(path, causes, full)) from error
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        if is_broken_collective(error):
            raise TransientError(_describe(path, repr(error), full=False)) from error
        raise CheckpointError(_describe(path, repr(error), _is_disk_full(path, error))) from error


def _is_disk_full(path: Path, error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # torch's archive writer may say no more than that it is not where it should be: "unexpected pos 704 vs 598".
    if "unexpected pos" not in str(error):
        return "No space left" in str(error)
    existing = next(candidate for candidate in (path, *path.parents) if candidate.exists())
    return shutil.disk_usage(existing).free < FULL_BYTES


def _describe(path: Path, causes: str, full: bool) -> str:
    advice = "; the storage is full: free space or lower spec.checkpoint.keepLast" if full else ""
    return f"checkpoint state at {path}: {causes}{advice}"
