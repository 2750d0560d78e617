"""Log-probabilities and entropy through a chunked LM head: logits exist for one chunk of tokens at a time.

Shape legend: R response tokens, C tokens of a chunk, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS: Final = 2048


def compute_entropy(logits_CV: Tensor) -> Tensor:
    """Entropy (C,) in nats of softmax(logits), float32; -inf logits count as probability 0 in value and gradient."""
    log_probs_CV = torch.log_softmax(logits_CV.float(), dim=-1)
    # 0 x (-inf) is NaN in the forward and in the gradient: replace before multiplying.
    possible_CV = torch.isfinite(log_probs_CV)
    safe_CV = torch.where(possible_CV, log_probs_CV, torch.zeros_like(log_probs_CV))
    return -(torch.where(possible_CV, safe_CV.exp(), torch.zeros_like(safe_CV)) * safe_CV).sum(dim=-1)


def compute_sum_pi_squared(logits_CV: Tensor) -> Tensor:
    """Sum over the vocabulary of squared probabilities (C,), float32: exp(logsumexp(2 z) - 2 logsumexp(z))."""
    logits_CV = logits_CV.float()
    return (torch.logsumexp(2 * logits_CV, dim=-1) - 2 * torch.logsumexp(logits_CV, dim=-1)).exp()


def compute_log_probs(
    hidden_RE: Tensor,
    labels_R: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    with_entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    statistic: Callable[[Tensor], Tensor] = compute_entropy,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy, both (R,) float32, of softmax(head(hidden) / temperature).

    `statistic` replaces the entropy by another function of the tempered logits, (C, V) -> (C,).

    The engine samples from the same tempered distribution, so both sides of the importance ratio agree (TRL 4159).
    Chunks beyond the first are recomputed in the backward pass: memory is chunk_tokens x V, never R x V.
    """

    def chunk(hidden_CE: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = head(hidden_CE).float() / temperature
        log_probs_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1) - torch.logsumexp(logits_CV, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and with_entropy_gradient):
            entropy_C = statistic(logits_CV)
        return log_probs_C, entropy_C

    num_tokens = hidden_RE.shape[0]
    if num_tokens <= chunk_tokens:
        return chunk(hidden_RE, labels_R)
    parts = [
        checkpoint(
            chunk, hidden_RE[start : start + chunk_tokens], labels_R[start : start + chunk_tokens], use_reentrant=False
        )
        for start in range(0, num_tokens, chunk_tokens)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
