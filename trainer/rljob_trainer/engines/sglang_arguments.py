"""What SGLang is started with: constructor arguments and environment, as pure functions of settings and version.

Argument names are those of `ServerArgs` in 0.5.16 and 0.5.23 (they agree in everything used here).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rljob_api.addresses import is_ipv6_literal
from rljob_api.engine_switches import MEMORY_CHECK_SPELLINGS, choose_memory_check_switch
from rljob_api.v1alpha1.model import DType
from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.errors import ConfigurationError

DTYPE_ARGUMENTS: Final = {DType.FLOAT32: "float32", DType.BFLOAT16: "bfloat16"}
DEFAULT_CONCURRENT_SAMPLES: Final = {"cuda": 512, "cpu": 64}
CPU_MEMORY_FRACTION: Final = 0.1
"""Of host memory; the KV pool is sized by tokens there."""
MAX_FREE_SHARE: Final = 0.95
"""SGLang needs some of the free memory for activations and graphs."""
MAX_CPU_KV_TOKENS: Final = 131_072
NO_NCCL: Final = "no-nccl-on-cpus"
"""A library that cannot be loaded: SGLang then does without NCCL."""
SPARE_POSITIONS: Final = 6
"""By which SGLang's context is longer than any sequence: it refuses a prompt that leaves fewer positions of the context
(`max_req_input_len`), and cuts a response short, without a word, when fewer than two would stay free
(`init_req_max_new_tokens`)."""
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class EnvironmentChange:
    """What the process of the engine gets and loses before SGLang is imported."""

    assigned: dict[str, str]
    removed: tuple[str, ...]
    warnings: tuple[str, ...]
    """One per value of the user that was dropped."""


def plan_environment(
    version: str,
    settings: EngineSettings,
    environment: Mapping[str, str],
    cpu_ids: Collection[int],
    *,
    has_ipv4_loopback: bool = True,
) -> EnvironmentChange:
    """The variables SGLang reads, by version; an image's own ENV cannot be unset by a pod spec, so it is done here.

    Args:
        version: of the installed SGLang.
        settings: of the engine.
        environment: what is set now.
        cpu_ids: CPUs this process may use.
        has_ipv4_loopback: whether 127.0.0.1 is an address of this node.
    """
    switch = choose_memory_check_switch(version)
    assigned = dict(switch)
    # The constructor of every node but the first otherwise blocks for ever.
    assigned["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    # Log-probabilities of softmax(logits / temperature): what the trainer recomputes (LogProbMode.TEMPERED).
    assigned["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
    # The spare positions may lie beyond the model's own; `check_positions` sees to it that no token ever does.
    assigned["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if settings.host is not None:
        assigned["SGLANG_HOST_IP"] = settings.host
    if not has_ipv4_loopback:
        # SGLang binds its queue between ranks to 127.0.0.1; without the queue they use their process group.
        assigned["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    if settings.device == "cpu":
        assigned["SGLANG_USE_CPU_ENGINE"] = "1"
        # SGLang refuses more ranks than NUMA nodes unless told where each rank runs.
        everywhere = ",".join(str(cpu) for cpu in sorted(cpu_ids))
        assigned["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([everywhere] * settings.tensor_parallel_size)
        # torch's CUDA build brings NCCL, whose communicator SGLang would build for ranks without a GPU as well
        # ("Expected a cuda device, but got: cpu").
        assigned["SGLANG_NCCL_SO_PATH"] = NO_NCCL
        # Small functions that SGLang compiles for speed on GPUs: on CPUs each costs a run of the C++ compiler at the
        # first batches, in every scheduler, and gains nothing.
        assigned["TORCHDYNAMO_DISABLE"] = "1"
        if settings.num_threads is not None:
            assigned["OMP_NUM_THREADS"] = str(settings.num_threads)
    removed: list[str] = []
    warnings: list[str] = []
    for name in MEMORY_CHECK_SPELLINGS:
        if name in environment and name not in switch:
            removed.append(name)
            kept = ", ".join(f"{key}={value}" for key, value in switch.items())
            warnings.append(
                f"removed {name}={environment[name]} from the environment: SGLang {version} misreads it; {kept} is set"
            )
    for name in ALLOCATOR_VARIABLES:
        value = environment.get(name, "")
        if settings.device == "cuda" and "expandable_segments:true" in value.replace(" ", "").lower():
            kept_options = ",".join(part for part in value.split(",") if "expandable_segments" not in part)
            if kept_options:
                assigned[name] = kept_options
            else:
                removed.append(name)
            warnings.append(
                f"removed expandable_segments from {name}={value}: SGLang's memory saver cannot release such memory"
            )
    return EnvironmentChange(assigned, tuple(removed), tuple(warnings))


def check_positions(max_sequence_tokens: int, num_positions: int) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        ConfigurationError: with the largest sum that works.
    """
    if max_sequence_tokens > num_positions:
        raise ConfigurationError(
            f"spec.data.maxPromptTokens + spec.rollout.maxResponseTokens: {max_sequence_tokens} tokens are more than "
            f"the model's {num_positions} positions; use at most {num_positions} together, or another model"
        )


@dataclass(frozen=True)
class GPUMemory:
    """Of one card, as the driver reports it."""

    free_bytes: int
    total_bytes: int


def convert_memory_fraction(memory_fraction: float, cards: Sequence[GPUMemory]) -> float:
    """`mem_fraction_static` from `spec.rollout.memoryFraction`.

    SGLang means a share of what is *free* on the fullest card when it starts; the job means a share of the card, of
    which a co-located trainer holds some already.

    Raises:
        ConfigurationError: that much is not free; names the largest share that is.
    """
    if not cards:
        return memory_fraction
    share = max(memory_fraction * card.total_bytes / card.free_bytes for card in cards)
    if share > MAX_FREE_SHARE:
        fitting = min(card.free_bytes / card.total_bytes for card in cards) * MAX_FREE_SHARE
        raise ConfigurationError(
            f"spec.rollout.memoryFraction: {memory_fraction} of a GPU is not free when the engine starts; the fullest "
            f"has {min(card.free_bytes for card in cards) / 2**30:.1f} GiB free, so use at most "
            f"{math.floor(fitting * 100) / 100:.2f}"
        )
    return round(share, 4)


def build_arguments(
    settings: EngineSettings, known: Collection[str], *, nccl_port: int, cards: Sequence[GPUMemory] = ()
) -> dict[str, Any]:
    """Arguments of `Engine(...)`. The user's `engineArgs` win over defaults, and never over what the job decides.

    Args:
        settings: of the engine.
        known: names `ServerArgs` has in the installed version.
        nccl_port: free port for the rendezvous of a replica within one node.
        cards: memory of the replica's GPUs on this node; without them the fraction is taken as SGLang's own.

    Raises:
        ConfigurationError: an unknown or owned argument.
    """
    samples = settings.max_concurrent_samples or DEFAULT_CONCURRENT_SAMPLES[settings.device]
    context_length = settings.max_sequence_tokens + SPARE_POSITIONS
    owned: dict[str, Any] = {
        "model_path": settings.model_source,
        "revision": settings.model_revision,
        "dtype": DTYPE_ARGUMENTS[DType(settings.dtype)],
        "device": settings.device,
        "skip_tokenizer_init": True,
        "tp_size": settings.tensor_parallel_size,
        "nnodes": settings.num_nodes,
        "node_rank": settings.node_rank,
        "context_length": context_length,
        # One more: while a prompt is prefilled in chunks SGLang counts it twice, and the last of `samples` sequences
        # would wait until all others have ended, then be decoded alone (0.4 s of 2.2 s, measured).
        "max_running_requests": samples + 1,
    }
    if settings.rendezvous is not None:
        owned["dist_init_addr"] = settings.rendezvous
    else:
        owned["host"] = choose_loopback(settings.host)
        owned["nccl_port"] = nccl_port
    defaults: dict[str, Any] = {"log_level": "error", "random_seed": 0}
    if settings.device == "cuda":
        owned |= {
            "enable_memory_saver": settings.may_sleep,
            "mem_fraction_static": convert_memory_fraction(settings.memory_fraction, cards),
            "base_gpu_id": 0,
        }
        defaults |= {
            "cuda_graph_bs_decode": choose_graph_sizes(samples),
            # Costs a minute at start and gains little where a step has one prefill phase.
            "disable_prefill_cuda_graph": True,
        }
        if any(name.startswith(("cuda_graph", "disable_cuda_graph")) for name in settings.engine_args):
            defaults.pop("cuda_graph_bs_decode")
    else:
        owned |= {"mem_fraction_static": CPU_MEMORY_FRACTION}
        defaults |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            # Else each scheduler polls without a pause and takes a core from the trainer, which has the next turn.
            "sleep_on_idle": True,
            "max_total_tokens": min(MAX_CPU_KV_TOKENS, samples * context_length),
        }
    for name in settings.engine_args:
        if name in owned:
            raise ConfigurationError(f"spec.rollout.engineArgs.{name}: decided by other fields of the job; remove it")
        if name not in known:
            close = sorted(candidate for candidate in known if name.split("_")[0] in candidate)[:5]
            hint = f"; arguments with that word: {', '.join(close)}" if close else ""
            raise ConfigurationError(
                f"spec.rollout.engineArgs.{name}: the installed SGLang has no such argument; remove it{hint}"
            )
    return {name: value for name, value in (defaults | settings.engine_args | owned).items() if value is not None}


def choose_loopback(host: str | None) -> str:
    """Loopback of the node's own family: a node with IPv6 only may lack 127.0.0.1."""
    return "::1" if host is not None and is_ipv6_literal(host) else "127.0.0.1"


def choose_graph_sizes(limit: int) -> list[int]:
    """Batch sizes to capture decode graphs for, up to the concurrency.

    A batch runs in the next larger graph. SGLang's own list has 52 sizes up to 512, and each costs more than a second
    at start; two sizes per doubling (8, 12, 16, 24, ...) cost little of a decode that is bound by reading the weights.
    """
    sizes: list[int] = []
    size = 1
    while size < limit:
        sizes.append(size)
        size += 1 << max(0, size.bit_length() - 2)
    return [*sizes, limit]
