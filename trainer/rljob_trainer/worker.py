"""`TrainWorker`: one FSDP2 rank. Holds policy, optimizer and, where used, reference and critic; decides nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.model import LoRA
from rljob_trainer.checkpoint.export import export_policy
from rljob_trainer.checkpoint.records import FileRecord
from rljob_trainer.checkpoint.state import StatePart, StateWriter, collect_state, gather_full_weights, load_state
from rljob_trainer.critic import CriticRank
from rljob_trainer.distributed.location import ActorLocation, locate_this_actor
from rljob_trainer.distributed.network import choose_interface, is_loopback, set_interface
from rljob_trainer.distributed.process_group import Rendezvous, check_collectives, join_process_group, start_store
from rljob_trainer.errors import ConfigurationError, TrainerError
from rljob_trainer.memory_plan import GIB, MemoryPlan, build_memory_request, plan_memory, read_model_shape
from rljob_trainer.models.execution import decide_execution, prepare_model
from rljob_trainer.models.loading import load_sharded_policy, load_sharded_value_model
from rljob_trainer.models.log_probs import CHUNK_TOKENS
from rljob_trainer.models.lora import adapters_off, add_adapters, initialise_adapters, merge_state
from rljob_trainer.models.policy import TORCH_DTYPES, PolicyModel, load_config
from rljob_trainer.models.sequence_parallel import build_sequence_group
from rljob_trainer.models.value import ValueModel
from rljob_trainer.optimization import build_optimizer
from rljob_trainer.quiet import quiet_libraries
from rljob_trainer.rows import FloatArray, MiniBatch, TrainRow, UpdateMetrics, ValueMetrics
from rljob_trainer.stacks import format_stacks
from rljob_trainer.sync.buckets import (
    DEVICE_BUCKET_BYTES,
    HOST_BUCKET_BYTES,
    PEER_BUCKET_BYTES,
    Bucket,
    combine_checksums,
    compute_tensor_checksum,
)
from rljob_trainer.sync.device_memory import get_gpu_uuid
from rljob_trainer.sync.gather import gather_buckets, gather_tensors
from rljob_trainer.update import LossSettings, Ranks, apply_update, compute_row_log_probs


class TrainWorker:
    """One rank. All methods but `locate`, `start_store`, `count_progress`, `format_stacks` and `finish_save` are
    collective."""

    def __init__(self, job: ResolvedJob, num_threads: int) -> None:
        self._job = job
        self._use_gpu = job.layout.gpus_per_node > 0
        self._device = torch.device("cuda", 0) if self._use_gpu else torch.device("cpu")
        self._store: TCPStore | None = None
        self._progress = 0
        quiet_libraries()
        torch.set_num_threads(num_threads)

    def locate(self) -> ActorLocation:
        """Where this actor runs."""
        return locate_this_actor()

    def see_gpus(self, gpu_ids: Sequence[str]) -> None:
        """Make GPUs of engines visible behind this rank's own, for the weights that it writes there. Comes before
        anything that touches CUDA: a process sees what it saw first.

        Raises:
            TrainerError: they are not there.
        """
        visible = [*locate_this_actor().gpu_ids, *gpu_ids]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        try:
            uuids = {get_gpu_uuid(index) for index in range(len(visible))}
        except (AssertionError, RuntimeError) as error:
            raise TrainerError(f"GPUs {', '.join(visible)} should be visible to this rank, but {error}") from error
        if len(uuids) != len(visible):
            raise TrainerError(f"GPUs {', '.join(visible)} of this rank and of engines are only {len(uuids)} GPUs")

    def count_progress(self) -> int:
        """Finished micro-batches so far; answers while the rank works."""
        return self._progress

    def format_stacks(self) -> str:
        """Where this rank is; answers while it works."""
        return format_stacks()

    def start_store(self, timeout_seconds: float) -> Rendezvous:
        """Rank 0: open the store at this node's IP."""
        address = ray.util.get_node_ip_address()
        if is_loopback(address) and self._job.layout.num_nodes > 1:
            raise ConfigurationError(
                f"rank 0's node has the loopback address {address}, but ranks span {self._job.layout.num_nodes} "
                "nodes; start "
                "Ray with the pod IP (--node-ip-address)"
            )
        self._store, rendezvous = start_store(address, self._job.layout.world_size, timeout_seconds)
        return rendezvous

    def setup(self, rank: int, rendezvous: Rendezvous, loss: LossSettings, timeout_seconds: float) -> dict[str, Any]:
        """Join the process group, load, shard, build the optimizer. Returns facts for the log."""
        job, spec = self._job, self._job.spec
        self._rank, self._loss = rank, loss
        interface = choose_interface(
            os.environ, spec.network.interface, rendezvous.host, spans_nodes=job.layout.num_nodes > 1
        )
        set_interface(interface)
        if self._use_gpu:
            torch.cuda.set_device(self._device)
        join_process_group(
            rendezvous,
            rank=rank,
            world_size=job.layout.world_size,
            store=self._store,
            use_gpu=self._use_gpu,
            timeout_seconds=timeout_seconds,
            collective_timeout_seconds=spec.training.collective_timeout_seconds,
        )
        torch.manual_seed(spec.training.seed)
        self._mesh = init_device_mesh(self._device.type, (job.layout.world_size,))
        self._memory = self._plan_memory()
        self._execution = decide_execution(job, self._memory)
        self._parameter_device = torch.device("cpu") if self._execution.offload_parameters else self._device
        self._sequence_group = build_sequence_group(
            self._device.type, job.layout.world_size, spec.training.sequence_parallel_size
        )
        self._policy = self._build_policy(
            spec.model.source, spec.model.revision, "spec.model.source", lora=spec.model.lora
        )
        self._reference: PolicyModel | None = None
        self._critic: CriticRank | None = None
        self._optimizer = build_optimizer(self._policy, spec.training)
        self._writer = StateWriter(use_gpu=self._use_gpu)
        self._ranks = Ranks(job.layout.world_size, self._sum_over_ranks, self._max_over_ranks)
        num_parameters = sum(parameter.numel() for parameter in self._policy.parameters())
        return {
            "interface": interface,
            "num_parameters": num_parameters,
            "num_blocks": len(self._policy.blocks),
        }

    def _build_policy(self, source: str, revision: str | None, field: str, *, lora: LoRA | None = None) -> PolicyModel:
        def shard(policy: PolicyModel) -> None:
            if lora is not None:
                add_adapters(policy, lora)
            self._shard(policy)

        policy, why_whole = load_sharded_policy(
            source,
            revision,
            field=field,
            device=self._device,
            shard=shard,
            parameter_device=self._parameter_device,
        )
        if lora is not None:
            initialise_adapters(policy, self._job.spec.training.seed)
        self._note_loading(field, why_whole)
        return policy

    def _note_loading(self, field: str, why_whole: str | None) -> None:
        if why_whole is not None and self._rank == 0:
            print(f"{field}: every rank loads the whole model before cutting it: {why_whole}", flush=True)

    def _plan_memory(self) -> MemoryPlan | None:
        """Printed before anything is loaded; None on CPUs."""
        if not self._use_gpu:
            return None
        model = self._job.spec.model
        free, total = torch.cuda.mem_get_info()
        request = build_memory_request(
            self._job,
            read_model_shape(load_config(model.source, model.revision)),
            total,
            chunk_tokens=CHUNK_TOKENS,
            bucket_bytes=self._choose_bucket_bytes(),
        )
        plan = plan_memory(request)
        print(f"rank {self._rank}: {plan.describe()}; the device reports {free / GIB:.1f} GiB free", flush=True)
        if not plan.fits:
            print(
                f"rank {self._rank}: the plan does not fit; lower spec.training.microBatchTokens "
                f"({request.micro_batch_tokens}) or spec.rollout.memoryFraction ({request.memory_fraction}), or use "
                "more GPUs",
                flush=True,
            )
        return plan

    def _shard(self, module: PolicyModel | ValueModel) -> None:
        module.sequence_group = self._sequence_group
        prepare_model(module, self._mesh, self._job.spec.model.dtype, self._execution)

    def setup_reference(self) -> None:
        """The frozen reference: its own source, else a copy of the policy as it is now (after the warm start); with
        adapters, the policy without them, which needs no copy."""
        model, reference = self._job.spec.model, self._job.spec.reference
        source = model.source if reference is None or reference.source is None else reference.source
        is_copy = source == model.source
        if is_copy and model.lora is not None:
            return
        field = "spec.model.source" if is_copy else "spec.reference.source"
        self._reference = self._build_policy(source, model.revision if is_copy else None, field)
        self._reference.requires_grad_(False)
        if is_copy:
            with torch.no_grad():
                for target, origin in zip(self._reference.parameters(), self._policy.parameters(), strict=True):
                    local_target: Any = target
                    local_origin: Any = origin
                    local_target.to_local().copy_(local_origin.to_local())

    def setup_critic(self) -> None:
        """The critic: its own source, else the policy as it is now (after the warm start) with a new head."""
        model, critic = self._job.spec.model, self._job.spec.critic
        source = model.source if critic is None or critic.source is None else critic.source
        is_copy = source == model.source
        field = "spec.model.source" if is_copy else "spec.critic.source"
        value_model, why_whole = load_sharded_value_model(
            source,
            model.revision if is_copy else None,
            field=field,
            device=self._device,
            shard=self._shard,
            parameter_device=self._parameter_device,
        )
        self._note_loading(field, why_whole)
        self._critic = CriticRank(self._job, value_model, self._ranks, self._device, self._note_progress)
        if is_copy:
            self._critic.start_from_policy(self._policy)

    def compute_values(self, micro_batches: list[list[TrainRow]]) -> list[list[FloatArray]]:
        """Values per row under the critic."""
        assert self._critic is not None, "setup_critic comes first"
        values = self._critic.compute_values(micro_batches)
        check_collectives(self._device, self._rank)
        return values

    def update_critic(self, batch: MiniBatch) -> ValueMetrics:
        """One optimizer update of the critic."""
        assert self._critic is not None, "setup_critic comes first"
        metrics = self._critic.update(batch)
        check_collectives(self._device, self._rank)
        return metrics

    def reset_optimizer(self) -> None:
        """Forget the moments of the warm start."""
        self._optimizer = build_optimizer(self._policy, self._job.spec.training)

    def allocate_moments(self) -> None:
        """Those that do not exist yet, of 0 and before the first step."""
        collect_state(self._list_state_parts())

    def update(self, batch: MiniBatch) -> UpdateMetrics:
        """One optimizer update."""
        metrics = apply_update(
            self._policy,
            self._optimizer,
            batch,
            self._loss,
            gradient_clip=self._job.spec.training.gradient_clip,
            ranks=self._ranks,
            device=self._device,
            on_micro_batch=self._note_progress,
        )
        check_collectives(self._device, self._rank)
        return metrics

    def compute_log_probs(
        self, micro_batches: list[list[TrainRow]], *, reference: bool, with_sum_pi_squared: bool = False
    ) -> list[list[FloatArray]]:
        """Log-probabilities per row under the policy or the reference, with sums of squared probabilities on demand."""
        model = self._policy if self._reference is None or not reference else self._reference
        base_only = reference and self._reference is None
        assert not base_only or self._job.spec.model.lora is not None, "setup_reference comes first"
        with adapters_off(model) if base_only else nullcontext():
            return self._compute_log_probs(model, micro_batches, with_sum_pi_squared)

    def _compute_log_probs(
        self, model: PolicyModel, micro_batches: list[list[TrainRow]], with_sum_pi_squared: bool
    ) -> list[list[FloatArray]]:
        log_probs = compute_row_log_probs(
            model,
            micro_batches,
            temperature=self._loss.temperature,
            device=self._device,
            on_micro_batch=self._note_progress,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        check_collectives(self._device, self._rank)
        return log_probs

    def stream_weights(self, devices: Sequence[int], bucket_bytes: int | None = None) -> Iterator[Bucket]:
        """Buckets of the full policy in the engine's dtype, each once for every GPU in `devices` (indices of this
        process; on CPUs any one number stands for host memory). Without any, the rank only takes part in the gathers.
        """
        for bucket in gather_buckets(
            self._policy,
            TORCH_DTYPES[self._job.spec.model.dtype],
            publish=bool(devices),
            bucket_bytes=bucket_bytes or self._choose_bucket_bytes(),
            devices=devices,
        ):
            self._note_progress()
            yield bucket
        check_collectives(self._device, self._rank)

    def _choose_bucket_bytes(self) -> int:
        if not self._use_gpu:
            return HOST_BUCKET_BYTES
        return PEER_BUCKET_BYTES if self._job.layout.engine_gpus_per_node else DEVICE_BUCKET_BYTES

    def plans_turns(self) -> bool:
        """Whether engine and trainer do not fit on the GPU together."""
        return self._memory is not None and self._memory.offload_engine

    def release_cached_memory(self) -> None:
        """Once per phase change, never within one: giving memory back to the driver stalls the GPU."""
        if self._use_gpu:
            torch.cuda.empty_cache()

    def get_free_bytes(self) -> int:
        """Free memory of the GPU, as the driver reports it; 0 on CPUs."""
        return torch.cuda.mem_get_info()[0] if self._use_gpu else 0

    def compute_checksum(self) -> int:
        """Checksum of the full policy in the engine's dtype, as `EngineAdapter.checksum` computes it."""
        dtype = TORCH_DTYPES[self._job.spec.model.dtype]
        return combine_checksums(
            compute_tensor_checksum(name, tensor) for name, tensor in gather_tensors(self._policy, dtype)
        )

    def start_save(self, directory: str) -> None:
        """Snapshot the state and begin to write it into an existing directory; training goes on."""
        self._writer.start(Path(directory), self._list_state_parts())

    def finish_save(self) -> list[FileRecord]:
        """Wait for the files of this rank; runs beside the training, in a concurrency group of its own."""
        return self._writer.finish()

    def load_checkpoint(self, directory: str) -> None:
        """Load everything that is saved."""
        load_state(Path(directory), self._list_state_parts())

    def _list_state_parts(self) -> dict[str, StatePart]:
        """What a checkpoint holds."""
        parts = {"policy": StatePart(self._policy, self._optimizer, self._job.spec.model.lora is not None)}
        if self._reference is not None:
            parts["reference"] = StatePart(self._reference)
        if self._critic is not None:
            parts["critic"] = self._critic.state
        return parts

    def export(self, target: str) -> None:
        """Rank 0 writes the Hugging Face directory."""
        weights = gather_full_weights(self._policy)
        if self._rank == 0:
            weights = merge_state(self._policy, weights)
            model = self._job.spec.model
            export_policy(
                Path(target), weights, source=model.source, revision=model.revision, dtype=TORCH_DTYPES[model.dtype]
            )
        dist.barrier()

    def stop(self) -> None:
        """Leave the process group; a checkpoint that is still being written is dropped with the process."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _note_progress(self) -> None:
        self._progress += 1

    def _sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Over rows: each one is held by all ranks of a sequence group."""
        dist.all_reduce(values)
        return values.div_(self._job.spec.training.sequence_parallel_size)

    def _max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values
