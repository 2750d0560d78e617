"""What SGLang is asked for one sample, and what it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljob_trainer.engines.contract import FinishReason, GeneratedSample, GenerateRequest, SamplingParams
from rljob_trainer.errors import EngineDied


def build_sampling_params(
    request: GenerateRequest, params: SamplingParams, stop_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """One set per sample of the group."""
    return [
        {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": not stop_ids,
            # Takes effect with engineArgs enable_deterministic_inference only.
            "sampling_seed": compute_sample_seed(request, index),
        }
        for index in range(request.num_samples)
    ]


def read_sample(
    output: dict[str, Any], request: GenerateRequest, stop_ids: Sequence[int], max_tokens: int
) -> GeneratedSample:
    """Checks that tokens and log-probabilities belong together before anybody trains on them.

    Raises:
        EngineDied: they do not, a log-probability is not finite, or SGLang cut the response short of `max_tokens`.
    """
    meta = output["meta_info"]
    reason = FinishReason((meta["finish_reason"] or {}).get("type", "abort"))
    token_ids = list(output.get("output_ids") or [])
    pairs = list(meta.get("output_token_logprobs") or [])
    if reason is FinishReason.ABORT:
        # An abort can fall between a token and its log-probability.
        length = min(len(token_ids), len(pairs))
        reason, length = judge_aborted(token_ids[:length], stop_ids, max_tokens)
        token_ids, pairs = token_ids[:length], pairs[:length]
    if reason is FinishReason.LENGTH and len(token_ids) != max_tokens:
        raise EngineDied(
            f"SGLang engine: cut a sample of {request.uid} after {len(token_ids)} of {max_tokens} tokens; its context "
            "or KV pool holds less than the longest prompt and response"
        )
    if [token for _, token, *_ in pairs] != token_ids:
        raise EngineDied(
            f"SGLang engine: sample of {request.uid} has {len(token_ids)} tokens and log-probabilities of "
            f"{len(pairs)} others (finish reason {meta['finish_reason']})"
        )
    log_probs = np.asarray([value for value, *_ in pairs], dtype=np.float32)
    if not np.isfinite(log_probs).all():
        raise EngineDied(f"SGLang engine: sample of {request.uid} has log-probabilities that are not finite")
    version = str(meta.get("weight_version", ""))
    return GeneratedSample(token_ids, log_probs, reason, int(version) if version.isdecimal() else 0)


def judge_aborted(token_ids: Sequence[int], stop_ids: Sequence[int], max_tokens: int) -> tuple[FinishReason, int]:
    """(reason, length) of a sample that SGLang reports as aborted.

    When the abort and the end of a response fall into one scheduler step, SGLang calls a complete response aborted, and
    may have decoded beyond its stop id.
    """
    for position, token in enumerate(token_ids):
        if token in stop_ids:
            return FinishReason.STOP, position + 1
    if len(token_ids) >= max_tokens:
        return FinishReason.LENGTH, max_tokens
    return FinishReason.ABORT, len(token_ids)


def compute_sample_seed(request: GenerateRequest, index: int) -> int:
    """31 bits keyed by what identifies the sample, as the Native engine's noise is."""
    digest = hashlib.blake2b(f"{request.seed}/{request.step}/{request.uid}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
