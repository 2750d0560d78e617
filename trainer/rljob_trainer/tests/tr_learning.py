"""Training the quickstart's task with another algorithm, by whole runs of `python -m rljob_trainer`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tr_run import finish, start

from rljob_api.catalogue import DEFAULT_CATALOGUE
from rljob_api.resolve import resolve_job
from rljob_api.targets import Target
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_api.v1alpha1.spec import RLJob
from rljob_api.yaml_documents import load_documents

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
GOAL = 0.8

WRONG_SIGN = '''
"""Found by every Python process of a run: turns the sign of the policy loss, where the trainer puts it together."""

import importlib.abc
import importlib.machinery
import sys

TARGET = "rljob_trainer.algorithms.policy_losses"


class Turned(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        right = module.compute_policy_loss

        def wrong(*arguments, **keywords):
            output = right(*arguments, **keywords)
            return module.PolicyLossOutput(-output.token_losses_N, output.clipped_N)

        module.compute_policy_loss = wrong


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Turned(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
'''


def make_warm_start(directory: Path) -> Path:
    """The quickstart's assets, and its policy after the supervised warm start: the start of every algorithm.

    The run's only RL step has a learning rate that changes nothing.
    """
    from rljob_trainer.quickstart.__main__ import write_assets

    write_assets(directory, seed=0)
    document = read_quickstart(directory)
    document["training"] |= {"totalSteps": 1, "promptsPerStep": 2, "learningRate": 1e-12}
    document["evaluation"] = {"everySteps": 0, "beforeTraining": False}
    run_job(document, directory / "warm", dict(os.environ))
    return directory


def read_quickstart(assets: Path) -> dict[str, Any]:
    """The example's spec with its files in `assets`."""
    (manifest,) = load_documents(QUICKSTART.read_text(encoding="utf-8"))
    text = json.dumps(manifest["spec"]).replace("runs/quickstart-assets", str(assets))
    document: dict[str, Any] = json.loads(text)
    return document


def run_job(document: dict[str, Any], run: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Runs the spec to its end; the rows of metrics.jsonl."""
    job = RLJob.model_validate({"metadata": {"name": "learning"}, "spec": document})
    resolved = resolve_job(
        job,
        uid="uid-1",
        catalogue=DEFAULT_CATALOGUE,
        target=Target.LOCAL,
        ip_family=IPFamily.AUTO,
        run_directory=str(run),
        server_port=0,
    )
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.with_suffix(".json")
    path.write_text(resolved.model_dump_json(exclude_none=True))
    log = run.with_suffix(".log")
    finish(start(environment | {"RLJOB_CONFIG": str(path)}, log), log, 0)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(
    assets: Path, run: Path, environment: dict[str, str], *, num_steps: int, algorithm: dict[str, Any], **sections: Any
) -> list[float]:
    """Held-out rewards before training, on the way, and at the end."""
    document = read_quickstart(assets)
    del document["warmStart"]
    document["model"]["source"] = str(assets / "warm" / "export" / "step-1")
    document["algorithm"] = algorithm
    document["training"] |= {"totalSteps": num_steps}
    document["evaluation"] = {"everySteps": num_steps}
    document["checkpoint"] = {"everySteps": 0, "exportAtEnd": False}
    # One rank: a second one on two cores would only cost its start. World sizes are compared elsewhere, exactly.
    document["cluster"]["ranksPerNode"] = 1
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    rows = run_job(document, run, environment)
    return [row["evaluation_reward_mean"] for row in rows if "evaluation_reward_mean" in row]


def write_wrong_sign(directory: Path) -> dict[str, str]:
    """The environment of a run whose policy loss has the wrong sign in every process."""
    (directory / "sitecustomize.py").write_text(WRONG_SIGN)
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
