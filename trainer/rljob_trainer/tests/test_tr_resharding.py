"""Checkpoints of real ranks: another world size goes on with the same weights, moments and next update; a save beside
the training holds the state of its step; full storage is a typed failure.
"""

import copy
import errno
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import ProcessExitedException
from tr_ranks import run_ranks
from tr_tiny import make_loss, make_rows, save_tiny_model

from rljob_api.v1alpha1.model import DType
from rljob_api.v1alpha1.rollout import Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.checkpoint import files, state
from rljob_trainer.checkpoint.records import compute_file_record
from rljob_trainer.checkpoint.state import StatePart, StateWriter, gather_full_weights, load_state
from rljob_trainer.errors import CheckpointError, TransientError
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sharding import shard_policy
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, count_trainable, split_rows
from rljob_trainer.update import Ranks, apply_update

WORLD_SIZES = [1, 2, 4]


def build(source):
    policy = PolicyModel(load_causal_lm(source))
    shard_policy(policy, init_device_mesh("cpu", (dist.get_world_size(),)), DType.FLOAT32, recompute_blocks=False)
    return policy, build_optimizer(policy, Training())


def update(policy, optimizer, seed):
    """One update; the same at every world size."""

    def reduce(operation):
        def run(values):
            dist.all_reduce(values, op=operation)
            return values

        return run

    rows = make_rows(12, seed=seed)
    plan = plan_batches([row.num_tokens for row in rows], dist.get_world_size(), micro_batch_tokens=60)
    batch = MiniBatch(split_rows(rows, plan)[dist.get_rank()], *count_trainable(rows), 1e-2)
    return apply_update(
        policy,
        optimizer,
        batch,
        make_loss(),
        gradient_clip=1.0,
        ranks=Ranks(dist.get_world_size(), reduce(dist.ReduceOp.SUM), reduce(dist.ReduceOp.MAX)),
        device=torch.device("cpu"),
        on_micro_batch=lambda: None,
    )


def gather(policy, optimizer):
    """Whole weights and optimizer state; on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = get_optimizer_state_dict(policy, optimizer, options=options)["state"] if dist.get_rank() == 0 else None
    if dist.get_rank() != 0:
        get_optimizer_state_dict(policy, optimizer, options=options)
    # On one rank these are the live tensors.
    return copy.deepcopy({"weights": dict(gather_full_weights(policy)), "moments": moments})


def save_and_go_on(rank, source, directory):
    """Two updates, a save in the background, a third update while it is held up before its first byte."""
    directory = Path(directory)
    policy, optimizer = build(source)
    for seed in (1, 2):
        update(policy, optimizer, seed)
    before = gather(policy, optimizer)
    gate = threading.Event()
    save = state.save_distributed

    def save_later(*arguments, **keywords):
        assert gate.wait(timeout=300)
        return save(*arguments, **keywords)

    state.save_distributed = save_later
    writer = StateWriter(use_gpu=False)
    writer.start(directory / "saved", {"policy": StatePart(policy, optimizer)})
    with pytest.raises(RuntimeError, match="still being written"):
        writer.start(directory / "saved", {"policy": StatePart(policy, optimizer)})
    metrics = update(policy, optimizer, 3)
    assert not (directory / "saved" / "state").exists()
    gate.set()
    records = writer.finish()
    writer.close()
    after = gather(policy, optimizer)
    if rank == 0:
        torch.save({"before": before, "after": after, "loss": metrics.loss}, directory / "expected.pt")
    (directory / f"records-{rank}.json").write_text(json.dumps([record.path for record in records]))


def load_and_go_on(rank, source, saved, target):
    policy, optimizer = build(source)
    update(policy, optimizer, 9)  # whatever was there before must not matter
    load_state(Path(saved), {"policy": StatePart(policy, optimizer)})
    before = gather(policy, optimizer)
    metrics = update(policy, optimizer, 3)
    after = gather(policy, optimizer)
    if rank == 0:
        torch.save({"before": before, "after": after, "loss": metrics.loss}, target)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    """Directory with a checkpoint, by the world size that wrote it."""
    directories = {}

    def get(world_size):
        if world_size not in directories:
            directory = tmp_path_factory.mktemp(f"world-{world_size}")
            (directory / "saved").mkdir()
            run_ranks(save_and_go_on, world_size, source, str(directory))
            directories[world_size] = directory
        return directories[world_size]

    return get


def flatten(gathered):
    flat = dict(gathered["weights"])
    for name, values in gathered["moments"].items():
        flat.update({f"{name}:{key}": torch.as_tensor(value) for key, value in values.items()})
    return flat


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2), (2, 1)])
def test_another_world_size_goes_on_as_the_first_would(saved, source, tmp_path, before, after):
    directory = saved(before)
    expected = torch.load(directory / "expected.pt")
    run_ranks(load_and_go_on, after, source, str(directory / "saved"), str(tmp_path / "found.pt"))
    found = torch.load(tmp_path / "found.pt")
    loaded, wrote = flatten(found["before"]), flatten(expected["before"])
    assert set(loaded) == set(wrote)
    assert any(name.endswith(":exp_avg_sq") for name in wrote)
    for name, tensor in wrote.items():
        assert torch.equal(loaded[name], tensor), name  # moments, step counts and weights, bit by bit
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    next_found, next_expected = flatten(found["after"]), flatten(expected["after"])
    for name, tensor in next_expected.items():
        if "k_proj.bias" in name:
            continue  # cancels in the softmax: its gradient is rounding, which AdamW scales up to a whole step
        torch.testing.assert_close(next_found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert not torch.equal(next_expected["causal_lm.model.norm.weight"], wrote["causal_lm.model.norm.weight"])


def test_each_rank_lists_its_own_files(saved):
    directory = saved(2)
    listed = [json.loads((directory / f"records-{rank}.json").read_text()) for rank in range(2)]
    assert not set(listed[0]) & set(listed[1])
    on_disk = {
        str(path.relative_to(directory / "saved")) for path in (directory / "saved").rglob("*") if path.is_file()
    }
    assert set(listed[0]) | set(listed[1]) == on_disk


def save_to_full_storage(rank, source, directory):
    directory = Path(directory)
    policy, optimizer = build(source)
    update(policy, optimizer, 1)
    writer = StateWriter(use_gpu=False)
    writer.start(directory / "small", {"policy": StatePart(policy, optimizer)})
    update(policy, optimizer, 2)
    try:
        writer.finish()
    except CheckpointError as error:
        (directory / f"error-{rank}.txt").write_text(str(error))
    # The next save, on storage with room, is complete.
    writer.start(directory / "large", {"policy": StatePart(policy, optimizer)})
    records = writer.finish()
    assert all((directory / "large" / record.path).stat().st_size == record.num_bytes for record in records)


def save_while_a_peer_dies(rank, source, directory):
    """Rank 1 is killed before it has written anything; rank 0 reports what it sees, and both are gone."""
    policy, optimizer = build(source)
    update(policy, optimizer, 1)
    writer = StateWriter(use_gpu=False)
    parts = {"policy": StatePart(policy, optimizer)}
    if rank == 1:
        writer._write = lambda *_: os._exit(9)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what started them ends the others with it
    writer.start(Path(directory) / "save", parts)
    try:
        writer.finish()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        Path(directory, "error.txt").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def test_a_peer_that_dies_during_a_save_is_no_failure_of_the_storage(source, tmp_path):
    """Taken for one, the job would fail for good instead of starting its next attempt."""
    (tmp_path / "save").mkdir()
    with pytest.raises(ProcessExitedException, match="process 1 terminated with exit code 9"):
        run_ranks(save_while_a_peer_dies, 2, source, str(tmp_path))
    message = (tmp_path / "error.txt").read_text()
    assert message.startswith(f"TransientError: checkpoint state at {tmp_path / 'save'}"), message


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RuntimeError("[gloo] Connection closed by peer [fd00::1]:2"), TransientError),
        (dist.DistNetworkError("the client socket has timed out"), TransientError),
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError),
        (KeyError("model.embed_tokens.weight"), CheckpointError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("is_reported", [False, True], ids=["raised here", "reported by a rank"])
def test_lost_peers_and_bad_storage_are_told_apart(failure, expected, is_reported, tmp_path):
    error = CheckpointException("write", {1: (failure, None)}) if is_reported else failure
    with pytest.raises(expected, match=str(tmp_path)), state._storage_errors(tmp_path):
        raise error


@pytest.fixture
def small_storage(tmp_path):
    """A file system of 200 kB."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root with CAP_SYS_ADMIN")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_storage_that_fills_up_is_a_typed_failure_of_every_rank(small_storage, source, tmp_path):
    (tmp_path / "large").mkdir()
    run_ranks(save_to_full_storage, 2, source, str(tmp_path))
    for rank in range(2):
        message = (tmp_path / f"error-{rank}.txt").read_text()
        assert "the storage is full" in message
        assert "spec.checkpoint.keepLast" in message
        assert str(small_storage) in message


def test_storage_that_fills_up_keeps_the_last_good_checkpoint(small_storage):
    temporary = files.begin(small_storage, 20)
    (temporary / "weights").write_bytes(b"x" * 90_000)
    record = compute_file_record(temporary, temporary / "weights")
    files.publish(temporary, step=20, world_size=1, trainer_state={}, records=[record])
    # Before anything is written: another one of this size does not fit.
    (small_storage / "other").write_bytes(b"x" * 40_000)
    with pytest.raises(CheckpointError, match=r"bytes free, a checkpoint needs 99,\d+ \(step 20 took"):
        files.check_free_space(small_storage)
    # And where that could not be foreseen:
    temporary = files.begin(small_storage, 40)
    with pytest.raises(CheckpointError, match="No space left"):
        files.publish(temporary, step=40, world_size=1, trainer_state={"x": "y" * 200_000}, records=[])
    assert not temporary.exists()
    assert files.find_newest(small_storage, lambda _: None).step == 20


def update_with_offload(rank, source, target, offload):
    """Three updates; where everything lives in between."""
    training = Training.model_validate({"offload": offload})
    policy = PolicyModel(load_causal_lm(source))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_policy(policy, mesh, DType.FLOAT32, recompute_blocks=False, offload_parameters=training.offload.parameters)
    optimizer = build_optimizer(policy, training)
    places = []
    for seed in (1, 2, 3):
        update(policy, optimizer, seed)
        moments = [state["exp_avg"].to_local() for state in optimizer.state.values()]
        places.append([moment.data_ptr() for moment in moments])
        assert all(moment.device.type == "cpu" for moment in moments)
    gathered = gather(policy, optimizer)
    if rank == 0:
        torch.save(gathered | {"places": places}, target)


@pytest.mark.parametrize(
    "offload", [{"optimizer": True}, {"parameters": True}, {"optimizer": True, "parameters": True}]
)
def test_state_in_host_memory_is_the_same_state(source, tmp_path, offload):
    run_ranks(update_with_offload, 2, source, str(tmp_path / "plain.pt"), {})
    run_ranks(update_with_offload, 2, source, str(tmp_path / "offloaded.pt"), offload)
    plain, offloaded = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "offloaded.pt")
    expected = flatten(plain)
    for name, tensor in flatten(offloaded).items():
        assert torch.equal(tensor, expected[name]), name
    assert offloaded["places"][0] == offloaded["places"][2]  # host memory is allocated once
