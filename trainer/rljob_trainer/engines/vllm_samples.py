"""From vLLM's outputs to samples, and the seed of each."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from rljob_trainer.engines.contract import FinishReason, GeneratedSample, GenerateRequest
from rljob_trainer.errors import EngineDied

NAME: Final = "vLLM engine"
FINISH_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def derive_seed(request: GenerateRequest, index: int) -> int:
    """63 bits that belong to the sample: another batch or number of engines repeats its noise."""
    text = f"{request.seed}/{request.step}/{request.uid}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def read_sample(output: Any, version: int) -> GeneratedSample:
    token_ids = [int(token) for token in output.token_ids]
    log_probs = [position[token].logprob for token, position in zip(token_ids, output.logprobs or [], strict=True)]
    if output.finish_reason not in FINISH_REASONS:
        raise EngineDied(f"{NAME}: a sample ended with the unknown reason {output.finish_reason!r}")
    return GeneratedSample(
        token_ids=token_ids,
        log_probs=np.asarray(log_probs, dtype=np.float32),
        finish_reason=FINISH_REASONS[output.finish_reason],
        weight_version=version,
    )


def empty_sample(version: int) -> GeneratedSample:
    return GeneratedSample([], np.zeros(0, dtype=np.float32), FinishReason.ABORT, version)
