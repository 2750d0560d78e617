"""Rules about `spec.rollout`: engine, sampling, engine arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.rules.context import Rule, RuleContext, is_changed
from rljob_api.targets import Target
from rljob_api.v1alpha1.rollout import Engine

# Argument -> field that decides it. Names of sglang ServerArgs 0.5.x and vLLM EngineArgs 0.24.
_COMMON_OWNED: Final[dict[str, str]] = {
    "dtype": "spec.model.dtype",
    "revision": "spec.model.revision",
    "seed": "spec.training.seed",
    "random_seed": "spec.training.seed",
    "host": "spec.network.ipFamily",
    "port": "the operator",
}
OWNED_ENGINE_ARGS: Final[dict[Engine, dict[str, str]]] = {
    Engine.SGLANG: {
        **_COMMON_OWNED,
        "model_path": "spec.model.source",
        "tokenizer_path": "spec.model.source",
        "tp_size": "spec.rollout.tensorParallelSize",
        "tensor_parallel_size": "spec.rollout.tensorParallelSize",
        "mem_fraction_static": "spec.rollout.memoryFraction",
        "max_running_requests": "spec.rollout.maxConcurrentSamples",
        "context_length": "spec.rollout.maxResponseTokens",
        "dist_init_addr": "spec.network.ipFamily",
        "nccl_port": "the operator",
        "nnodes": "spec.cluster.nodes",
        "node_rank": "the operator",
        "base_gpu_id": "the operator",
        "enable_memory_saver": "spec.rollout.placement",
    },
    Engine.VLLM: {
        **_COMMON_OWNED,
        "model": "spec.model.source",
        "tokenizer": "spec.model.source",
        "tensor_parallel_size": "spec.rollout.tensorParallelSize",
        "gpu_memory_utilization": "spec.rollout.memoryFraction",
        "max_num_seqs": "spec.rollout.maxConcurrentSamples",
        "max_model_len": "spec.rollout.maxResponseTokens",
        "enable_sleep_mode": "spec.rollout.placement",
        "distributed_executor_backend": "the operator",
        "logprobs_mode": "the trainer",
    },
    Engine.NATIVE: {},
}


def check_engine_device(context: RuleContext) -> Iterable[Finding]:
    """SGLang and vLLM share GPUs with the trainer; the engine is never switched silently.

    A local run may have an engine built for CPUs installed; the catalogue's images have none.
    """
    spec = context.spec
    if spec.rollout.engine is not Engine.NATIVE and spec.cluster.gpus_per_node == 0:
        if context.target is Target.LOCAL:
            yield make_warning(
                "spec.rollout.engine",
                f"{spec.rollout.engine} without GPUs needs a build of it for CPUs in this environment "
                "(requirements/engines/build.sh makes one), and is far slower than engine: Native for small models",
            )
            return
        yield make_error(
            "spec.rollout.engine",
            f"{spec.rollout.engine} needs GPUs and spec.cluster.gpusPerNode is 0; use engine: Native, or give GPUs, "
            "for example gpusPerNode: 8",
            FindingReason.CONFLICT,
        )
    if spec.rollout.engine is Engine.NATIVE and spec.rollout.engine_version is not None:
        yield make_error(
            "spec.rollout.engineVersion",
            f"{spec.rollout.engine_version!r}: Native is part of the trainer and has no version of its own; remove it",
            FindingReason.CONFLICT,
        )


def check_native_fields(context: RuleContext) -> Iterable[Finding]:
    """The Native engine has no memory pool to size."""
    rollout = context.spec.rollout
    if rollout.engine is Engine.NATIVE and is_changed(rollout, "memory_fraction"):
        yield make_warning(
            "spec.rollout.memoryFraction",
            f"{rollout.memory_fraction} has no effect with the Native engine; remove it, or use engine: SGLang or VLLM",
            FindingReason.NO_EFFECT,
        )


def check_sampling(context: RuleContext) -> Iterable[Finding]:
    """The trainer recomputes log-probabilities of the full distribution; nucleus sampling is another one."""
    top_p = context.spec.rollout.top_p
    if top_p < 1:
        yield make_warning(
            "spec.rollout.topP",
            f"{top_p} samples from a truncated distribution, so the importance ratio is only approximate; 1.0 is exact",
        )


def check_over_sample(context: RuleContext) -> Iterable[Finding]:
    """Dynamic sampling draws as many prompts as it needs; more of them on top would have no effect."""
    over_sample, sampling = context.spec.rollout.over_sample, context.algorithm.dynamic_sampling
    if over_sample > 1 and sampling is not None and sampling.enabled:
        yield make_error(
            "spec.rollout.overSample",
            f"{over_sample} has no effect with spec.algorithm.dynamicSampling, which draws prompts by need; use 1.0, "
            "or dynamicSampling: {enabled: false}",
            FindingReason.CONFLICT,
        )


def check_engine_args(context: RuleContext) -> Iterable[Finding]:
    """Arguments that another field decides, and arguments for an engine that takes none."""
    rollout = context.spec.rollout
    owned = OWNED_ENGINE_ARGS[rollout.engine]
    for name in rollout.engine_args:
        path = f"spec.rollout.engineArgs.{name}"
        key = name.replace("-", "_")
        if rollout.engine is Engine.NATIVE:
            yield make_error(path, "the Native engine takes no arguments; remove it", FindingReason.CONFLICT)
        elif key in owned:
            owner = owned[key]
            fix = f"set {owner} instead" if owner.startswith("spec.") else f"{owner} sets it; remove it"
            yield make_error(path, f"decided elsewhere; {fix}", FindingReason.RESERVED)
        elif key != name:
            yield make_error(
                path, f"arguments are Python names with underscores; use {key}", FindingReason.UNKNOWN_FIELD
            )


def check_scheduler_budget(context: RuleContext) -> Iterable[Finding]:
    """Without chunked prefill the scheduler must take the longest sequence at once (verl #7624: 9216 > 8192)."""
    rollout = context.spec.rollout
    budget = rollout.engine_args.get("max_num_batched_tokens")
    longest = context.longest_sequence_tokens
    if (
        rollout.engine is Engine.VLLM
        and isinstance(budget, int)
        and budget < longest
        and rollout.engine_args.get("enable_chunked_prefill") is False
    ):
        yield make_error(
            "spec.rollout.engineArgs.max_num_batched_tokens",
            f"{longest} > {budget}: without chunked prefill it must hold the longest sequence; use {longest} or more, "
            "or enable_chunked_prefill: true",
            FindingReason.CONFLICT,
        )


ROLLOUT_RULES: Final[tuple[Rule, ...]] = (
    check_engine_device,
    check_native_fields,
    check_sampling,
    check_over_sample,
    check_engine_args,
    check_scheduler_budget,
)
