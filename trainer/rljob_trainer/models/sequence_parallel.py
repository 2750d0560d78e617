"""Ulysses sequence parallelism (arXiv 2309.14509): the ranks of a group share the tokens of a pack.

Each runs all layers on its own tokens; within attention they trade tokens for heads, so every rank sees whole sequences
in a part of the heads.

Shape legend: N packed tokens, P ranks of the group, n = ceil(N / P) tokens of one rank, H heads, h = H / P heads of one
rank, D head size, R response tokens of the pack, r those predicted on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from rljob_api.v1alpha1.model import Model, Toggle
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.packed_batch import PackedBatch


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that hold the same rows."""

    group: dist.ProcessGroup
    size: int
    """P."""
    rank: int
    """Within the group."""


def build_sequence_group(device_type: str, world_size: int, size: int) -> SequenceGroup | None:
    """Groups of `size` neighbouring ranks (of one node, where the links are fast). Collective; None for size 1."""
    if size == 1:
        return None
    mesh = init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("data", "sequence"))
    return SequenceGroup(mesh.get_group("sequence"), size, mesh.get_local_rank("sequence"))


def check_sequence_parallel(config: Any, model: Model, size: int) -> None:
    """Attention heads must divide; key heads need not, they are repeated. What a rank gets of a pack varies too much
    for compiled shapes.

    Raises:
        ConfigurationError: they do not, or compilation is asked for.
    """
    num_heads = int(config.num_attention_heads)
    if num_heads % size:
        valid = ", ".join(str(divisor) for divisor in range(1, num_heads + 1) if num_heads % divisor == 0)
        raise ConfigurationError(
            f"spec.training.sequenceParallelSize: {size} must divide the model's {num_heads} attention heads; valid "
            f"values: {valid}"
        )
    if size > 1 and model.compile is Toggle.ALWAYS:
        raise ConfigurationError(
            f"spec.model.compile: Always, but with spec.training.sequenceParallelSize: {size} every pack has another "
            "shape; use compile: Auto (which then does not compile), or sequenceParallelSize: 1"
        )


@dataclass(frozen=True)
class OwnPart:
    """What one rank computes of a pack."""

    input_ids_1n: Tensor
    position_ids_1n: Tensor
    head_index_r: Tensor
    """Among the own tokens. At least one position, so that the head takes part in every backward pass."""
    labels_r: Tensor
    attention_arguments: dict[str, Any]
    """Passed through the model to `packed_attention`."""
    exchange: Exchange | None
    own_R: Tensor | None
    """Which of R are predicted here; None: all."""

    def join(self, values_r: Tensor) -> Tensor:
        """The values (R,) of the whole pack, on every rank of the group.

        The gradient of each rank is that of its own values: summed over all ranks, as FSDP does, the gradients of a
        loss that every rank of the group computes alike add up to the gradient of one such loss.
        """
        if self.exchange is None or self.own_R is None:
            return values_r
        joined: Tensor = _Join.apply(values_r, self.own_R, self.exchange.group.group)
        return joined


def take_own_part(batch: PackedBatch, group: SequenceGroup | None) -> OwnPart:
    """This rank's part of a pack; without a group, all of it."""
    if group is None:
        return OwnPart(batch.input_ids_1N, batch.position_ids_1N, batch.head_index_R, batch.labels_R, {}, None, None)
    num_tokens = batch.input_ids_1N.shape[1]
    exchange = Exchange(group, num_tokens)
    start = group.rank * exchange.num_own_tokens
    own_R = (batch.head_index_R >= start) & (batch.head_index_R < start + exchange.num_own_tokens)
    head_index_r, labels_r = batch.head_index_R[own_R] - start, batch.labels_R[own_R]
    if head_index_r.numel() == 0:
        head_index_r, labels_r = torch.zeros_like(batch.labels_R[:1]), torch.zeros_like(batch.labels_R[:1])
    return OwnPart(
        input_ids_1n=exchange.take_tokens(batch.input_ids_1N),
        position_ids_1n=exchange.take_tokens(batch.position_ids_1N),
        head_index_r=head_index_r,
        labels_r=labels_r,
        attention_arguments={"exchange": exchange},
        exchange=exchange,
        own_R=own_R,
    )


@dataclass(frozen=True)
class Exchange:
    """How the tokens of one pack lie over the ranks of a group."""

    group: SequenceGroup
    num_tokens: int
    """N."""

    @property
    def num_own_tokens(self) -> int:
        """n; the last ranks' are padding where P does not divide N."""
        return -(-self.num_tokens // self.group.size)

    @property
    def num_padding_tokens(self) -> int:
        """P n - N."""
        return self.num_own_tokens * self.group.size - self.num_tokens

    def take_tokens(self, values_1N: Tensor) -> Tensor:
        """(1, n): this rank's tokens."""
        padded = functional.pad(values_1N, (0, self.num_padding_tokens))
        start = self.group.rank * self.num_own_tokens
        return padded[:, start : start + self.num_own_tokens].contiguous()

    def gather_tokens(self, heads_1HnD: Tensor, num_query_heads: int) -> Tensor:
        """(1, H, n, D) of own tokens -> (1, h, N, D): own heads of all tokens.

        Key heads that P does not divide are repeated as often as it takes, which keeps each query's group.
        """
        size, num_own = self.group.size, self.num_own_tokens
        heads_HnD = heads_1HnD.squeeze(0)
        num_heads, _, head_size = heads_HnD.shape
        largest = num_query_heads // num_heads
        repeats = next(
            times for times in range(1, largest + 1) if largest % times == 0 and num_heads * times % size == 0
        )
        heads_HnD = heads_HnD.repeat_interleave(repeats, dim=0)
        received_PhnD = _exchange(heads_HnD.unflatten(0, (size, -1)), self.group.group)
        heads_hND = received_PhnD.transpose(0, 1).reshape(-1, size * num_own, head_size)
        return heads_hND[:, : self.num_tokens].unsqueeze(0)

    def scatter_tokens(self, output_1NhD: Tensor) -> Tensor:
        """(1, N, h, D) of own heads -> (1, n, H, D): all heads of own tokens."""
        size, num_own = self.group.size, self.num_own_tokens
        padded_MhD = functional.pad(output_1NhD.squeeze(0), (0, 0, 0, 0, 0, self.num_padding_tokens))
        received_PnhD = _exchange(padded_MhD.unflatten(0, (size, num_own)), self.group.group)
        return received_PnhD.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received: Tensor = _AllToAll.apply(parts, group)
    return received


class _AllToAll(torch.autograd.Function):
    """Part i of dimension 0 goes to rank i of the group; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient, group=ctx.group)
        return received, None


class _Join(torch.autograd.Function):
    """Own values into the whole, summed over the group (each element has one owner)."""

    @staticmethod
    def forward(ctx: Any, values_r: Tensor, own_R: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_R)
        ctx.num_values = values_r.shape[0]
        whole_R = torch.zeros(own_R.shape[0], dtype=values_r.dtype, device=values_r.device)
        if bool(own_R.any()):
            whole_R[own_R] = values_r
        dist.all_reduce(whole_R, group=group)
        return whole_R

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None, None]:
        (own_R,) = ctx.saved_tensors
        gradient_r = gradient_R[own_R]
        if gradient_r.numel() == 0:
            gradient_r = torch.zeros(ctx.num_values, dtype=gradient_R.dtype, device=gradient_R.device)
        return gradient_r, None, None
