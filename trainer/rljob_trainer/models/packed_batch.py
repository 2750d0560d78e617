"""One micro-batch as a pack of sequences (shape legend: N packed tokens, R response tokens, S sequences)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.models.packed_attention import Packing, build_packing


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


def pack_sequences(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], device: torch.device
) -> PackedBatch:
    """Pack prompt + response pairs; positions start at 0 in each sequence.

    An empty list gives a pack of one token and no response, so that a rank without rows still enters every
    collective of forward and backward. The last response token is never an input: nothing is predicted from it.
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
        tokens = [*prompt, *response[:-1]]
        start = len(ids)
        ids.extend(tokens)
        positions.extend(range(len(tokens)))
        lengths.append(len(tokens))
        first = start + len(prompt) - 1
        head_index.extend(range(first, first + len(response)))
        labels.extend(response)
        sequence_ids.extend([sequence] * len(response))
    if not ids:
        ids, positions, lengths = [0], [0], [1]
    if not labels:
        # One position through the head with weight 0 keeps the head's parameters in the graph on every rank.
        head_index, labels, sequence_ids = [0], [0], [0]

    def to_tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PackedBatch(
        input_ids_1N=to_tensor(ids).unsqueeze(0),
        position_ids_1N=to_tensor(positions).unsqueeze(0),
        packing=build_packing(lengths, device),
        head_index_R=to_tensor(head_index),
        labels_R=to_tensor(labels),
        sequence_ids_R=to_tensor(sequence_ids),
        num_sequences=max(len(lengths), 1),
    )
