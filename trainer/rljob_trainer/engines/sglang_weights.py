"""The weights an SGLang engine really holds, under the names the trainer uses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.engines.ledger import read_parameter_shapes
from rljob_trainer.errors import EngineDied
from rljob_trainer.models.policy import load_config
from rljob_trainer.sync.buckets import combine_checksums, compute_tensor_checksum

SAVE_MILLISECONDS: Final = 300_000
FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
HEAD_NAME: Final = "lm_head.weight"
EMBEDDING_NAME: Final = "model.embed_tokens.weight"
COLUMN_SHARDED: Final = ("o_proj.weight", "down_proj.weight")
"""Cut along their input; everything else that is cut at all is cut along dimension 0."""


def compute_engine_checksum(processes: Any, settings: EngineSettings) -> int:
    """`combine_checksums` over what the schedulers hold, un-fused and joined over the ranks.

    Raises:
        EngineDied: the replica spans nodes, or holds a parameter this cannot map.
    """
    if settings.num_nodes > 1:
        raise EngineDied("SGLang engine: a checksum needs all ranks on one node")
    with tempfile.TemporaryDirectory(prefix="rljob-weights-") as directory:
        _save(processes, directory)
        shards = _load_shards(Path(directory), settings.tensor_parallel_size)
    config = load_config(settings.model_source, settings.model_revision)
    shapes = read_parameter_shapes(settings.model_source, settings.model_revision)
    tensors = dict(unfuse(shards, shapes, num_kv_heads=config.num_key_value_heads))
    missing = sorted(set(shapes) - set(tensors))
    if missing:
        raise EngineDied(f"SGLang engine: holds no {missing[0]!r} ({len(missing)} parameters not found)")
    return combine_checksums(compute_tensor_checksum(name, tensors[name]) for name in shapes)


def unfuse(
    shards: Sequence[Mapping[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    num_kv_heads: int,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) from each rank's parameters under SGLang's names.

    SGLang stacks q, k, v and gate, up; cuts rows or columns over the ranks; repeats KV heads where there are more
    ranks than KV heads; and pads the vocabulary.

    Args:
        shards: per rank, name -> tensor.
        shapes: of the full tensors by Hugging Face name.
        num_kv_heads: KV heads of the model.
    """
    size = len(shards)
    for fused_name in shards[0]:
        pieces = [shard[fused_name] for shard in shards]
        if fused_name == HEAD_NAME and HEAD_NAME not in shapes and EMBEDDING_NAME not in shards[0]:
            fused_name = EMBEDDING_NAME  # a tied weight has two names, of which SGLang saves either
        stem = next((stem for stem in FUSED if f".{stem}." in fused_name), None)
        if stem is None:
            yield fused_name, _join(fused_name, pieces, shapes.get(fused_name))
            continue
        parts = FUSED[stem]
        names = [fused_name.replace(stem, part) for part in parts]
        rows = [shapes[name][0] // size for name in names]
        repeats = 1
        if stem == "qkv_proj" and num_kv_heads < size:
            repeats = size // num_kv_heads
            rows[1], rows[2] = shapes[names[1]][0] // num_kv_heads, shapes[names[2]][0] // num_kv_heads
        per_rank = [piece.split(rows) for piece in pieces]
        for index, name in enumerate(names):
            step = 1 if index == 0 else repeats
            yield name, torch.cat([per_rank[rank][index] for rank in range(0, size, step)])


def _join(name: str, pieces: Sequence[Tensor], shape: tuple[int, ...] | None) -> Tensor:
    if shape is None or tuple(pieces[0].shape) == shape:
        return pieces[0]  # a replicated parameter, or one that the trainer does not have (a tied head)
    if name.endswith(COLUMN_SHARDED):
        return torch.cat(list(pieces), dim=1)
    joined = torch.cat(list(pieces))
    return joined[: shape[0]] if joined.ndim == len(shape) and joined.shape[1:] == shape[1:] else joined


def _save(processes: Any, directory: str) -> None:
    import zmq

    async def save() -> None:
        processes.engine.send_to_rpc.setsockopt(zmq.RCVTIMEO, SAVE_MILLISECONDS)
        processes.engine.save_sharded_model(path=directory, pattern=None, max_size=None)

    # On the thread that made the socket: ZeroMQ aborts the process when two threads meet in one.
    processes.call(save(), what="save_sharded_model", timeout_seconds=SAVE_MILLISECONDS / 1000)


def _load_shards(directory: Path, size: int) -> list[dict[str, Tensor]]:
    from safetensors.torch import load_file

    shards: list[dict[str, Tensor]] = []
    for rank in range(size):
        shard: dict[str, Tensor] = {}
        for path in sorted(directory.glob(f"model-rank-{rank}-part-*.safetensors")):
            shard.update(load_file(path))
        shards.append(shard)
    if not all(shards):
        found = sorted(path.name for path in directory.iterdir())
        raise EngineDied(f"SGLang engine: saved weights of {size} ranks are incomplete: {found}")
    return shards
