"""Files and processes for the CLI tests."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[3]
CLI = [sys.executable, "-m", "rljob_operator.cli.main"]

FAKE_TRAINER = """
import json, os, pathlib, signal, sys, time
job = json.loads(pathlib.Path(os.environ["RLJOB_CONFIG"]).read_text())
directory = pathlib.Path(job["paths"]["runDirectory"])
events = directory / "events.txt"
def record(text):
    with events.open("a") as stream:
        stream.write(text + "\\n")
mode = os.environ.get("FAKE_TRAINER_MODE", "exit:0")
(directory / "environment.json").write_text(json.dumps(dict(os.environ)))
if mode.startswith("exit:"):
    sys.exit(int(mode.removeprefix("exit:")))
def stop(number, frame):
    record(signal.Signals(number).name)
    if mode == "deaf":
        return
    time.sleep(0.3)
    record("checkpoint")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
record("ready")
while True:
    time.sleep(0.05)
"""


def make_job(**overrides):
    """A job that runs locally with files below `assets/`; sections are merged, None removes one."""
    document = {
        "apiVersion": "rljob.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": "assets/model", "dtype": "Float32"},
            "data": {"train": ["assets/train.jsonl"]},
            "reward": {"functions": [{"type": "GSM8K"}]},
            "rollout": {"engine": "Native", "samplesPerPrompt": 4, "maxResponseTokens": 8},
            "training": {"promptsPerStep": 4, "totalSteps": 2},
            "checkpoint": {"everySteps": 1},
            "evaluation": {"everySteps": 0, "beforeTraining": False},
            "cluster": {"nodes": 1, "gpusPerNode": 0, "ranksPerNode": 1},
        },
    }
    for section, fields in overrides.items():
        document["spec"][section] = {**document["spec"].get(section, {}), **fields}
    return document


def make_cluster_job(**overrides):
    """The same with the storage that pods need."""
    return make_job(**{"checkpoint": {"storage": {"claimName": "checkpoints"}}, **overrides})


def write_job(directory, document, name="job.yaml"):
    path = directory / name
    documents = document if isinstance(document, list) else [document]
    path.write_text(yaml.safe_dump_all(documents))
    return path


def write_assets(directory):
    """What the pre-flight checks look for: a model directory and a data file."""
    model = directory / "assets" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 2048}))
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text("{}")
    (directory / "assets" / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')


def write_fake_trainer(directory):
    """A `rljob_trainer` that records what it gets; returns the environment that puts it first."""
    package = directory / "fake" / "rljob_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(textwrap.dedent(FAKE_TRAINER))
    return {**os.environ, "PYTHONPATH": str(directory / "fake")}


def run_cli(*arguments, cwd, environment=None, stdin=None):
    return subprocess.run(
        [*CLI, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
