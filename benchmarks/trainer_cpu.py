#!/usr/bin/env python3
"""One optimizer update of our trainer and the same update of `trl` (GRPO): tokens per second and peak memory on CPUs.

Both get the same model, completions, advantages, micro-batches (rows), loss (token mean over the whole batch, clip 0.2,
no KL) and optimizer settings, each in a process of its own. Updates alternate, so that a busy machine slows both alike.
The figure is the median of the pairwise ratios; loss and gradient norm of the first update must agree.

Ours is what a rank runs: an FSDP2-sharded policy (one rank), packed sequences, chunked head. trl runs its own
`GRPOTrainer.train()`, whose generation and scoring step is replaced by the given batch.

`trl` is locked in requirements/benchmarks.txt and installed into a cached environment of its own on the first run.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK = REPOSITORY / "requirements" / "benchmarks.txt"
LIMIT_RATIO = 1.0
BUILD_SECONDS = 1800
CHILD_SECONDS = 900
MARK = "@result "
"""Before our lines: the libraries print dictionaries too."""
AGREEMENT = 2e-3
"""Relative; two libraries round differently in float32."""

JUDGED = "mixed"
VOCABULARY = 4096
MAX_RESPONSE_TOKENS = 128
WORKLOADS = {
    "mixed": "responses of 16 to 128 tokens, as a sampled batch has them",
    "equal": "every prompt and response of the same length: nothing to gain from packing",
}


def build_environment() -> Path:
    """The locked environment with trl; returns its Python."""
    name = f"benchmarks-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    cache = Path(os.environ.get("RLJOB_CACHE", Path.home() / ".cache" / "rljob"))
    environment = cache / name
    python = environment / "bin" / "python"
    if (environment / ".complete").exists():
        return python
    uv = REPOSITORY / ".venv" / "bin" / "uv"
    if not uv.exists():
        sys.exit(f"no uv at {uv}; run `make venv` first")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / ".complete").exists():
            _install(uv, environment, python)
    return python


def _install(uv: Path, environment: Path, python: Path) -> None:
    print(f"building {environment} (once)", file=sys.stderr)
    for command in (
        ["venv", "--quiet", "--clear", "--python", str(REPOSITORY / ".venv" / "bin" / "python"), str(environment)],
        ["pip", "sync", "--quiet", "--python", str(python), "--require-hashes", str(LOCK)],
    ):
        subprocess.run([str(uv), *command], check=True, timeout=BUILD_SECONDS)
    (environment / ".complete").touch()


def make_batch(path: Path, workload: str, *, num_prompts: int, num_samples: int) -> None:
    """Random completions with GRPO advantages, and a random tiny Qwen2."""
    import numpy as np
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    vocabulary = VOCABULARY
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path / "model")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_prompts):
        prompt = rng.integers(2, vocabulary, int(rng.integers(16, 49)) if workload == "mixed" else 32).tolist()
        rewards = rng.integers(0, 2, num_samples).astype(float)
        rewards[:2] = 0.0, 1.0  # every group has a signal
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for advantage in advantages:
            length = int(rng.integers(16, MAX_RESPONSE_TOKENS + 1)) if workload == "mixed" else MAX_RESPONSE_TOKENS
            rows.append(
                {
                    "prompt": prompt,
                    "response": rng.integers(2, vocabulary, length).tolist(),
                    "advantage": float(advantage),
                }
            )
    (path / "batch.json").write_text(json.dumps(rows))


def wait_for_go() -> bool:
    """Whether the parent wants another update."""
    return sys.stdin.readline().strip() == "go"


def report(output: TextIO, **values: Any) -> None:
    """One JSON line to the parent."""
    print(MARK + json.dumps(values), file=output, flush=True)


def get_peak_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_ours(path: Path, output: TextIO, micro_batch_rows: int) -> None:
    """Child: our update, when told to."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rljob_api.v1alpha1.algorithm import LossAggregation, PolicyLoss
    from rljob_api.v1alpha1.model import DType
    from rljob_api.v1alpha1.rollout import Training
    from rljob_trainer.algorithms.policy_losses import PolicyLossOptions
    from rljob_trainer.models.execution import Execution, prepare_model
    from rljob_trainer.models.policy import PolicyModel, load_causal_lm
    from rljob_trainer.optimization import build_optimizer
    from rljob_trainer.rows import MiniBatch, TrainRow, count_trainable
    from rljob_trainer.update import LossSettings, Ranks, apply_update

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = PolicyModel(load_causal_lm(str(path / "model")))
    prepare_model(policy, init_device_mesh("cpu", (1,)), DType.FLOAT32, Execution())
    optimizer = build_optimizer(policy, Training(learning_rate=1e-5, weight_decay=0.0))
    rows = [
        TrainRow(
            row["prompt"],
            row["response"],
            np.full(len(row["response"]), row["advantage"], dtype=np.float32),
            np.full(len(row["response"]), -9.0, dtype=np.float32),
        )
        for row in json.loads((path / "batch.json").read_text())
    ]
    micro_batches = [rows[start : start + micro_batch_rows] for start in range(0, len(rows), micro_batch_rows)]
    batch = MiniBatch(micro_batches, *count_trainable(rows), learning_rate=1e-5)
    settings = LossSettings(
        policy_loss=PolicyLoss.PPO_CLIP,
        aggregation=LossAggregation.TOKEN_MEAN,
        temperature=1.0,
        norm_tokens=MAX_RESPONSE_TOKENS,
        options=PolicyLossOptions(clip_low=0.2, clip_high=0.2),
    )
    ranks = Ranks(1, lambda values: values, lambda values: values)
    report(output, loaded_mib=get_peak_mib())
    while wait_for_go():
        started = time.perf_counter()
        metrics = apply_update(
            policy,
            optimizer,
            batch,
            settings,
            gradient_clip=1.0,
            ranks=ranks,
            device=torch.device("cpu"),
            on_micro_batch=lambda: None,
        )
        seconds = time.perf_counter() - started
        report(output, seconds=seconds, loss=metrics.loss, gradient_norm=metrics.gradient_norm, peak_mib=get_peak_mib())


def run_trl(path: Path, output: TextIO, micro_batch_rows: int) -> None:
    """Child: trl's update, when told to."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = json.loads((path / "batch.json").read_text())
    vocabulary = {str(index): index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")), pad_token="0", eos_token="1"
    )

    def pad(sequences: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(sequence) for sequence in sequences)
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        mask = torch.zeros(len(sequences), width, dtype=torch.int64)
        for index, sequence in enumerate(sequences):
            span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
            ids[index, span] = torch.tensor(sequence)
            mask[index, span] = 1
        return ids, mask

    prompt_ids, prompt_mask = pad([row["prompt"] for row in rows], left=True)
    completion_ids, completion_mask = pad([row["response"] for row in rows], left=False)

    class GivenBatch(GRPOTrainer):
        """trl with generation and scoring replaced."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "advantages": torch.tensor([row["advantage"] for row in rows]),
                "num_items_in_batch": completion_mask.sum(),
            }

    class Pace(TrainerCallback):
        """Waits for the parent before each update and reports after it."""

        def __init__(self) -> None:
            self.seconds: float | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if self.seconds is None:
                report(output, loaded_mib=get_peak_mib())
            if not wait_for_go():
                sys.stdout.flush()
                os._exit(0)
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            self.seconds = time.perf_counter() - self.started
            control.should_log = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
            if logs and "loss" in logs and self.seconds is not None:
                norm = float(logs["grad_norm"])
                report(output, seconds=self.seconds, loss=logs["loss"], gradient_norm=norm, peak_mib=get_peak_mib())

    num_micro_batches = len(rows) // micro_batch_rows
    settings = GRPOConfig(
        output_dir=str(path / "trl"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch_rows,
        gradient_accumulation_steps=num_micro_batches,
        num_generations=4,
        max_completion_length=MAX_RESPONSE_TOKENS,
        max_steps=1000,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        temperature=1.0,
        disable_dropout=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = GivenBatch(
        model=AutoModelForCausalLM.from_pretrained(str(path / "model"), dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["1"] * 4096}),
        processing_class=tokenizer,
        callbacks=[Pace()],
    )
    trainer.train()


class Child:
    """One side of the comparison."""

    def __init__(self, python: Path, side: str, path: Path, arguments: argparse.Namespace) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "crds"), str(REPOSITORY / "trainer")]),
            "OMP_NUM_THREADS": str(arguments.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self.side = side
        self._process = subprocess.Popen(
            [str(python), __file__, "--child", side, "--directory", str(path), "--rows", str(arguments.rows)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded_mib = float(self._read()["loaded_mib"])

    def update(self) -> dict[str, float]:
        """One update."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, float]:
        """The next result; whatever else a library prints is passed on. A child that says nothing is killed."""
        assert self._process.stdout is not None
        watch = threading.Timer(CHILD_SECONDS, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    document: dict[str, float] = json.loads(line.removeprefix(MARK))
                    return document
                print(f"[{self.side}] {line}", end="", file=sys.stderr)
        finally:
            watch.cancel()
        sys.exit(
            f"{self.side} ended with exit code {self._process.wait(60)} (killed after {CHILD_SECONDS} s of silence?)"
        )


def compare(python: Path, workload: str, arguments: argparse.Namespace) -> float:
    """Prints one table; returns our tokens/s over trl's."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        subprocess.run(
            [str(python), __file__, "--child", "batch", "--directory", directory, "--workload", workload],
            check=True,
            timeout=CHILD_SECONDS,
        )
        rows = json.loads((path / "batch.json").read_text())
        num_tokens = sum(len(row["prompt"]) + len(row["response"]) for row in rows)
        children = [Child(python, side, path, arguments) for side in ("ours", "trl")]
        try:
            results: list[list[dict[str, float]]] = [[], []]
            for _ in range(arguments.updates + 1):
                for number, child in enumerate(children):
                    results[number].append(child.update())
        finally:
            for child in children:
                child.stop()
    print(f"\n{workload}: {WORKLOADS[workload]}; {len(rows)} rows, {num_tokens} tokens, {arguments.threads} threads")
    print(f"{'':6}{'tokens/s':>10}{'s/update':>10}{'peak MiB':>10}{'of it for the update':>22}")
    for child, found in zip(children, results, strict=True):
        seconds = statistics.median(result["seconds"] for result in found[1:])
        peak = found[-1]["peak_mib"]
        print(
            f"{child.side:6}{num_tokens / seconds:>10.0f}{seconds:>10.2f}{peak:>10.0f}{peak - child.loaded_mib:>22.0f}"
        )
    for key in ("loss", "gradient_norm"):
        ours, theirs = results[0][0][key], results[1][0][key]
        # A loss of normalised advantages is near 0: measure its difference against 1.
        scale = max(abs(theirs), 1.0 if key == "loss" else 0.0)
        if abs(ours - theirs) > AGREEMENT * scale:
            sys.exit(f"not the same update: {key} of ours {ours}, of trl {theirs}")
    pairs = zip(results[0][1:], results[1][1:], strict=True)
    ratio = statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
    print(f"ratio: {ratio:.2f}x tokens/s of trl (same first loss and gradient norm)")
    return ratio


def main() -> int:
    """Exit code 1 below the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--updates", type=int, default=5, help="measured updates of each side, after one to warm up")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    # More threads than free cores wait for each other at every operation: tens of times slower, and noise.
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--child", choices=["ours", "trl", "batch"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "batch":
        make_batch(arguments.directory, arguments.workload, num_prompts=4, num_samples=4)
        return 0
    if arguments.child:
        run = run_ours if arguments.child == "ours" else run_trl
        run(arguments.directory, sys.stdout, arguments.rows)
        return 0
    python = build_environment()
    workloads = list(WORKLOADS) if arguments.workload == "all" else [arguments.workload]
    ratios = {workload: compare(python, workload, arguments) for workload in workloads}
    # The goal is about batches as sampling makes them; equal lengths show what is left without padding.
    judged = ratios.get(JUDGED, min(ratios.values()))
    print(f"\n{'PASS' if judged >= LIMIT_RATIO else 'FAIL'}: {judged:.2f}x trl (limit {LIMIT_RATIO:.1f}x)")
    return 0 if judged >= LIMIT_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
