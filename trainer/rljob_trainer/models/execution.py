"""How a model runs on the device at hand: packing, compilation, recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from rljob_api.contract import ResolvedJob
from rljob_api.v1alpha1.model import DType, Toggle
from rljob_trainer.memory_plan import MemoryPlan
from rljob_trainer.models.packed_batch import EXACT_LAYOUT, PackLayout
from rljob_trainer.models.policy import PolicyModel
from rljob_trainer.models.sharding import compile_model, shard_policy
from rljob_trainer.models.value import ValueModel


@dataclass(frozen=True)
class Execution:
    """Choices that change speed and memory, not results."""

    layout: PackLayout = EXACT_LAYOUT
    is_compiled: bool = False
    recompute_blocks: bool = False
    keep_gathered: bool = False
    keep_logits: bool = False
    offload_parameters: bool = False


def decide_execution(job: ResolvedJob, plan: MemoryPlan | None) -> Execution:
    """From the job and, on GPUs, the memory plan.

    Auto means: on GPUs compiled, and recomputed only where activations do not fit; on CPUs neither, since compiling
    costs more than small models gain and time is what runs out. Nor with Float32 on GPUs: attention then goes through
    the padded layout, which stays uncompiled and cuts each block in two.
    """
    model, training = job.spec.model, job.spec.training
    with_padded_layout = plan is None or model.dtype is DType.FLOAT32
    is_compiled = model.compile is Toggle.ALWAYS or (model.compile is Toggle.AUTO and not with_padded_layout)
    # What a rank of a sequence group gets of a pack has another shape every time.
    is_compiled = is_compiled and training.sequence_parallel_size == 1
    longest = job.spec.data.max_prompt_tokens + job.spec.rollout.max_response_tokens
    budget = training.micro_batch_tokens or (training.micro_batch_sequences or 1) * longest
    layout = PackLayout(
        budget_tokens=budget if is_compiled else None,
        max_length=longest if is_compiled else 0,
        with_padded_layout=with_padded_layout,
    )
    if plan is None:
        recompute = model.gradient_checkpointing is Toggle.ALWAYS
        return Execution(
            layout, is_compiled, recompute_blocks=recompute, offload_parameters=training.offload.parameters
        )
    return Execution(
        layout,
        is_compiled,
        plan.recompute_blocks,
        plan.keep_gathered,
        plan.keep_logits,
        training.offload.parameters,
    )


def prepare_model(model: PolicyModel | ValueModel, mesh: DeviceMesh, dtype: DType, execution: Execution) -> None:
    """Compile and shard in place."""
    model.pack_layout = execution.layout
    if isinstance(model, PolicyModel):
        model.head_options = replace(model.head_options, keep_logits=execution.keep_logits)
    if execution.is_compiled:
        compile_model(model)
    shard_policy(
        model,
        mesh,
        dtype,
        recompute_blocks=execution.recompute_blocks,
        keep_gathered=execution.keep_gathered,
        offload_parameters=execution.offload_parameters,
    )
