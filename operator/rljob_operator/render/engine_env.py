"""Environment of the rollout engine, decided by the engine's version.

SGLang's memory-imbalance check fails co-located engines (the trainer's memory differs between ranks) and its switch
changed name and sense:

* before 0.5.7: `SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK=True`
* from 0.5.7: `SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0`. Releases 0.5.7 to 0.5.16 copy an `SGL_DISABLE_...` value
  un-negated over the new variable, so that the old spelling switches the check back on; it has to be absent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rljob_api.v1alpha1 import Engine, Placement

SGLANG_NEW_SWITCH_VERSION: Final = (0, 5, 7)
_NEW_SWITCH: Final = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
_OLD_SWITCH: Final = "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"
MEMORY_CHECK_SPELLINGS: Final = (
    _NEW_SWITCH,
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK",
    _OLD_SWITCH,
    "SGL_ENABLE_TP_MEMORY_INBALANCE_CHECK",
)
_VERSION: Final = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?(?![0-9])")


@dataclass(frozen=True)
class EngineEnvironment:
    """What the engine needs and what it must not see."""

    owned: dict[str, str]
    """Set by the operator; a user's value would break the job and is dropped with a warning."""
    defaults: dict[str, str]
    """Set unless the user sets them."""
    stripped: tuple[str, ...]
    """Removed wherever the user set them, with a warning."""


def parse_engine_version(version: str) -> tuple[int, int, int]:
    """Release number of an engine version; suffixes (`rc1`, `.post2`, `+cu128`) do not move it.

    Raises:
        ValueError: no leading `major.minor`.
    """
    match = _VERSION.match(version)
    if match is None:
        raise ValueError(f"engine version {version!r} does not start with major.minor, for example 0.5.16")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def build_engine_environment(engine: Engine, engine_version: str | None, placement: Placement) -> EngineEnvironment:
    """The engine's own variables; addresses are `network.build_socket_environment`'s.

    Raises:
        ValueError: SGLang without a version: the right switch cannot be guessed.
    """
    if engine is Engine.SGLANG:
        return _build_sglang_environment(engine_version, placement)
    if engine is Engine.VLLM:
        return EngineEnvironment(
            owned={},
            defaults={
                # CUDA is initialised in the process that starts the engine; fork would break it.
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                "VLLM_NO_USAGE_STATS": "1",
                **_build_colocated_nccl_defaults(placement),
            },
            stripped=(),
        )
    return EngineEnvironment(owned={}, defaults={}, stripped=())


def _build_sglang_environment(engine_version: str | None, placement: Placement) -> EngineEnvironment:
    if engine_version is None:
        raise ValueError(
            "spec.rollout.engineVersion is empty, and SGLang's environment depends on it; a value that works: 0.5.16"
        )
    owned = (
        {_NEW_SWITCH: "0"}
        if parse_engine_version(engine_version) >= SGLANG_NEW_SWITCH_VERSION
        else {_OLD_SWITCH: "True"}
    )
    return EngineEnvironment(
        owned=owned,
        defaults={
            # A multi-node engine otherwise blocks for ever in the launch call of every node but the first.
            "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
            **_build_colocated_nccl_defaults(placement),
        },
        stripped=tuple(name for name in MEMORY_CHECK_SPELLINGS if name not in owned),
    )


def _build_colocated_nccl_defaults(placement: Placement) -> dict[str, str]:
    if placement is not Placement.COLOCATED:
        return {}
    # Trainer and engine share NCCL groups and GPUs: mixed cuMem modes hang, NVLS takes memory from the other tenant.
    return {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def hosts_sleeping_engine(engine: Engine, placement: Placement) -> bool:
    """Whether an engine's memory pool is put to sleep in these pods, which expandable segments break."""
    return engine is not Engine.NATIVE and placement is Placement.COLOCATED
