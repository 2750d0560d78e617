"""Runs of `python -m rljob_trainer` as a process of their own, on a local Ray or on one that several runs share."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tr_job import build_job
from tr_tiny import save_byte_model

from rljob_api.contract import Result, find_result
from rljob_trainer.engines.child_guard import list_descendants
from rljob_trainer.models.policy import load_causal_lm

REWARD = """
def score(prompt, response, answer, **row):
    return sum(map(ord, response)) % 7 / 7 + (answer in response)  # differs within a group, also untrained
"""
TIMED_KEYS = {"step_seconds", "rollout_ahead_seconds"}
TOTAL_STEPS = 4
RUN_SECONDS = 600.0


def make_assets(directory: Path) -> Path:
    """Model, prompts, demonstrations and a reward function."""
    save_byte_model(directory / "model")
    rng = random.Random(0)
    rows = [{"prompt": f"{rng.randrange(10)} {rng.randrange(10)}", "answer": str(row % 4)} for row in range(24)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    demonstrations = [{"prompt": row["prompt"], "response": f"{row['answer']}1"} for row in rows]
    (directory / "warm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    (directory / "reward.py").write_text(REWARD)
    return directory


def write_job(
    assets: Path, run: Path, *, dtype: str = "Float32", compile: str = "Auto", **sections: dict[str, Any]
) -> dict[str, str]:
    """A job with every optional pass: warm start, two mini-batches, KL in the loss, evaluation, checkpoints."""
    settings: dict[str, dict[str, Any]] = {
        "algorithm": {"kl": {"placement": "Loss", "coefficient": 0.01}},
        "data": {"validation": [str(assets / "validation.jsonl")]},
        "reward": {"functions": [{"type": "Python", "path": str(assets / "reward.py")}]},
        "training": {
            "total_steps": TOTAL_STEPS,
            "mini_batch_prompts": 2,
            "learning_rate": 3e-3,
            "schedule": "Linear",
        },
        "evaluation": {"every_steps": 2, "temperature": 1.0},
        "checkpoint": {"every_steps": 1, "keep_last": 2},
        "tracking": {"sample_every_steps": 1},
    }
    for name, values in sections.items():
        settings[name] = settings.get(name, {}) | values
    job = build_job(
        run_directory=str(run),
        model=str(assets / "model"),
        train=str(assets / "train.jsonl"),
        dtype=dtype,
        compile=compile,
        spec={"warm_start": {"supervised": {"data": [str(assets / "warm.jsonl")], "steps": 3, "rows_per_step": 8}}},
        **settings,
    )
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.parent / f"{run.name}.json"
    path.write_text(job.model_dump_json(exclude_none=True))
    return dict(os.environ) | {"RLJOB_CONFIG": str(path)}


SHARED_RAY = """
import sys
import ray

for attempt in range(5):  # Ray gives its own processes 30 s to start, which a busy machine can miss
    try:
        context = ray.init(
            address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False
        )
        break
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def shared_ray(directory: Path) -> Iterator[tuple[dict[str, str], int]]:
    """A Ray that outlives the runs, as in a pod: their environment, and the process that all its actors descend from.

    Runs on it save the start of Ray.
    """
    log = directory / "ray.log"
    authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # as the operator sets them
    environment = dict(os.environ) | authentication | {"RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", SHARED_RAY],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, log.read_text()[-3000:]
        yield authentication | {"RAY_ADDRESS": address}, process.pid
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def start(environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The driver, its output going to `log`."""
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "rljob_trainer"], env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen[bytes], log: Path, expected: int) -> Result:
    """The result line of a run that must end with `expected`."""
    code = process.wait(timeout=RUN_SECONDS)
    text = log.read_text()
    assert code == expected, text[-6000:]
    assert text.rstrip().splitlines()[-1].startswith('{"rljobResult":')
    result = find_result(text)
    assert result is not None
    assert result.verdict.exit_code == expected
    return result


def wait_for_line(process: subprocess.Popen[bytes], log: Path, marker: str) -> None:
    """Until the run printed `marker`."""
    deadline = time.monotonic() + RUN_SECONDS
    while marker not in log.read_text():
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.02)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines without what depends on the clock."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMED_KEYS}
        for line in path.read_text().splitlines()
    ]


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Parameters of a Hugging Face directory."""
    return dict(load_causal_lm(str(directory)).named_parameters())


def find_processes(ancestor: int, *names: str) -> list[int]:
    """Descendants of `ancestor` whose command line begins with one of `names`, oldest first."""
    found: list[tuple[int, int]] = []
    for pid, started in list_descendants(ancestor):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if command.startswith(names):
            found.append((started, pid))
    return [pid for _, pid in sorted(found)]
