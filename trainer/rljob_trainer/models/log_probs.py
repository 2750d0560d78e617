"""Log-probabilities and entropy through a chunked LM head: logits exist for one chunk of tokens at a time.

Shape legend: R response tokens, C tokens of a chunk, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS: Final = 2048


def compute_entropy(logits_CV: Tensor) -> Tensor:
    """Entropy (C,) in nats of softmax(logits), float32; -inf logits count as probability 0 in value and gradient."""
    if not torch.is_grad_enabled():
        # Its value at 0 is right, its gradient there is not; a third of the passes over the vocabulary.
        return torch.special.entr(torch.softmax(logits_CV.float(), dim=-1)).sum(dim=-1)
    log_probs_CV = torch.log_softmax(logits_CV.float(), dim=-1)
    # 0 x (-inf) is NaN in the forward and in the gradient: replace before multiplying.
    possible_CV = torch.isfinite(log_probs_CV)
    safe_CV = torch.where(possible_CV, log_probs_CV, torch.zeros_like(log_probs_CV))
    return -(torch.where(possible_CV, safe_CV.exp(), torch.zeros_like(safe_CV)) * safe_CV).sum(dim=-1)


def compute_sum_pi_squared(logits_CV: Tensor) -> Tensor:
    """Sum over the vocabulary of squared probabilities (C,), float32: exp(logsumexp(2 z) - 2 logsumexp(z))."""
    logits_CV = logits_CV.float()
    return (torch.logsumexp(2 * logits_CV, dim=-1) - 2 * torch.logsumexp(logits_CV, dim=-1)).exp()


def score_logits(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    temperature: float,
    with_entropy_gradient: bool,
    statistic: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """(log_probs_C, statistic_C), float32, of softmax(logits / temperature)."""
    tempered_CV = logits_CV.float() / temperature
    log_probs_C = tempered_CV.gather(1, labels_C[:, None]).squeeze(1) - torch.logsumexp(tempered_CV, dim=-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and with_entropy_gradient):
        statistic_C = statistic(tempered_CV)
    return log_probs_C, statistic_C


@dataclass(frozen=True)
class HeadOptions:
    """How the head runs; results do not depend on it beyond rounding."""

    chunk_tokens: int = CHUNK_TOKENS
    score: Callable[..., tuple[Tensor, Tensor]] = score_logits
    """`score_logits` or its compiled form."""
    pad_chunks: bool = False
    """Give every chunk the same size, so that compiled code is reused."""
    keep_logits: bool = False
    """Keep the logits of all chunks for the backward pass (R x V in the compute dtype) instead of recomputing them."""


DEFAULT_HEAD_OPTIONS: Final = HeadOptions()


def compute_log_probs(
    hidden_RE: Tensor,
    labels_R: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    with_entropy_gradient: bool = False,
    statistic: Callable[[Tensor], Tensor] = compute_entropy,
    options: HeadOptions = DEFAULT_HEAD_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy, both (R,) float32, of softmax(head(hidden) / temperature).

    `statistic` replaces the entropy by another function of the tempered logits, (C, V) -> (C,).

    The engine samples from the same tempered distribution, so both sides of the importance ratio agree (TRL 4159).
    Unless they are kept, chunks beyond the first are recomputed in the backward pass: memory is chunk_tokens x V,
    never R x V.
    """

    def chunk(hidden_CE: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        return options.score(
            head(hidden_CE),
            labels_C,
            temperature=temperature,
            with_entropy_gradient=with_entropy_gradient,
            statistic=statistic,
        )

    num_tokens, size = hidden_RE.shape[0], options.chunk_tokens
    if options.pad_chunks and num_tokens % size:
        num_missing = size - num_tokens % size
        hidden_RE = functional.pad(hidden_RE, (0, 0, 0, num_missing))
        labels_R = functional.pad(labels_R, (0, num_missing))
    if num_tokens <= size:
        log_probs_R, statistic_R = chunk(hidden_RE, labels_R)
        return _cut(log_probs_R, num_tokens), _cut(statistic_R, num_tokens)
    parts = [
        chunk(hidden_CE, labels_C)
        if options.keep_logits
        else checkpoint(chunk, hidden_CE, labels_C, use_reentrant=False)
        for hidden_CE, labels_C in zip(hidden_RE.split(size), labels_R.split(size), strict=True)
    ]
    log_probs_R, statistic_R = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return _cut(log_probs_R, num_tokens), _cut(statistic_R, num_tokens)


def _cut(values: Tensor, length: int) -> Tensor:
    """Without padding, and never a view: an in-place operation on a view that a sharded module returned would drop the
    module's backward hook."""
    return values if values.shape[0] == length else values[:length].clone()
