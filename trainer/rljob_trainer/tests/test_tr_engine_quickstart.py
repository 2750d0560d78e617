"""The quickstart with another engine by changing one field: a whole `rljob run`, in that engine's environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_environment import needs

REPOSITORY = Path(__file__).resolve().parents[3]
NUM_STEPS = 3
RUN_SECONDS = 900.0


class QuickstartRun:
    """Few steps are enough: that it learns is the learning test's matter."""

    engine: str

    def test_the_quickstart_runs(self, tmp_path: Path) -> None:
        assets, run = tmp_path / "assets", tmp_path / "run"
        subprocess.run([sys.executable, "-m", "rljob_trainer.quickstart", str(assets)], check=True, timeout=300)
        fields: dict[str, object] = {
            "rollout.engine": self.engine,
            "model.source": assets / "model",
            "data.train": f"[{assets / 'train.jsonl'}]",
            "data.validation": f"[{assets / 'validation.jsonl'}]",
            "warmStart.supervised.data": f"[{assets / 'warmstart.jsonl'}]",
            "warmStart.supervised.steps": 2,
            "training.totalSteps": NUM_STEPS,
            "training.promptsPerStep": 16,
            "evaluation.everySteps": NUM_STEPS,
            "evaluation.maxPrompts": 16,
            "rollout.overSample": 1.25,
        }
        if "RLJOB_TEST_RANKS" in os.environ:
            # Each rank of the quickstart brings an engine of several processes: one is enough for two cores.
            fields["cluster.ranksPerNode"] = os.environ["RLJOB_TEST_RANKS"]
        command = [str(Path(sys.executable).with_name("rljob")), "run", str(REPOSITORY / "examples/quickstart.yaml")]
        for path, value in fields.items():
            command += ["--set", f"{path}={value}"]
        result = subprocess.run(
            [*command, "--run-directory", str(run)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert result.returncode == 0, result.stdout[-6000:]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "reward_mean" in row]
        assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
        for row in steps:
            # The engine's log-probabilities are the trainer's, after every hand-over.
            assert abs(row["rollout_kl_mean"]) < 1e-6
            assert row["num_samples"] == 16 * 8
            assert row["num_aborted_groups"] == 4
            assert row["response_tokens_mean"] > 0
        assert [row["step"] for row in rows if "evaluation_reward_mean" in row] == [0, NUM_STEPS]
        assert (run / "export" / f"step-{NUM_STEPS}" / "model.safetensors").stat().st_size > 0
        assert f'"weightVersion":{NUM_STEPS + 1}' in result.stdout.replace(" ", "")


@pytest.mark.learning
class TestNative(QuickstartRun):
    engine = "Native"


class TestVLLM(QuickstartRun):
    pytestmark = needs("vllm")
    engine = "VLLM"


class TestSGLang(QuickstartRun):
    pytestmark = needs("sglang")
    engine = "SGLang"
