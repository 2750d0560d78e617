"""`spec.cluster`, `spec.network`, `spec.trainer`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rljob_api.v1alpha1.base import ApiModel, Path, Quantity, Seconds, ShortText, StrEnum, list_map

DnsLabel = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", examples=["data"])
]


class EnvVar(ApiModel):
    """One environment variable (values are strings: quote numbers)."""

    name: Annotated[
        str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", examples=["HF_HOME"])
    ]
    """Name."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Value."""
    value_from: dict[str, Any] | None = None
    """Source as in a Pod (secretKeyRef, configMapKeyRef, fieldRef, resourceFieldRef)."""


class EmptyDir(ApiModel):
    """A scratch volume."""

    medium: Annotated[str, Field(pattern=r"^(Memory)?$", max_length=8, examples=["Memory"])] | None = None
    """Memory for tmpfs (counts against the container's memory)."""
    size_limit: Quantity | None = None
    """Upper bound; required for Memory."""


class Volume(ApiModel):
    """A volume mounted into head and worker pods. Exactly one source."""

    name: DnsLabel
    """Name of the volume."""
    mount_path: Annotated[str, Field(pattern=r"^/", max_length=1024, examples=["/data"])]
    """Where it is mounted."""
    sub_path: Path | None = None
    """Path inside the volume."""
    read_only: bool = False
    """Mount read-only."""
    claim_name: ShortText | None = None
    """Source: PersistentVolumeClaim."""
    host_path: Annotated[str, Field(pattern=r"^/", max_length=1024, examples=["/mnt/data"])] | None = None
    """Source: directory of the node."""
    config_map_name: ShortText | None = None
    """Source: ConfigMap."""
    secret_name: ShortText | None = None
    """Source: Secret."""
    empty_dir: EmptyDir | None = None
    """Source: scratch."""


class ContainerResources(ApiModel):
    """CPU, memory and ephemeral storage of one pod; requests equal limits."""

    cpu: Quantity | None = None
    """CPU cores."""
    memory: Quantity | None = None
    """Memory, shared memory included."""
    ephemeral_storage: Quantity | None = None
    """Local disk."""


class ImagePullPolicy(StrEnum):
    """When images are pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class GangScheduler(StrEnum):
    """Gang scheduler of the pods."""

    NONE = "None"
    VOLCANO = "Volcano"
    KAI = "KAI"
    YUNIKORN = "YuniKorn"


class Cluster(ApiModel):
    """The pods: one head without GPU that runs the driver, and `nodes` workers."""

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Worker pods."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 8
    """GPUs of a worker pod; 0 runs on CPUs (then `ranksPerNode` is needed)."""
    ranks_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """Trainer ranks of a worker pod; default gpusPerNode. With `rollout.placement: Separate` the other GPUs are the
    engines', so that it is required and must be less than gpusPerNode."""
    gpu_resource_name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-zA-Z0-9._-]+$", max_length=128)] = (
        "nvidia.com/gpu"
    )
    """Extended resource of the GPUs."""
    image: (
        Annotated[str, Field(min_length=1, max_length=1024, examples=["registry.example.com/rl/trainer:1.0"])] | None
    ) = None
    """Image of head and workers; default: the image catalogue's for the engine."""
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When the image is pulled."""
    image_pull_secrets: Annotated[list[ShortText], Field(max_length=16)] = []
    """Names of pull secrets."""
    service_account_name: ShortText | None = None
    """Service account of the pods; no token is mounted unless the pod template asks for it."""
    volumes: Annotated[list[Volume], Field(max_length=64, json_schema_extra=list_map("name"))] = []
    """Data, models, reward code."""
    env: Annotated[list[EnvVar], Field(max_length=256, json_schema_extra=list_map("name"))] = []
    """Environment of head and workers; wins over the operator's defaults, except where that would break the job
    (refused)."""
    env_from: Annotated[list[dict[str, Any]], Field(max_length=64)] = []
    """envFrom entries as in a Pod."""
    ray_version: (
        Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=16, examples=["2.60.0"])] | None
    ) = None
    """Ray version of the image; default: the image catalogue's."""
    head_resources: ContainerResources = ContainerResources()
    """Resources of the head pod; default 2 CPU, 8Gi."""
    worker_resources: ContainerResources = ContainerResources()
    """Resources of a worker pod; default by gpusPerNode (12 CPU and 128Gi per GPU)."""
    shared_memory: Quantity | None = None
    """/dev/shm of a worker; default: a quarter of the memory limit, at most 64Gi."""
    termination_grace_period_seconds: Seconds = 300
    """Time for a checkpoint when a pod is evicted."""
    pod_template: dict[str, Any] = {}
    """Merge patch (metadata, spec) over the rendered head and worker pod templates; lists of named items merge by
    name, null removes a key. What is the operator's (labels, environment, job.json, storage) is put back, with a
    warning."""
    head_pod_template: dict[str, Any] = {}
    """Merge patch for the head pod only, after podTemplate."""
    worker_pod_template: dict[str, Any] = {}
    """Merge patch for worker pods only, after podTemplate."""
    queue_name: ShortText | None = None
    """Kueue LocalQueue that admits the cluster."""
    gang_scheduler: GangScheduler = GangScheduler.NONE
    """Gang scheduler."""


class IPFamily(StrEnum):
    """Address family of the job's traffic."""

    AUTO = "Auto"
    IPV4 = "IPv4"
    IPV6 = "IPv6"


class Fabric(StrEnum):
    """Interconnect between nodes."""

    AUTO = "Auto"
    TCP = "TCP"
    ROCE = "RoCE"
    INFINIBAND = "InfiniBand"
    EFA = "EFA"


class Network(ApiModel):
    """Addresses and interconnect."""

    ip_family: IPFamily = IPFamily.AUTO
    """Auto: the family of the cluster's pod network."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=15, examples=["eth0"])] | None = None
    """Network interface for gloo and NCCL; default: found in the pod from the route to the head."""
    fabric: Fabric = Fabric.AUTO
    """Interconnect; Auto leaves the choice to NCCL."""


class Trainer(ApiModel):
    """Escape hatch: run another trainer (verl, OpenRLHF, ...) in the same cluster, with fewer features."""

    command: Annotated[
        list[Annotated[str, Field(max_length=8192)]],
        Field(min_length=1, max_length=256, examples=[["python", "train.py"]]),
    ]
    """Command of the Ray job."""
    env: Annotated[list[EnvVar], Field(max_length=128, json_schema_extra=list_map("name"))] = []
    """Environment of the command."""
