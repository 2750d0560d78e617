"""Resolved jobs for the trainer's tests."""

from __future__ import annotations

from typing import Any

from rljob_api.catalogue import DEFAULT_CATALOGUE
from rljob_api.contract import ResolvedJob
from rljob_api.resolve import resolve_job
from rljob_api.targets import Target
from rljob_api.v1alpha1.cluster import IPFamily
from rljob_api.v1alpha1.spec import RLJob


def build_job(
    *,
    run_directory: str,
    model: str = "model",
    train: str = "train.jsonl",
    floor: int = 0,
    ranks: int = 2,
    dtype: str = "Float32",
    compile: str = "Auto",
    lora: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> ResolvedJob:
    """A GRPO job, on CPUs by default; `sections` update the sections of the spec, `spec` replaces whole ones."""
    document: dict[str, Any] = {
        "algorithm": {"type": "GRPO"},
        "model": {"source": model, "dtype": dtype, "compile": compile, "lora": lora},
        "data": {"train": [train]},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "rollout": {"engine": "Native", "samples_per_prompt": 4, "max_response_tokens": 5},
        "training": {"prompts_per_step": 4, "total_steps": 4, "micro_batch_tokens": 600},
        "evaluation": {},
        "checkpoint": {},
        "cluster": {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": ranks},
        "network": {},
        "tracking": {},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    job = RLJob.model_validate({"metadata": {"name": "tiny"}, "spec": document | (spec or {})})
    resolved = resolve_job(
        job,
        uid="uid-1",
        catalogue=DEFAULT_CATALOGUE,
        target=Target.LOCAL,
        ip_family=IPFamily.AUTO,
        run_directory=run_directory,
        server_port=0,
    )
    return resolved.model_copy(update={"resume_floor_step": floor})
