"""Attention over packed variable-length sequences, registered with transformers by name.

Shape legend: N packed tokens, S sequences, L longest sequence, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

ATTENTION_NAME: Final = "rljob_packed"
_TAKES_ENABLE_GQA: Final = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 takes fewer key heads without being told; later versions refuse."""


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a pack begin and end; built once per micro-batch and shared by all layers."""

    cumulative_lengths: Tensor
    """(S + 1,) int32. Entries past the last sequence repeat: empty sequences, which keep the shape constant."""
    max_length: int
    """At least L."""
    padded_index_SL: Tensor | None
    """Packed index of each position of the right-padded layout; pads point at token 0. None: only the kernel for
    variable lengths is used."""
    packed_index_N: Tensor | None
    """Position of each packed token in the flattened padded layout."""


class TokenExchange(Protocol):
    """Trades tokens for heads between the ranks that share a pack (`models.sequence_parallel.Exchange`)."""

    def gather_tokens(self, heads_1HnD: Tensor, num_query_heads: int) -> Tensor:
        """All heads of own tokens -> own heads of all tokens."""

    def scatter_tokens(self, output_1NhD: Tensor) -> Tensor:
        """The way back."""


def uses_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Half precision on GPUs uses torch's variable-length kernel; everything else the exact padded fallback."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def build_packing(
    lengths: list[int],
    device: torch.device,
    *,
    with_padded_layout: bool = True,
    num_sequences: int | None = None,
    max_length: int | None = None,
) -> Packing:
    """Index tensors for sequences of `lengths` tokens, in order. Lengths are at least 1.

    Args:
        with_padded_layout: False where only the variable-length kernel will read it.
        num_sequences: at least len(lengths); the rest are empty sequences.
        max_length: at least max(lengths); a constant one keeps compiled kernels.
    """
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    ends_S = torch.cumsum(lengths_S, 0)
    cumulative = torch.full(((num_sequences or len(lengths)) + 1,), int(ends_S[-1]), dtype=torch.int32)
    cumulative[0] = 0
    cumulative[1 : len(lengths) + 1] = ends_S
    longest = max(lengths)
    padded_index_SL = packed_index_N = None
    if with_padded_layout:
        positions_L = torch.arange(longest)
        valid_SL = positions_L[None, :] < lengths_S[:, None]
        padded_index_SL = torch.where(valid_SL, (ends_S - lengths_S)[:, None] + positions_L[None, :], 0)
        packed_index_N = torch.nonzero(valid_SL.flatten()).squeeze(1)
        padded_index_SL, packed_index_N = send(padded_index_SL, device), send(packed_index_N, device)
    return Packing(send(cumulative, device), max(longest, max_length or 0), padded_index_SL, packed_index_N)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for what the GPU still does: a plain `.to` drains its queue every time."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
    exchange: TokenExchange | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D).

    The fallback is an exact padded SDPA: with padding on the right, causality alone keeps padding out of every valid
    query, so no mask tensor exists.

    Raises:
        ValueError: dropout or a mask was asked for; neither belongs in a policy whose log-probabilities must repeat.
    """
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; the importance ratio needs 0")
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention mask: the pack's lengths say all")
    if exchange is not None:
        num_heads = query.shape[1]
        query, key, value = (exchange.gather_tokens(tensor, num_heads) for tensor in (query, key, value))
    query_NHD, key_NKD, value_NKD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    attend = _varlen_kernel if uses_varlen_kernel(query.device, query.dtype) else _PADDED_SDPA
    output_1NHD = attend(query_NHD, key_NKD, value_NKD, packing, scaling, sliding_window).unsqueeze(0)
    return output_1NHD if exchange is None else exchange.scatter_tokens(output_1NHD), None


def _varlen_kernel(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    left = -1 if sliding_window is None else sliding_window - 1
    # Grouped heads go in as they are: the kernel knows them, and repeating would multiply the traffic of keys.
    options: dict[str, Any] = {"enable_gqa": query_NHD.shape[1] != key_NKD.shape[1]} if _TAKES_ENABLE_GQA else {}
    output = varlen_attn(
        query_NHD.contiguous(),
        key_NKD.contiguous(),
        value_NKD.contiguous(),
        packing.cumulative_lengths,
        packing.cumulative_lengths,
        packing.max_length,
        packing.max_length,
        scale=scaling,
        window_size=(left, 0),
        **options,
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
    assert index_SL is not None, "the pack was built for the variable-length kernel"
    assert packing.packed_index_N is not None
    query_SHLD = query_NHD[index_SL].transpose(1, 2)
    key_SHLD = key_NKD[index_SL].transpose(1, 2).repeat_interleave(repeats, dim=1)
    value_SHLD = value_NKD[index_SL].transpose(1, 2).repeat_interleave(repeats, dim=1)
    mask_LL = None
    longest = index_SL.shape[1]  # of this pack; `max_length` may be that of the job
    if sliding_window is not None and sliding_window < longest:
        distance_LL = torch.arange(longest, device=query_NHD.device)
        distance_LL = distance_LL[:, None] - distance_LL[None, :]
        mask_LL = (distance_LL >= 0) & (distance_LL < sliding_window)
    output_SHLD = functional.scaled_dot_product_attention(
        query_SHLD, key_SHLD, value_SHLD, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scaling
    )
    return output_SHLD.transpose(1, 2).flatten(0, 1)[packing.packed_index_N]


_PADDED_SDPA: Final[Callable[..., Tensor]] = torch.compiler.disable(_padded_sdpa)
"""Never traced: the padded layout has another shape in almost every pack, and each would be compiled anew until the
limit of compiled versions ends the run."""

AttentionInterface.register(ATTENTION_NAME, packed_attention)
