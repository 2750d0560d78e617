"""Attention over packed variable-length sequences, registered with transformers by name.

Shape legend: N packed tokens, S sequences, L longest sequence, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME: Final = "rljob_packed"


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a pack begin and end; built once per micro-batch and shared by all layers."""

    cumulative_lengths: Tensor
    """(S + 1,) int32."""
    max_length: int
    """L."""
    padded_index_SL: Tensor
    """Packed index of each position of the right-padded layout; pads point at token 0."""
    packed_index_N: Tensor
    """Position of each packed token in the flattened padded layout."""


def build_packing(lengths: list[int], device: torch.device) -> Packing:
    """Index tensors for sequences of `lengths` tokens, in order. Lengths are at least 1."""
    max_length = max(lengths)
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    starts_S = torch.cumsum(lengths_S, 0) - lengths_S
    positions_L = torch.arange(max_length)
    valid_SL = positions_L[None, :] < lengths_S[:, None]
    padded_index_SL = torch.where(valid_SL, starts_S[:, None] + positions_L[None, :], 0)
    packed_index_N = torch.nonzero(valid_SL.flatten()).squeeze(1)
    cumulative = functional.pad(torch.cumsum(lengths_S, 0), (1, 0)).to(torch.int32)
    return Packing(cumulative.to(device), max_length, padded_index_SL.to(device), packed_index_N.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D).

    Half precision on GPUs uses torch's variable-length kernel; everything else an exact padded SDPA: with padding on
    the right, causality alone keeps padding out of every valid query, so no mask tensor exists.

    Raises:
        ValueError: dropout or a mask was asked for; neither belongs in a policy whose log-probabilities must repeat.
    """
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; the importance ratio needs 0")
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention mask: the pack's lengths say all")
    query_NHD, key_NKD, value_NKD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen_kernel(query_NHD, key_NKD, value_NKD, packing, scaling, sliding_window).unsqueeze(0), None
    return _padded_sdpa(query_NHD, key_NKD, value_NKD, packing, scaling, sliding_window).unsqueeze(0), None


def _varlen_kernel(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if sliding_window is None else sliding_window - 1
    repeats = query_NHD.shape[1] // key_NKD.shape[1]
    # Repeated heads instead of the kernel's own grouping: torch 2.11's signature has no enable_gqa.
    output = varlen_attn(
        query_NHD.contiguous(),
        key_NKD.repeat_interleave(repeats, dim=1),
        value_NKD.repeat_interleave(repeats, dim=1),
        packing.cumulative_lengths,
        packing.cumulative_lengths,
        packing.max_length,
        packing.max_length,
        scale=scaling,
        window_size=(left, 0),
    )
    assert isinstance(output, Tensor)
    return output


def _padded_sdpa(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    repeats = query_NHD.shape[1] // key_NKD.shape[1]
    index_SL = packing.padded_index_SL
    query_SHLD = query_NHD[index_SL].transpose(1, 2)
    key_SHLD = key_NKD[index_SL].transpose(1, 2).repeat_interleave(repeats, dim=1)
    value_SHLD = value_NKD[index_SL].transpose(1, 2).repeat_interleave(repeats, dim=1)
    mask_LL = None
    if sliding_window is not None and sliding_window < packing.max_length:
        distance_LL = torch.arange(packing.max_length, device=query_NHD.device)
        distance_LL = distance_LL[:, None] - distance_LL[None, :]
        mask_LL = (distance_LL >= 0) & (distance_LL < sliding_window)
    output_SHLD = functional.scaled_dot_product_attention(
        query_SHLD, key_SHLD, value_SHLD, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scaling
    )
    return output_SHLD.transpose(1, 2).flatten(0, 1)[packing.packed_index_N]


AttentionInterface.register(ATTENTION_NAME, packed_attention)
