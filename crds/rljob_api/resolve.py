"""Fill every derived default: what `rljob render` shows and job.json carries.

Static defaults stand in the types (and so in the CRD). Here are those that depend on other fields, the image catalogue
or the place the job runs. Nothing the user set is changed.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from rljob_api.catalogue import Catalogue, CatalogueError
from rljob_api.contract import Layout, Paths, ResolvedJob, Server
from rljob_api.names import STORAGE_MOUNT_PATH, TRAINER_PORT
from rljob_api.presets import compute_max_staleness_steps, resolve_algorithm
from rljob_api.quantity import GIBIBYTE, format_bytes, parse_quantity
from rljob_api.targets import Target
from rljob_api.v1alpha1.algorithm import AdvantageEstimator, KLPlacement
from rljob_api.v1alpha1.cluster import Cluster, ContainerResources, IPFamily
from rljob_api.v1alpha1.data import Reward, RewardFunction, RewardType
from rljob_api.v1alpha1.model import Critic, Model, Reference
from rljob_api.v1alpha1.rollout import Engine, Placement, Training
from rljob_api.v1alpha1.spec import RLJob, RLJobSpec

DEFAULT_MICRO_BATCH_TOKENS: Final = 8192
HEAD_RESOURCES: Final = ContainerResources(cpu="2", memory="8Gi", ephemeral_storage="10Gi")
CPUS_PER_GPU: Final = 12
MEMORY_GIB_PER_GPU: Final = 128
CPUS_PER_CPU_RANK: Final = 2
MEMORY_GIB_PER_CPU_RANK: Final = 8
GPU_WORKER_EPHEMERAL_STORAGE: Final = "50Gi"
CPU_WORKER_EPHEMERAL_STORAGE: Final = "10Gi"
SHARED_MEMORY_SHARE: Final = Fraction(1, 4)
MAX_SHARED_MEMORY_BYTES: Final = 64 * GIBIBYTE


def compute_ranks_per_node(cluster: Cluster) -> int:
    """`ranksPerNode`, by default one per GPU; 0 when neither is given (refused by the rules)."""
    return cluster.gpus_per_node if cluster.ranks_per_node is None else cluster.ranks_per_node


def compute_world_size(cluster: Cluster) -> int:
    """Trainer ranks of the job. The head pod has no GPU and never counts."""
    return cluster.nodes * compute_ranks_per_node(cluster)


def compute_engine_gpus_per_node(spec: RLJobSpec) -> int:
    """GPUs of a worker pod that only engines use: with `rollout.placement: Separate`, those without a trainer rank."""
    if spec.rollout.placement is not Placement.SEPARATE or spec.cluster.gpus_per_node == 0:
        return 0
    return max(0, spec.cluster.gpus_per_node - compute_ranks_per_node(spec.cluster))


def compute_longest_sequence_tokens(spec: RLJobSpec) -> int:
    """The longest prompt plus the longest response, in tokens."""
    return spec.data.max_prompt_tokens + spec.rollout.max_response_tokens


def count_drawn_prompts(spec: RLJobSpec) -> int:
    """Prompts that a step starts: `promptsPerStep`, and with `overSample` above 1 those whose slowest are aborted."""
    # The product of two decimals such as 1.1 x 10 is a little above 11.
    return math.ceil(spec.training.prompts_per_step * spec.rollout.over_sample - 1e-9)


def compute_layout(spec: RLJobSpec) -> Layout:
    """Ranks and engines of a spec.

    Raises:
        ValueError: there are no ranks, no GPUs are left for separate engines, or `tensorParallelSize` does not divide
            what the engines have (`check_job` says it better).
    """
    world_size = compute_world_size(spec.cluster)
    tensor_parallel_size = spec.rollout.tensor_parallel_size
    engine_gpus_per_node = compute_engine_gpus_per_node(spec)
    if world_size == 0:
        raise ValueError("spec.cluster.ranksPerNode: required when gpusPerNode is 0; for example 2")
    if spec.rollout.placement is Placement.SEPARATE and spec.cluster.gpus_per_node and not engine_gpus_per_node:
        raise ValueError(
            f"spec.cluster.ranksPerNode: must be less than gpusPerNode ({spec.cluster.gpus_per_node}) with placement "
            "Separate, the rest is for engines"
        )
    num_slots = spec.cluster.nodes * engine_gpus_per_node or world_size
    if num_slots % tensor_parallel_size:
        raise ValueError(
            f"spec.rollout.tensorParallelSize: {tensor_parallel_size} does not divide the {num_slots} "
            f"{'GPUs of the engines' if engine_gpus_per_node else 'ranks of the job'}"
        )
    return Layout(
        num_nodes=spec.cluster.nodes,
        ranks_per_node=compute_ranks_per_node(spec.cluster),
        gpus_per_node=spec.cluster.gpus_per_node,
        world_size=world_size,
        engine_gpus_per_node=engine_gpus_per_node,
        tensor_parallel_size=tensor_parallel_size,
        num_engines=num_slots // tensor_parallel_size,
    )


def resolve_spec(spec: RLJobSpec, catalogue: Catalogue, target: Target) -> RLJobSpec:
    """The spec with every derived default filled. Idempotent.

    Raises:
        CatalogueError: no image for the engine and version asked for.
    """
    algorithm = resolve_algorithm(spec.algorithm, spec.rollout)
    uses_critic = algorithm.advantage_estimator is AdvantageEstimator.GAE
    uses_reference = algorithm.kl.placement is not KLPlacement.NONE
    rollout = spec.rollout.model_copy(update={"max_staleness_steps": compute_max_staleness_steps(spec.rollout)})
    cluster = spec.cluster.model_copy(update={"ranks_per_node": compute_ranks_per_node(spec.cluster) or None})
    if target is Target.KUBERNETES:
        cluster, engine_version = _resolve_images(cluster, rollout.engine, rollout.engine_version, catalogue)
        rollout = rollout.model_copy(update={"engine_version": engine_version})
        cluster = resolve_resources(cluster)
    return spec.model_copy(
        update={
            "algorithm": algorithm,
            "model": _resolve_model(spec.model),
            "critic": _resolve_critic(spec.critic or Critic(), spec) if uses_critic else spec.critic,
            "reference": _resolve_reference(spec) if uses_reference else spec.reference,
            "data": spec.data.model_copy(
                update={
                    "shuffle_seed": spec.training.seed if spec.data.shuffle_seed is None else spec.data.shuffle_seed
                }
            ),
            "reward": _resolve_reward(spec.reward),
            "rollout": rollout,
            "training": _resolve_training(spec.training, compute_longest_sequence_tokens(spec)),
            "cluster": cluster,
        }
    )


def resolve_job(
    job: RLJob,
    *,
    uid: str,
    catalogue: Catalogue,
    target: Target,
    ip_family: IPFamily,
    run_directory: str | None = None,
    attempt: int = 1,
    resume_floor_step: int = 0,
    server_port: int = TRAINER_PORT,
) -> ResolvedJob:
    """job.json of a checked job.

    Args:
        job: parsed and checked job.
        uid: UID of the RLJob object; a local run passes a stable one of its own.
        catalogue: images and versions.
        target: cluster or local run.
        ip_family: family of the job's traffic (Auto only for a local run).
        run_directory: where checkpoints go; default `/var/lib/rljob/[storage.path/]<namespace>/<name>`, for a local
            run `storage.path` or `runs/<name>`.
        attempt: number of the attempt, from 1.
        resume_floor_step: resume no earlier than this checkpoint step.
        server_port: port of the progress server; 0 takes a free one.

    Raises:
        CatalogueError: no image for the engine and version asked for.
        ValueError: sizes that do not fit (see `compute_layout`), or a job without a name.
    """
    name = job.metadata.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("metadata.name: required; for example gsm8k-grpo")
    if target is Target.KUBERNETES and ip_family is IPFamily.AUTO:
        raise ValueError("ip_family: Auto must be decided by the caller before a cluster is rendered: IPv4 or IPv6")
    namespace = str(job.metadata.get("namespace") or "default") if target is Target.KUBERNETES else "local"
    spec = resolve_spec(job.spec, catalogue, target)
    return ResolvedJob(
        name=name,
        namespace=namespace,
        uid=uid,
        attempt=attempt,
        resume_floor_step=resume_floor_step,
        spec=spec,
        layout=compute_layout(spec),
        engine=spec.rollout.engine,
        engine_version=None if spec.rollout.engine is Engine.NATIVE else spec.rollout.engine_version,
        ip_family=ip_family,
        paths=Paths(run_directory=run_directory or _default_run_directory(spec, namespace, name, target)),
        server=Server(port=server_port),
    )


def _default_run_directory(spec: RLJobSpec, namespace: str, name: str, target: Target) -> str:
    path = spec.checkpoint.storage.path
    if target is Target.LOCAL:
        return path or f"runs/{name}"
    return "/".join([STORAGE_MOUNT_PATH, *([path.strip("/")] if path else []), namespace, name])


def _resolve_images(
    cluster: Cluster, engine: Engine, engine_version: str | None, catalogue: Catalogue
) -> tuple[Cluster, str | None]:
    """Image, Ray version and engine version. An own image of unknown content takes the versions of the catalogue."""
    if cluster.image is not None and cluster.ray_version is not None and (engine_version or engine is Engine.NATIVE):
        return cluster, engine_version
    try:
        entry = catalogue.find(engine, engine_version)
    except CatalogueError:
        if cluster.image is None:
            raise
        entry = catalogue.find(engine)
    update = {"image": cluster.image or entry.image, "ray_version": cluster.ray_version or entry.ray_version}
    return cluster.model_copy(update=update), engine_version or entry.engine_version


def resolve_resources(cluster: Cluster) -> Cluster:
    """CPU, memory, disk and /dev/shm of head and workers, by the number of GPUs (or of ranks, on CPUs)."""
    num_gpus, num_ranks = cluster.gpus_per_node, compute_ranks_per_node(cluster)
    default_worker = (
        ContainerResources(
            cpu=str(CPUS_PER_GPU * num_gpus),
            memory=f"{MEMORY_GIB_PER_GPU * num_gpus}Gi",
            ephemeral_storage=GPU_WORKER_EPHEMERAL_STORAGE,
        )
        if num_gpus
        else ContainerResources(
            cpu=str(CPUS_PER_CPU_RANK * num_ranks),
            memory=f"{MEMORY_GIB_PER_CPU_RANK * num_ranks}Gi",
            ephemeral_storage=CPU_WORKER_EPHEMERAL_STORAGE,
        )
    )
    worker = _merge_resources(cluster.worker_resources, default_worker)
    return cluster.model_copy(
        update={
            "head_resources": _merge_resources(cluster.head_resources, HEAD_RESOURCES),
            "worker_resources": worker,
            "shared_memory": cluster.shared_memory or compute_shared_memory(worker.memory or "0"),
        }
    )


def compute_shared_memory(memory: str) -> str:
    """Default size of /dev/shm for a memory limit: a quarter of it in whole MiB, at most 64Gi."""
    share = min(parse_quantity(memory) * SHARED_MEMORY_SHARE, Fraction(MAX_SHARED_MEMORY_BYTES))
    mebibyte = 1024**2
    return format_bytes(max(1, int(share) // mebibyte) * mebibyte)


def _merge_resources(given: ContainerResources, default: ContainerResources) -> ContainerResources:
    return default.model_copy(update=given.model_dump(by_alias=False, exclude_none=True))


def _resolve_model(model: Model) -> Model:
    if model.lora is None or model.lora.alpha is not None:
        return model
    return model.model_copy(update={"lora": model.lora.model_copy(update={"alpha": float(2 * model.lora.rank)})})


def _resolve_critic(critic: Critic, spec: RLJobSpec) -> Critic:
    return critic.model_copy(
        update={
            "source": critic.source or spec.model.source,
            "epochs_per_step": critic.epochs_per_step or spec.training.epochs_per_step,
        }
    )


def _resolve_reference(spec: RLJobSpec) -> Reference:
    reference = spec.reference or Reference()
    return reference.model_copy(update={"source": reference.source or spec.model.source})


def _resolve_reward(reward: Reward) -> Reward:
    """Metric names: the type in lower case, numbered where several functions share it."""
    taken = {function.name for function in reward.functions if function.name}
    functions: list[RewardFunction] = []
    for function in reward.functions:
        update: dict[str, str] = {}
        if function.name is None:
            base = function.type.value.lower()
            number, name = 1, base
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            taken.add(name)
            update["name"] = name
        if function.type is RewardType.PYTHON and function.function is None:
            update["function"] = "score"
        functions.append(function.model_copy(update=update))
    return reward.model_copy(update={"functions": functions})


def _resolve_training(training: Training, longest_sequence_tokens: int) -> Training:
    update: dict[str, int] = {}
    if training.mini_batch_prompts is None:
        update["mini_batch_prompts"] = training.prompts_per_step
    if training.micro_batch_tokens is None and training.micro_batch_sequences is None:
        update["micro_batch_tokens"] = max(DEFAULT_MICRO_BATCH_TOKENS, longest_sequence_tokens)
    return training.model_copy(update=update)
