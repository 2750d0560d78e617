"""Arguments and environment of a vLLM engine, from our settings: pure functions on plain data."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.errors import ConfigurationError

DTYPES: Final[dict[str, str]] = {"Float32": "float32", "BFloat16": "bfloat16"}
DEFAULT_CONCURRENT_SAMPLES: Final[dict[str, int]] = {"cuda": 512, "cpu": 64}
CPU_BLOCK_TOKENS: Final = 128
"""Of the KV cache; vLLM's default on CPUs."""
MAX_CPU_CACHE_BYTES: Final = 4 * 2**30
WORKER_EXTENSION: Final = "rljob_trainer.engines.vllm_worker.WorkerExtension"
TESTED_VERSIONS: Final = ((0, 24), (0, 33))
"""First and last minor release whose API was checked (tests/vllm_signatures.json)."""


def compute_cpu_cache_bytes(settings: EngineSettings, config: Mapping[str, Any]) -> int:
    """KV cache for every concurrent sample at full length, capped: vLLM would reserve a share of the machine."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    element_bytes = 4 if settings.dtype == "Float32" else 2
    bytes_per_token = 2 * config["num_hidden_layers"] * num_kv_heads * head_dim * element_bytes
    blocks_per_sample = -(-settings.max_sequence_tokens // CPU_BLOCK_TOKENS)
    num_tokens = (count_concurrent_samples(settings) + 1) * blocks_per_sample * CPU_BLOCK_TOKENS
    return min(num_tokens * bytes_per_token, MAX_CPU_CACHE_BYTES)


def count_concurrent_samples(settings: EngineSettings) -> int:
    """Sequences decoded at once."""
    return settings.max_concurrent_samples or DEFAULT_CONCURRENT_SAMPLES[settings.device]


def build_arguments(
    settings: EngineSettings, model_config: Mapping[str, Any], known: Collection[str], version: str
) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`; `known` are those that the installed version has.

    Raises:
        ConfigurationError: an unknown engine argument, one that the trainer decides, or a layout vLLM cannot do.
    """
    if settings.num_nodes > 1:
        raise ConfigurationError(
            f"spec.rollout.tensorParallelSize: {settings.tensor_parallel_size} spans {settings.num_nodes} nodes, which "
            f"the VLLM engine does not; use {settings.tensor_parallel_size // settings.num_nodes}, or engine: SGLang"
        )
    is_gpu = settings.device == "cuda"
    owned: dict[str, Any] = {
        "model": settings.model_source,
        "revision": settings.model_revision,
        "dtype": DTYPES[settings.dtype],
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Inside a placement group vLLM would choose Ray and take other bundles.
        "distributed_executor_backend": "uni" if is_gpu and settings.tensor_parallel_size == 1 else "mp",
        "max_model_len": settings.max_sequence_tokens,
        "max_num_seqs": count_concurrent_samples(settings),
        # Token ids in and out: no tokenizer, no text, no EOS of vLLM's own (every stop id is passed).
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
    }
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if is_gpu:
        owned |= {"gpu_memory_utilization": settings.memory_fraction, "enable_sleep_mode": settings.may_sleep}
    else:
        defaults |= {
            "kv_cache_memory_bytes": compute_cpu_cache_bytes(settings, model_config),
            # Compiling for a CPU takes minutes and saves little.
            "enforce_eager": True,
        }
    for name, value in settings.engine_args.items():
        path = f"spec.rollout.engineArgs.{name}"
        if name in owned:
            raise ConfigurationError(f"{path}: {value!r}: the trainer sets it to {owned[name]!r}; remove it")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else "; remove it"
            raise ConfigurationError(f"{path}: vLLM {version} has no such argument{hint}")
    missing = sorted(set(owned) - set(known))
    if missing:
        (first_major, first_minor), (last_major, last_minor) = TESTED_VERSIONS
        raise ConfigurationError(
            f"spec.rollout.engineVersion: vLLM {version} lacks {', '.join(missing)}; this trainer knows "
            f"{first_major}.{first_minor} to {last_major}.{last_minor}"
        )
    return {name: value for name, value in defaults.items() if name in known} | settings.engine_args | owned


def build_environment(settings: EngineSettings) -> tuple[dict[str, str], dict[str, str]]:
    """(forced, defaults) for this process just before the engine's processes inherit them."""
    forced = {
        # The trainer's CUDA context must not be forked.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # AsyncLLM in one process would share our interpreter: its death must not be ours.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if settings.visible_devices is not None:
        forced["CUDA_VISIBLE_DEVICES"] = ",".join(settings.visible_devices)
    if settings.device == "cpu":
        # vLLM pins threads to cores by itself and refuses more ranks than NUMA nodes; ranks share the cores here.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if settings.num_threads is not None:
            forced["OMP_NUM_THREADS"] = str(settings.num_threads)
    elif settings.host is not None and ":" in settings.host:
        defaults["VLLM_LOOPBACK_IP"] = "::1"
    if settings.host is not None:
        defaults["VLLM_HOST_IP"] = settings.host
    return forced, defaults
