"""One policy update alone, without engine and Ray: `python benchmarks/gpu/update_step.py --shape qwen2-0.5b`.

Runs the product's own model, packs and update on random rows, and prints seconds, tokens/s, MFU and peak memory of each
variant. MFU = (6 N + 6 layers x width x S) x tokens / seconds / 989 TFLOP/s, N with a tied embedding once, prompts
counted like responses (the LM head runs on response tokens only).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from shapes import build_config
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from rljob_api.v1alpha1.algorithm import LossAggregation, PolicyLoss
from rljob_api.v1alpha1.model import DType
from rljob_api.v1alpha1.rollout import Offload, Training
from rljob_trainer.batching import plan_batches
from rljob_trainer.memory_plan import GIB, read_model_shape
from rljob_trainer.models.execution import Execution, prepare_model
from rljob_trainer.models.packed_attention import ATTENTION_NAME
from rljob_trainer.models.packed_batch import PackLayout
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.rows import MiniBatch, TrainRow, count_trainable, split_rows
from rljob_trainer.update import LossSettings, Ranks, apply_update

PEAK_FLOPS = 989e12
"""Dense bfloat16 of H100 and H200, without sparsity."""


@dataclass(frozen=True)
class Variant:
    """One way to run the update."""

    name: str
    micro_batch_tokens: int = 32_768
    is_compiled: bool = True
    recompute_blocks: bool = False
    keep_gathered: bool = True
    keep_logits: bool = True
    offload_parameters: bool = False
    offload_optimizer: bool = False
    is_padded: bool = False
    """Every row is filled up to the longest, as a padded batch would be."""


def make_rows(num_rows: int, lengths: tuple[int, int], prompt_tokens: int, vocabulary: int) -> list[TrainRow]:
    """Random rows with response lengths uniform in `lengths`."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        rows.append(
            TrainRow(
                prompt_ids=rng.integers(0, vocabulary, prompt_tokens).tolist(),
                response_ids=rng.integers(0, vocabulary, length).tolist(),
                advantages=rng.standard_normal(length).astype(np.float32),
                rollout_log_probs=np.full(length, -np.log(vocabulary), dtype=np.float32),
            )
        )
    return rows


def pad_rows(rows: list[TrainRow], vocabulary: int) -> list[TrainRow]:
    """Rows as long as the longest; what was added is not trained on."""
    longest = max(len(row.response_ids) for row in rows)
    padded = []
    for row in rows:
        missing = longest - len(row.response_ids)
        zeros = np.zeros(missing, dtype=np.float32)
        padded.append(
            TrainRow(
                prompt_ids=row.prompt_ids,
                response_ids=row.response_ids + [0] * missing,
                advantages=np.concatenate([row.advantages, zeros]),
                rollout_log_probs=np.concatenate([row.rollout_log_probs, zeros]),
                kept=np.arange(longest) < len(row.response_ids),
            )
        )
    return padded


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    shape: str, variant: Variant, rows: list[TrainRow], num_updates: int, profile: str | None
) -> dict[str, Any]:
    """Median of `num_updates` updates after two to warm up."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = build_config(shape)
    torch.manual_seed(0)
    with device:
        causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    policy = PolicyModel(causal_lm.eval())
    longest = max(row.num_tokens for row in rows)
    layout = PackLayout(
        variant.micro_batch_tokens if variant.is_compiled else None, longest, with_padded_layout=device.type == "cpu"
    )
    execution = Execution(
        layout,
        variant.is_compiled,
        variant.recompute_blocks,
        variant.keep_gathered,
        variant.keep_logits,
        variant.offload_parameters,
    )
    prepare_model(policy, init_device_mesh(device.type, (1,)), DType.BFLOAT16, execution)
    offload = Offload(parameters=variant.offload_parameters, optimizer=variant.offload_optimizer)
    optimizer = build_optimizer(policy, Training(offload=offload))
    plan = plan_batches([row.num_tokens for row in rows], 1, micro_batch_tokens=variant.micro_batch_tokens)
    num_tokens, num_sequences = count_trainable(rows)
    batch = MiniBatch(split_rows(rows, plan)[0], num_tokens, num_sequences, 1e-6)
    loss = LossSettings(PolicyLoss.PPO_CLIP, LossAggregation.TOKEN_MEAN, 1.0, longest)
    ranks = Ranks(1, lambda values: values, lambda values: values)

    def update() -> Any:
        return apply_update(
            policy, optimizer, batch, loss, gradient_clip=1.0, ranks=ranks, device=device, on_micro_batch=lambda: None
        )

    started = time.perf_counter()
    metrics = update()
    synchronize()
    first_seconds = time.perf_counter() - started
    update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(num_updates):
        synchronize()
        started = time.perf_counter()
        metrics = update()
        synchronize()
        seconds.append(time.perf_counter() - started)
    if profile is not None:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as found:
            update()
            synchronize()
        with open(f"{profile}/{shape}-{variant.name}.txt", "w", encoding="utf-8") as file:
            file.write(
                found.key_averages().table(sort_by="self_cuda_time_total", row_limit=35, max_name_column_width=90)
            )
            file.write(
                found.key_averages().table(sort_by="self_cpu_time_total", row_limit=35, max_name_column_width=90)
            )
    useful = sum(
        len(row.prompt_ids) + (len(row.response_ids) if row.kept is None else int(row.kept.sum())) for row in rows
    )
    flops = read_model_shape(config).compute_flops_per_token(longest) * useful
    median = statistics.median(seconds)
    result = {
        "shape": shape,
        "variant": variant.name,
        "seconds": round(median, 4),
        "tokens_per_second": round(useful / median),
        "mfu_percent": round(100 * flops / median / PEAK_FLOPS, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1) if device.type == "cuda" else None,
        "held_gib": round(torch.cuda.memory_allocated() / GIB, 1) if device.type == "cuda" else None,
        "first_update_seconds": round(first_seconds, 1),
        "num_micro_batches": len(batch.micro_batches),
        "loss": metrics.loss,
        "gradient_norm": metrics.gradient_norm,
        "is_finite": metrics.is_finite,
    }
    return result


VARIANTS = (
    Variant("full"),
    Variant("16k", micro_batch_tokens=16_384),
    Variant("logits recomputed", keep_logits=False),
    Variant("reduced per micro-batch", keep_gathered=False),
    Variant("blocks recomputed", recompute_blocks=True),
    Variant("not compiled", is_compiled=False),
    Variant("optimizer offloaded", offload_optimizer=True),
    Variant("parameters and optimizer offloaded", offload_parameters=True, offload_optimizer=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=[variant.name for variant in VARIANTS])
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--mixed", action="store_true", help="response lengths 16 to 496: packing against padding")
    parser.add_argument("--profile", help="directory for tables of kernels")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/store", 1)
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=0, world_size=1)
        run(arguments)
        dist.destroy_process_group()


def run(arguments: argparse.Namespace) -> None:
    """All variants asked for, one JSON line each."""
    vocabulary = build_config(arguments.shape).vocab_size
    rows = make_rows(arguments.rows, (16, 496) if arguments.mixed else (256, 256), 256, vocabulary)
    variants = [variant for variant in VARIANTS if variant.name in arguments.variants]
    if arguments.mixed:
        variants = [Variant("packed"), Variant("padded", is_padded=True)]
    for variant in variants:
        tokens = arguments.micro_batch_tokens or variant.micro_batch_tokens
        variant = Variant(**{**variant.__dict__, "micro_batch_tokens": tokens})
        chosen = pad_rows(rows, vocabulary) if variant.is_padded else rows
        try:
            print(
                json.dumps(measure(arguments.shape, variant, chosen, arguments.updates, arguments.profile)), flush=True
            )
        except torch.OutOfMemoryError as error:
            print(json.dumps({"variant": variant.name, "error": str(error)[:200]}), flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
