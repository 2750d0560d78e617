"""Names both sides rely on: labels, annotations, environment variables, paths, ports, limits."""

from __future__ import annotations

from typing import Final

GROUP: Final = "rljob.io"
FIELD_MANAGER: Final = "rljob-operator"

# RayCluster names must stay within 53 characters (KubeRay) and we append `-<clusterGeneration>`; 40 leaves room for
# KubeRay's own suffixes in pod and Service names as well.
MAX_NAME_LENGTH: Final = 40
NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

LABEL_JOB: Final = "rljob.io/job"
"""On every child: name of the RLJob."""
LABEL_JOB_UID: Final = "rljob.io/job-uid"
"""On every child: UID of the RLJob."""
LABEL_CLUSTER_GENERATION: Final = "rljob.io/cluster-generation"
"""On the RayCluster, its pods and per-cluster objects: the number in `<name>-<clusterGeneration>`."""
LABEL_ROLE: Final = "rljob.io/role"
"""On pods: head or worker."""
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
ANNOTATION_SPEC_HASH: Final = "rljob.io/spec-hash"
"""On the RayCluster: hash of the resolved job it was rendered from."""

ENV_CONFIG: Final = "RLJOB_CONFIG"
"""Path of job.json."""
ENV_ATTEMPT: Final = "RLJOB_ATTEMPT"
"""Attempt number; wins over job.json, since an in-place retry reuses the mounted file."""
ENV_RESUME_FLOOR_STEP: Final = "RLJOB_RESUME_FLOOR_STEP"
"""The run must not resume below this checkpoint step; wins over job.json."""
ENV_POD_IP: Final = "POD_IP"
ENV_RAY_AUTH_MODE: Final = "RAY_AUTH_MODE"
ENV_RAY_AUTH_TOKEN: Final = "RAY_AUTH_TOKEN"

CONFIG_PATH: Final = "/etc/rljob/job.json"
STORAGE_MOUNT_PATH: Final = "/var/lib/rljob"
RESERVED_VOLUME_PREFIX: Final = "rljob-"
"""Volumes of this prefix in a pod are the operator's."""
TRAINER_PORT: Final = 8090
"""Progress, health and metrics of the driver, on the head pod."""
RAY_DASHBOARD_PORT: Final = 8265
RAY_GCS_PORT: Final = 6379

RESULT_KEY: Final = "rljobResult"
"""The driver's last line on stdout is `{"rljobResult": {...}}`."""
LATEST_FILE: Final = "latest"
OWNER_FILE: Final = "owner.json"
MANIFEST_FILE: Final = "manifest.json"
METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"


def compute_ray_cluster_name(job_name: str, cluster_generation: int) -> str:
    """`<rljob>-<clusterGeneration>`."""
    return f"{job_name}-{cluster_generation}"


def compute_submission_id(job_uid: str, attempt: int) -> str:
    """`<uid>-<attempt>`: a fixed id makes a repeated POST harmless."""
    return f"{job_uid}-{attempt}"


def compute_step_directory_name(step: int) -> str:
    """Directory of the checkpoint taken after `step`."""
    return f"step-{step}"
