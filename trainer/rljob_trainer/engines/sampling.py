"""Token choice with noise that belongs to a sample, not to a batch (shape legend: B rows, V vocabulary)."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def draw_sample_noise(seed: int, step: int, uid: str, sample: int, num_tokens: int) -> NDArray[np.float64]:
    """`num_tokens` uniforms in [0, 1) of one sample: counter-based (Philox) and keyed by what identifies the sample.

    A resumed run, another batch composition or another number of engines repeats them.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{uid}/{sample}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(num_tokens)


def choose_tokens(logits_BV: Tensor, noise_B: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """(token_ids_B, log_probs_B): inverse-CDF sampling at `temperature`, or argmax at 0.

    Log-probabilities are those of softmax(logits / temperature) before top-p (greedy: of softmax(logits)).
    """
    scaled_BV = logits_BV.float() if temperature == 0 else logits_BV.float() / temperature
    log_probs_BV = torch.log_softmax(scaled_BV, dim=-1)
    if temperature == 0:
        tokens_B = log_probs_BV.argmax(dim=-1)
    else:
        # float64: over a large vocabulary the float32 running sum drifts by more than a rare token's probability.
        probabilities_BV = log_probs_BV.double().exp()
        if top_p < 1:
            probabilities_BV = _keep_nucleus(probabilities_BV, top_p)
        cumulative_BV = probabilities_BV.cumsum(dim=-1)
        total_B = cumulative_BV[:, -1]
        # noise x total can round up to total, which no running sum exceeds.
        below_B = torch.nextafter(total_B, torch.zeros_like(total_B))
        threshold_B1 = torch.minimum(noise_B.to(total_B.device) * total_B, below_B).unsqueeze(1)
        # right=True: a token of probability 0 can never be hit, not even by noise 0.
        tokens_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(1)
    return tokens_B, log_probs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def _keep_nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """Zero everything outside the smallest set of tokens whose probability reaches `top_p`."""
    sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    kept_BV = torch.where(before_BV < top_p, sorted_BV, torch.zeros_like(sorted_BV))
    return torch.zeros_like(probabilities_BV).scatter(1, order_BV, kept_BV)
