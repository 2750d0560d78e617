"""One micro-batch as a pack of sequences (shape legend: N packed tokens, R response tokens, S sequences)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rljob_trainer.models.packed_attention import Packing, build_packing, send

FRACTIONS: Final = (8, 4, 2, 1)
"""Packs are padded to the budget, a half, a quarter or an eighth of it: four shapes to compile, and what remains of a
mini-batch does not cost a whole budget."""
ROUND_TOKENS: Final = 1024
"""Packs above the budget (one long row) are padded to a multiple of this."""
TOKENS_PER_SEQUENCE_SLOT: Final = 64


@dataclass(frozen=True)
class PackLayout:
    """How packs are laid out; the default is exact."""

    budget_tokens: int | None = None
    """Pad to few, constant shapes derived from this number, so that compiled code is reused. None: no padding."""
    max_length: int = 0
    """Longest sequence of the job; constant for the same reason."""
    with_padded_layout: bool = True
    """False where only the variable-length kernel will run."""

    def pad_tokens(self, num_tokens: int) -> int:
        """Size of the pack that holds `num_tokens`."""
        if self.budget_tokens is None:
            return num_tokens
        for fraction in FRACTIONS:
            size = -(-self.budget_tokens // fraction)
            if num_tokens <= size:
                return size
        return -(-num_tokens // ROUND_TOKENS) * ROUND_TOKENS

    def pad_sequences(self, num_sequences: int, num_tokens: int) -> int:
        """Number of sequences the kernels are told of."""
        if self.budget_tokens is None:
            return num_sequences
        slots = max(num_tokens // TOKENS_PER_SEQUENCE_SLOT, 1)
        while slots < num_sequences:
            slots *= 2
        return slots


EXACT_LAYOUT: Final = PackLayout()


@dataclass(frozen=True)
class PackedBatch:
    """Inputs of `PolicyModel.forward`. Only positions that predict a response token reach the LM head."""

    input_ids_1N: Tensor
    position_ids_1N: Tensor
    packing: Packing
    head_index_R: Tensor
    """Packed index of the position that predicts each response token."""
    labels_R: Tensor
    """The response tokens."""
    sequence_ids_R: Tensor
    """Sequence of each response token."""
    num_sequences: int
    """Of prompt and response; padding is not counted."""


def pack_sequences(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device,
    layout: PackLayout = EXACT_LAYOUT,
) -> PackedBatch:
    """Pack prompt + response pairs; positions start at 0 in each sequence.

    An empty list gives a pack of one token and no response, so that a rank without rows still enters every
    collective of forward and backward. The last response token is never an input: nothing is predicted from it.
    Padding forms sequences of its own behind the others, which nothing attends to or reads.
    """
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    head_index: list[int] = []
    labels: list[int] = []
    sequence_ids: list[int] = []
    for sequence, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0:
            raise ValueError(f"sequence {sequence} has an empty prompt; its first response token has no predecessor")
        start = len(ids)
        ids.extend(prompt)
        ids.extend(response[:-1])
        lengths.append(len(ids) - start)
        positions.extend(range(lengths[-1]))
        first = start + len(prompt) - 1
        head_index.extend(range(first, first + len(response)))
        labels.extend(response)
        sequence_ids.extend([sequence] * len(response))
    if not ids:
        ids, positions, lengths = [0], [0], [1]
    if not labels:
        # One position through the head with weight 0 keeps the head's parameters in the graph on every rank.
        head_index, labels, sequence_ids = [0], [0], [0]
    num_sequences = len(lengths)
    max_length = max(layout.max_length, *lengths) if layout.max_length else max(lengths)
    num_missing = layout.pad_tokens(len(ids)) - len(ids)
    while num_missing > 0:
        length = min(num_missing, max_length)
        ids.extend([0] * length)
        positions.extend(range(length))
        lengths.append(length)
        num_missing -= length

    def to_tensor(values: list[int]) -> Tensor:
        return send(torch.tensor(values, dtype=torch.int64), device)

    return PackedBatch(
        input_ids_1N=to_tensor(ids).unsqueeze(0),
        position_ids_1N=to_tensor(positions).unsqueeze(0),
        packing=build_packing(
            lengths,
            device,
            with_padded_layout=layout.with_padded_layout,
            num_sequences=layout.pad_sequences(len(lengths), len(ids)),
            max_length=layout.max_length,
        ),
        head_index_R=to_tensor(head_index),
        labels_R=to_tensor(labels),
        sequence_ids_R=to_tensor(sequence_ids),
        num_sequences=num_sequences,
    )
