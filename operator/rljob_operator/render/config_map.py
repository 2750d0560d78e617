"""ConfigMap with job.json (and the preStop hook), mounted at /etc/rljob."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding
from rljob_operator.render.lifecycle import read_pre_stop_script
from rljob_operator.render.names import JOB_CONFIG_KEY, PRE_STOP_KEY, build_labels, compute_config_map_name
from rljob_operator.render.types import OwnerRef, make_error

MAX_JOB_CONFIG_BYTES: Final = 900_000
"""A ConfigMap holds 1 MiB in all."""


def build_config_map(resolved: ResolvedJob, owner: OwnerRef, cluster_generation: int) -> dict[str, Any]:
    """Immutable in effect: a retry on the same cluster takes what changes from its submission's environment."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": compute_config_map_name(resolved.name, cluster_generation),
            "namespace": resolved.namespace,
            "labels": build_labels(resolved.name, resolved.uid, cluster_generation),
            "ownerReferences": [owner.to_dict()],
        },
        "data": {JOB_CONFIG_KEY: format_job_config(resolved), PRE_STOP_KEY: read_pre_stop_script()},
    }


def format_job_config(resolved: ResolvedJob) -> str:
    """job.json. Nulls stay: an engine argument may be null on purpose."""
    return resolved.model_dump_json(indent=2) + "\n"


def compute_spec_hash(resolved: ResolvedJob) -> str:
    """Hash of what a cluster was rendered from; attempt and resume floor change without a new cluster."""
    comparable = resolved.model_copy(update={"attempt": 1, "resume_floor_step": 0})
    return hashlib.sha256(comparable.model_dump_json().encode()).hexdigest()[:16]


def check_job_config(resolved: ResolvedJob) -> list[Finding]:
    """Refuses a job.json that no ConfigMap can hold, before the API server does."""
    num_bytes = len(format_job_config(resolved).encode())
    if num_bytes <= MAX_JOB_CONFIG_BYTES:
        return []
    return [
        make_error(
            "InvalidValue",
            "spec",
            f"the resolved job has {num_bytes} bytes, at most {MAX_JOB_CONFIG_BYTES} fit into its ConfigMap; "
            "move large texts into ConfigMaps or files and mount them with cluster.volumes",
        )
    ]
