"""Environment of the rollout engine, decided by the engine's version (`rljob_api.engine_switches`)."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.engine_switches import MEMORY_CHECK_SPELLINGS, choose_memory_check_switch
from rljob_api.v1alpha1 import Engine, Placement


@dataclass(frozen=True)
class EngineEnvironment:
    """What the engine needs and what it must not see."""

    owned: dict[str, str]
    """Set by the operator; a user's value would break the job and is dropped with a warning."""
    defaults: dict[str, str]
    """Set unless the user sets them."""
    stripped: tuple[str, ...]
    """Removed wherever the user set them, with a warning."""


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
    owned = choose_memory_check_switch(engine_version)
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


def needs_plain_allocations(engine: Engine) -> bool:
    """Whether expandable segments break the job: a co-located engine's memory pool cannot sleep with them, and weight
    buckets for separate engines have no CUDA-IPC handle."""
    return engine is not Engine.NATIVE
