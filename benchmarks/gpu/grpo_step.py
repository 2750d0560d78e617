"""Whole GRPO steps on GPUs through the product's own loop: `python benchmarks/gpu/grpo_step.py --help`.

Random weights of a real shape, prompts and responses of forced length, one update per step. Prints one JSON line:
tokens per second end to end (prompt and response tokens / seconds of a step), seconds per phase, trainer MFU, decode
tokens/s, weight hand-over in milliseconds and peak GPU memory per phase. With `--handover-only` no step is trained: the
weights are handed over again and again (shapes whose optimizer would not fit beside an engine).

`--placement Separate --gpus 2 --ranks 1` gives the second GPU to the engine, which generates the next step's samples
while the rank trains: `phase_seconds.rollout` is then what the loop waited for them, `rollout_seconds` what they
took. Stale samples are corrected, which costs a pass for old log-probabilities; `--bypass` takes the engine's instead.

MFU = (6 N + 6 layers x width x S) x tokens / seconds of the training phase / ranks / 989 TFLOP/s; N counts a tied
embedding once, and the pass for old log-probabilities does not count as work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from shapes import NO_TOKEN, build_config
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Tokenizer

from rljob_api.catalogue import DEFAULT_CATALOGUE
from rljob_api.contract import ResolvedJob, TrainerPhase
from rljob_api.resolve import resolve_job
from rljob_api.targets import Target
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_api.v1alpha1.spec import RLJob
from rljob_trainer.config import make_paths_absolute
from rljob_trainer.loop import Trainer
from rljob_trainer.memory_plan import GIB, read_model_shape
from rljob_trainer.reporting import RunReporter, StepReport
from rljob_trainer.stopping import StopSignal
from rljob_trainer.telemetry import Console, TelemetryState

PEAK_FLOPS = 989e12
"""Dense bfloat16 of H100 and H200, without sparsity."""
SAMPLE_SECONDS = 0.25
ROLLOUT_AHEAD = "rollout ahead"
CHECKSUM_SECONDS = 300.0
REWARD_SOURCE = '''
"""Spreads rewards over [0, 1), so that advantages are not zero."""


def score(prompt: str, response: str, answer: object) -> float:
    return len(response) % 97 / 97
'''


def build_tokenizer(vocabulary_size: int) -> Any:
    """One token per byte, and a word for every other id, so that random responses decode to text of a real length."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{index}" for index in range(len(alphabet), vocabulary_size))]
    return Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token=None, pad_token=words[0]
    )


def make_assets(directory: Path, shape: str, num_prompts: int, prompt_tokens: int) -> None:
    """Model directory with random bfloat16 weights, a tokenizer with one word per id, prompts, a reward function."""
    if (directory / "train.jsonl").exists():
        return
    config = build_config(shape)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=NO_TOKEN)
    model.save_pretrained(directory / "model", max_shard_size="4GB")
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    build_tokenizer(config.vocab_size).save_pretrained(directory / "model")
    (directory / "reward.py").write_text(REWARD_SOURCE)
    rng = random.Random(0)
    with (directory / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(num_prompts):
            words = "".join(rng.choices(string.ascii_letters, k=prompt_tokens))
            file.write(json.dumps({"question": words, "answer": "0"}) + "\n")


def count_ranks(arguments: argparse.Namespace) -> int:
    """Trainer ranks: given, else one per GPU, or one on CPUs."""
    return int(arguments.ranks or arguments.gpus or 1)


def build_job(arguments: argparse.Namespace, directory: Path) -> ResolvedJob:
    """The job of the workload."""
    engine_args = json.loads(arguments.engine_args)
    document: dict[str, Any] = {
        "algorithm": {"type": "GRPO", "rolloutCorrection": {"bypassOldLogProbs": arguments.bypass}},
        "model": {"source": str(directory / "model"), "dtype": "BFloat16"},
        "data": {
            "train": [str(directory / "train.jsonl")],
            "promptField": "question",
            "answerField": "answer",
            "maxPromptTokens": arguments.prompt_tokens,
        },
        "reward": {
            "functions": [{"type": "Python", "path": str(directory / "reward.py")}],
            "numWorkers": arguments.reward_workers,
        },
        "rollout": {
            "engine": arguments.engine,
            "placement": arguments.placement,
            "samplesPerPrompt": arguments.samples,
            "maxResponseTokens": arguments.response_tokens,
            "memoryFraction": arguments.memory_fraction,
            "maxConcurrentSamples": arguments.concurrent_samples or arguments.prompts * arguments.samples,
            "tensorParallelSize": arguments.tensor_parallel_size,
            "engineArgs": engine_args,
        },
        "training": {
            "promptsPerStep": arguments.prompts,
            "totalSteps": arguments.steps,
            "microBatchTokens": arguments.micro_batch_tokens,
            "learningRate": 1e-6,
        },
        "checkpoint": {"everySteps": 0, "exportAtEnd": False},
        "cluster": {"nodes": 1, "gpusPerNode": arguments.gpus, "ranksPerNode": count_ranks(arguments)},
    }
    job = RLJob.model_validate({"metadata": {"name": "benchmark"}, "spec": document})
    resolved = resolve_job(
        job,
        uid="benchmark",
        catalogue=DEFAULT_CATALOGUE,
        target=Target.LOCAL,
        ip_family=IPFamily.IPV4,
        run_directory=str(directory / f"run-{os.getpid()}"),
        server_port=0,
    )
    return make_paths_absolute(resolved)


class MemoryWatch(threading.Thread):
    """Samples used memory of each GPU while a phase runs."""

    def __init__(self, get_phase: Any, num_gpus: int) -> None:
        super().__init__(daemon=True)
        self._get_phase, self._num_gpus = get_phase, num_gpus
        self.peak_gib: dict[str, list[float]] = {}

    def run(self) -> None:
        """Until the process ends."""
        try:
            import pynvml
        except ImportError:
            return
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._num_gpus)]
        while True:
            phase = self._get_phase()
            used = [round(pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, 1) for handle in handles]
            self.peak_gib[phase] = [max(pair) for pair in zip(used, self.peak_gib.get(phase, used), strict=True)]
            time.sleep(SAMPLE_SECONDS)


class Timings:
    """Seconds of each phase, step by step."""

    def __init__(self) -> None:
        self.current = "setup"
        self.steps: list[dict[str, float]] = []
        self.open: dict[str, float] = {}
        self.phase_started = 0.0

    def add(self, phase: str, seconds: float) -> None:
        """Within the step that runs."""
        self.open[phase] = self.open.get(phase, 0.0) + seconds

    def note_group(self) -> None:
        """When the first and the last group arrived, in seconds after the phase began."""
        since = time.monotonic() - self.phase_started
        self.open.setdefault("first group", since)
        self.open["last group"] = since

    def close_step(self, total: float) -> None:
        """The step is over."""
        self.steps.append({**self.open, "total": total})
        self.open = {}


class TimedReporter(RunReporter):
    """The product's reporter, and a stopwatch."""

    timings: Timings

    def phase(self, phase: TrainerPhase) -> Any:
        """Time of a phase."""
        return _TimedPhase(super().phase(phase), str(phase.value), self.timings)

    def count_samples(self, num_samples: int) -> None:
        """A group of the rollout has arrived."""
        if threading.current_thread() is threading.main_thread():
            self.timings.note_group()  # beside the training there is no phase to measure from
        super().count_samples(num_samples)

    def report_step(self, report: StepReport) -> None:
        """Steps end here."""
        if report.rollout_ahead_seconds is not None:
            self.timings.add(ROLLOUT_AHEAD, report.rollout_ahead_seconds)
        self.timings.close_step(report.seconds)
        super().report_step(report)


class _TimedPhase:
    def __init__(self, inner: Any, name: str, timings: Timings) -> None:
        self._inner, self._name, self._timings = inner, name, timings

    def __enter__(self) -> Any:
        self._started = time.monotonic()
        self._outer, self._timings.current = self._timings.current, self._name
        self._timings.phase_started = self._started
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._timings.add(self._name, time.monotonic() - self._started)
        self._timings.current = self._outer
        return self._inner.__exit__(*error)


class BenchmarkTrainer(Trainer):
    """The product's loop without checkpoints, and with repeated hand-overs before it ends."""

    handovers_ms: dict[str, list[float]]
    num_handovers: int
    handover_only: bool
    checksums: dict[str, list[int]]
    """Of the weights that each engine and each rank holds in the end; asked for by `--checksums`."""
    with_checksums: bool

    def _save(self) -> None:
        return

    def _train(self, resume: Any) -> None:
        if not self.handover_only:
            super()._train(resume)
        else:
            self._restore_or_warm_start(resume)
        version = self._state.step + 2
        sizes = {"default bucket": None, "0.5 GiB": GIB // 2, "4 GiB": 4 * GIB, "per parameter": 1}
        for name, bucket_bytes in sizes.items():
            self.handovers_ms[name] = []
            for _ in range(self.num_handovers if bucket_bytes != 1 else 2):
                started = time.monotonic()
                self._dispatcher.sync_weights(version, bucket_bytes=bucket_bytes)
                self.handovers_ms[name].append(round(1000 * (time.monotonic() - started), 1))
                version += 1
        if self.with_checksums:
            cluster = self._cluster
            self.checksums["engines"] = cluster.call_engines("checksum", timeout_seconds=CHECKSUM_SECONDS)
            self.checksums["ranks"] = cluster.call_ranks("compute_checksum", timeout_seconds=CHECKSUM_SECONDS)


def summarise(arguments: argparse.Namespace, timings: Timings, watch: MemoryWatch, handovers: Any) -> dict[str, Any]:
    """Medians over the steps after the first two, which compile and capture."""
    result: dict[str, Any] = {"arguments": vars(arguments), "handover_ms": handovers, "peak_gib": watch.peak_gib}
    steps = timings.steps[2:]
    if not steps:
        return result
    num_samples = arguments.prompts * arguments.samples
    num_response_tokens = num_samples * arguments.response_tokens
    num_tokens = num_samples * arguments.prompt_tokens + num_response_tokens
    phases = {name: round(statistics.median(step.get(name, 0.0) for step in steps), 4) for name in steps[0]}
    longest = arguments.prompt_tokens + arguments.response_tokens
    flops = read_model_shape(build_config(arguments.shape)).compute_flops_per_token(longest) * num_tokens
    train = phases[TrainerPhase.TRAIN.value]
    rollout = phases.pop(ROLLOUT_AHEAD, phases[TrainerPhase.ROLLOUT.value])
    return result | {
        "tokens_per_second": round(num_tokens / phases["total"]),
        "phase_seconds": phases,
        "trainer_mfu_percent": round(100 * flops / (train * count_ranks(arguments)) / PEAK_FLOPS, 1),
        "rollout_seconds": round(rollout, 4),
        "decode_tokens_per_second": round(num_response_tokens / rollout),
        "sync_ms": round(1000 * phases[TrainerPhase.SYNC.value], 1),
        "all_steps": [{name: round(value, 3) for name, value in step.items()} for step in timings.steps],
    }


def parse_arguments() -> argparse.Namespace:
    """The workload; defaults are the one of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--engine", default="SGLang")
    parser.add_argument("--engine-args", default='{"attention_backend": "triton", "sampling_backend": "pytorch"}')
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=32_768)
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--reward-workers", type=int, default=8)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=0, help="default: one per GPU")
    parser.add_argument("--placement", default="Colocated", choices=["Colocated", "Separate"])
    parser.add_argument("--bypass", action="store_true", help="the engine's log-probabilities are the old ones")
    parser.add_argument("--concurrent-samples", type=int, default=0, help="per engine; default: all of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--handovers", type=int, default=5)
    parser.add_argument("--handover-only", action="store_true")
    parser.add_argument("--checksums", action="store_true", help="compare the weights of engines and ranks in the end")
    parser.add_argument("--directory", default="/tmp/rljob-benchmark")
    return parser.parse_args()


def main() -> int:
    """Run; the last line is the result."""
    arguments = parse_arguments()
    directory = Path(arguments.directory) / arguments.shape
    num_prompts = arguments.prompts * max(arguments.steps, 1)
    make_assets(directory, arguments.shape, num_prompts, arguments.prompt_tokens)
    job = build_job(arguments, directory)
    stop = StopSignal(lambda: os._exit(1))
    timings = Timings()
    watch = MemoryWatch(lambda: timings.current, arguments.gpus)
    watch.start()
    with Console() as console:
        reporter = TimedReporter(job, TelemetryState(job), console)
        reporter.timings = timings
        trainer = BenchmarkTrainer(job, reporter, stop)
        trainer.handovers_ms, trainer.num_handovers = {}, arguments.handovers
        trainer.handover_only = arguments.handover_only
        trainer.checksums, trainer.with_checksums = {}, arguments.checksums
        trainer.run()
    summary = summarise(arguments, timings, watch, trainer.handovers_ms)
    if arguments.checksums:
        found = {value for values in trainer.checksums.values() for value in values}
        summary |= {"checksums": trainer.checksums, "are_checksums_equal": len(found) == 1}
    print(json.dumps(summary), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
