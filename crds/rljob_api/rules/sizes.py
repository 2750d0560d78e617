"""The arithmetic of batches, ranks and engines. World size = nodes x ranksPerNode; the head pod never counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from rljob_api.findings import Finding, FindingReason, make_error, make_warning
from rljob_api.resolve import count_drawn_prompts
from rljob_api.rules.context import Rule, RuleContext, find_nearest, is_changed, list_divisors
from rljob_api.v1alpha1.rollout import Engine, Placement, Schedule

_TP: Final = "spec.rollout.tensorParallelSize"
_MAX_UNUSED_ROW_SHARE: Final = 0.05


def check_ranks(context: RuleContext) -> Iterable[Finding]:
    """Ranks per pod, by default one per GPU."""
    cluster = context.spec.cluster
    ranks, gpus = cluster.ranks_per_node, cluster.gpus_per_node
    path = "spec.cluster.ranksPerNode"
    if gpus == 0 and ranks is None:
        yield make_error(
            path,
            "required when spec.cluster.gpusPerNode is 0 (a run on CPUs); for example 2",
            FindingReason.MISSING_FIELD,
        )
    if ranks is not None and 0 < gpus < ranks:
        yield make_error(
            path, f"{ranks} ranks cannot share {gpus} GPUs, each rank needs its own; use {gpus}", FindingReason.CONFLICT
        )
    if ranks is not None and ranks < gpus and context.spec.rollout.placement is Placement.COLOCATED:
        yield make_warning(
            path,
            f"{ranks} ranks leave {gpus - ranks} of {gpus} GPUs per pod unused; set ranksPerNode to {gpus} or "
            f"gpusPerNode to {ranks}, or give them to engines with spec.rollout.placement: Separate",
        )


def check_tensor_parallel_divides(context: RuleContext) -> Iterable[Finding]:
    """Every engine replica has the same number of GPUs, and replicas do not straddle pods unevenly."""
    tp, num_slots, per_node = (
        context.spec.rollout.tensor_parallel_size,
        context.num_engine_slots,
        context.engine_slots_per_node,
    )
    if num_slots == 0:
        return
    nodes, name = context.spec.cluster.nodes, context.engine_slot_name
    valid = ", ".join(str(size) for size in list_valid_tensor_parallel_sizes(context))
    if num_slots % tp:
        origin = "ranksPerNode" if name == "ranks" else "(gpusPerNode - ranksPerNode)"
        yield make_error(
            _TP,
            f"{tp} must divide the {num_slots} {name} of the job (nodes {nodes} x {origin} {per_node}); "
            f"valid values: {valid}",
            FindingReason.DOES_NOT_DIVIDE,
        )
    elif not _fits_pods(tp, per_node):
        yield make_error(
            _TP,
            f"{tp} would cut engines across pods of {per_node} {name}; it must divide {per_node} or be a multiple of "
            f"it; valid values: {valid}",
            FindingReason.DOES_NOT_DIVIDE,
        )
    elif tp > per_node:
        yield make_warning(
            _TP,
            f"{tp} spans {tp // per_node} pods of {per_node} {name}: every token crosses the network; {per_node} or "
            "less keeps an engine inside one pod",
        )


def check_tensor_parallel_heads(context: RuleContext) -> Iterable[Finding]:
    """Query heads are split over the ranks; KV heads are split or replicated (TP 16 on 8 KV heads is valid)."""
    tp = context.spec.rollout.tensor_parallel_size
    heads = context.get_model_number("num_attention_heads", "n_head")
    kv_heads = context.get_model_number("num_key_value_heads")
    valid = ", ".join(str(size) for size in list_valid_tensor_parallel_sizes(context)) or "1"
    available = f"{context.num_engine_slots} {context.engine_slot_name}"
    if heads is not None and heads % tp:
        yield make_error(
            _TP,
            f"{tp} must divide the model's {heads} attention heads; valid values on {available}: "
            f"{valid} (divisors of {heads}: {', '.join(map(str, list_divisors(heads)))})",
            FindingReason.DOES_NOT_DIVIDE,
        )
    elif kv_heads is not None and kv_heads % tp and tp % kv_heads:
        yield make_error(
            _TP,
            f"neither divides: {tp} and the model's {kv_heads} KV heads; valid values on {available}: {valid}",
            FindingReason.DOES_NOT_DIVIDE,
        )


def list_valid_tensor_parallel_sizes(context: RuleContext) -> list[int]:
    """Sizes that divide what the engines have, fit the pods and, where the model is known, its heads."""
    heads = context.get_model_number("num_attention_heads", "n_head")
    kv_heads = context.get_model_number("num_key_value_heads")
    return [
        size
        for size in list_divisors(context.num_engine_slots or 1)
        if _fits_pods(size, context.engine_slots_per_node)
        and (heads is None or heads % size == 0)
        and (kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _fits_pods(tp: int, slots_per_node: int) -> bool:
    return slots_per_node == 0 or slots_per_node % tp == 0 or tp % slots_per_node == 0


def check_native_tensor_parallel(context: RuleContext) -> Iterable[Finding]:
    """The Native engine holds a full copy of the model."""
    tp = context.spec.rollout.tensor_parallel_size
    if context.spec.rollout.engine is Engine.NATIVE and tp > 1:
        yield make_warning(
            _TP,
            f"the Native engine does not split the model; {tp} only means one engine per {tp} ranks. 1 gives every "
            "rank an engine",
            FindingReason.NO_EFFECT,
        )


def check_sequence_parallel(context: RuleContext) -> Iterable[Finding]:
    """Ulysses splits heads over ranks of one pod's world."""
    size = context.spec.training.sequence_parallel_size
    path = "spec.training.sequenceParallelSize"
    if context.world_size and context.world_size % size:
        yield make_error(
            path,
            f"{size} must divide the {context.world_size} ranks of the job; valid values: "
            f"{', '.join(map(str, list_divisors(context.world_size)))}",
            FindingReason.DOES_NOT_DIVIDE,
        )
    heads = context.get_model_number("num_attention_heads", "n_head")
    if heads is not None and heads % size:
        valid = ", ".join(str(divisor) for divisor in list_divisors(math.gcd(heads, context.world_size or heads)))
        yield make_error(
            path,
            f"{size} must divide the model's {heads} attention heads; valid values: {valid}",
            FindingReason.DOES_NOT_DIVIDE,
        )


def check_batch_divides_ranks(context: RuleContext) -> Iterable[Finding]:
    """Every rank gets the same number of sequences of a rollout."""
    prompts, samples = context.spec.training.prompts_per_step, context.spec.rollout.samples_per_prompt
    world_size = context.world_size
    if world_size and prompts * samples % world_size:
        step = _compute_prompt_step(samples, world_size)
        yield make_error(
            "spec.training.promptsPerStep",
            f"{prompts} prompts x {samples} samples = {prompts * samples} sequences do not divide by {world_size} "
            f"ranks; nearest values that do: {_list_multiples_around(prompts, step)}",
            FindingReason.DOES_NOT_DIVIDE,
        )


def check_mini_batch(context: RuleContext) -> Iterable[Finding]:
    """Updates are equal parts of a rollout, and each is an equal part for every data-parallel rank."""
    training = context.spec.training
    mini, prompts, samples = (
        training.mini_batch_prompts,
        training.prompts_per_step,
        context.spec.rollout.samples_per_prompt,
    )
    path = "spec.training.miniBatchPrompts"
    if mini is None:
        return
    num_replicas = _count_replicas(context)
    step = _compute_prompt_step(samples, num_replicas)
    valid = [divisor for divisor in list_divisors(prompts) if divisor % step == 0] or [prompts]
    if mini > prompts:
        yield make_error(
            path,
            f"{mini} is more than spec.training.promptsPerStep ({prompts}); use {find_nearest(valid, mini)}",
            FindingReason.CONFLICT,
        )
    elif prompts % mini:
        yield make_error(
            path,
            f"{mini} must divide spec.training.promptsPerStep ({prompts}); nearest values that do: "
            f"{find_nearest(valid, mini)}",
            FindingReason.DOES_NOT_DIVIDE,
        )
    elif mini * samples % num_replicas:
        yield make_error(
            path,
            f"{mini} prompts x {samples} samples = {mini * samples} sequences do not divide by {num_replicas} "
            f"data-parallel ranks; nearest values that do: {find_nearest(valid, mini)}",
            FindingReason.DOES_NOT_DIVIDE,
        )


def check_micro_batch(context: RuleContext) -> Iterable[Finding]:
    """One forward/backward: a token budget or a number of sequences, and never more than an update holds."""
    training = context.spec.training
    tokens, sequences = training.micro_batch_tokens, training.micro_batch_sequences
    longest = context.longest_sequence_tokens
    if tokens is not None and sequences is not None:
        yield make_error(
            "spec.training.microBatchSequences",
            f"microBatchTokens ({tokens}) and microBatchSequences ({sequences}) exclude each other; keep "
            "microBatchTokens, which balances long and short responses",
            FindingReason.CONFLICT,
        )
    if tokens is not None and tokens * training.sequence_parallel_size < longest:
        yield make_error(
            "spec.training.microBatchTokens",
            f"{tokens} cannot hold the longest sequence of {longest} tokens (data.maxPromptTokens "
            f"{context.spec.data.max_prompt_tokens} + rollout.maxResponseTokens "
            f"{context.spec.rollout.max_response_tokens}); use {longest} or more",
        )
    if sequences is None:
        return
    mini, samples, num_replicas = (
        context.mini_batch_prompts,
        context.spec.rollout.samples_per_prompt,
        _count_replicas(context),
    )
    per_rank = mini * samples // num_replicas
    if sequences > per_rank:
        needed = -(-sequences * num_replicas // samples)
        larger = [divisor for divisor in list_divisors(training.prompts_per_step) if divisor >= needed][:2]
        bigger = f", or miniBatchPrompts {' or '.join(map(str, larger))}" if larger else ""
        yield make_error(
            "spec.training.microBatchSequences",
            f"{sequences} is more than an update holds: miniBatchPrompts {mini} x samplesPerPrompt {samples} / "
            f"{num_replicas} data-parallel ranks = {per_rank} sequences per rank; use "
            f"{', '.join(map(str, list_divisors(max(per_rank, 1))))}{bigger}",
            FindingReason.CONFLICT,
        )


def check_context_length(context: RuleContext) -> Iterable[Finding]:
    """Prompt and response fit the model's context, unless its config scales the rotary embedding."""
    limit = context.get_model_number("max_position_embeddings", "n_positions")
    longest = context.longest_sequence_tokens
    if limit is None or longest <= limit or (context.model_config or {}).get("rope_scaling"):
        return
    prompt = context.spec.data.max_prompt_tokens
    room = limit - prompt
    fix = f"use {room} or less" if room >= 1 else f"use data.maxPromptTokens {limit // 2} and at most {limit // 2} here"
    yield make_error(
        "spec.rollout.maxResponseTokens",
        f"data.maxPromptTokens {prompt} + {context.spec.rollout.max_response_tokens} = {longest} tokens exceed the "
        f"model's context of {limit}; {fix}",
        FindingReason.CONFLICT,
    )


def check_train_rows(context: RuleContext) -> Iterable[Finding]:
    """An epoch must hold a step, and should not lose many rows (7,473 GSM8K rows with 4096 prompts lose 45 %)."""
    num_rows, prompts = context.num_train_rows, count_drawn_prompts(context.spec)
    path = "spec.training.promptsPerStep"
    if num_rows is None:
        return
    if prompts > num_rows:
        yield make_error(
            path,
            f"{prompts} is more than the {num_rows} training prompts; use {num_rows} or less"
            + (" without rollout.overSample" if context.spec.rollout.over_sample > 1 else ""),
            FindingReason.CONFLICT,
        )
        return
    num_steps, num_unused = divmod(num_rows, prompts)
    if num_unused > _MAX_UNUSED_ROW_SHARE * num_rows:
        step = math.lcm(
            _compute_prompt_step(context.spec.rollout.samples_per_prompt, max(1, context.world_size)),
            context.spec.training.mini_batch_prompts or 1,
        )
        sizes = range(prompts // step * step, 0, -step)
        better = [size for size in sizes if num_rows % size <= _MAX_UNUSED_ROW_SHARE * num_rows]
        hint = f"; {better[0]} leaves {num_rows % better[0]}" if better else ""
        yield make_warning(
            path,
            f"{num_rows} training prompts make {num_steps} steps per epoch of {prompts} and leave {num_unused} "
            f"({num_unused / num_rows:.0%}) unused in each epoch{hint}",
        )


def _count_replicas(context: RuleContext) -> int:
    """Data-parallel ranks: world size / sequence parallel size, at least 1."""
    return max(1, context.world_size // context.spec.training.sequence_parallel_size)


def _compute_prompt_step(samples_per_prompt: int, num_parts: int) -> int:
    """The smallest number of prompts whose samples divide into equal parts."""
    return num_parts // math.gcd(num_parts, samples_per_prompt)


def _list_multiples_around(number: int, step: int) -> str:
    below = number // step * step
    return f"{below}, {below + step}" if below else str(step)


def check_schedule(context: RuleContext) -> Iterable[Finding]:
    """A constant schedule ends where it is."""
    training = context.spec.training
    if training.schedule is Schedule.CONSTANT and is_changed(training, "min_learning_rate_ratio"):
        yield make_warning(
            "spec.training.minLearningRateRatio",
            "has no effect with schedule Constant; set schedule: Cosine or Linear, or remove it",
            FindingReason.NO_EFFECT,
        )


SIZE_RULES: Final[tuple[Rule, ...]] = (
    check_schedule,
    check_ranks,
    check_tensor_parallel_divides,
    check_tensor_parallel_heads,
    check_native_tensor_parallel,
    check_sequence_parallel,
    check_batch_divides_ranks,
    check_mini_batch,
    check_micro_batch,
    check_context_length,
    check_train_rows,
)
