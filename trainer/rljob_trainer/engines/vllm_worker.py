"""Mixed into vLLM's workers (`worker_extension_cls`): takes over weight buckets, and shows the weights in use.

Runs in vLLM's worker processes, one per tensor-parallel rank; reached by `collective_rpc`, which carries plain bytes
only. Weights go through vLLM's layerwise reload (`vllm.model_executor.model_loader.reload`, the same in 0.24 to 0.33):
backends that repack weights, such as all linears on CPUs, break a plain `load_weights`.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from rljob_trainer.engines.vllm_payload import Payload
from rljob_trainer.sync.buckets import combine_checksums, compute_tensor_checksum
from rljob_trainer.sync.device_memory import DeviceMemory

FUSED: Final[dict[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class WorkerExtension:
    """Methods are prefixed: vLLM refuses an extension that shares a name with its worker."""

    # Attributes of vLLM's Worker, into which this class is mixed.
    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: torch.device
    rank: int

    def rljob_begin_update(self) -> None:
        """Make the model ready to load its weights again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._rljob_context():
            initialize_layerwise_reload(self.model_runner.model)

    def rljob_update(self, payloads: list[bytes]) -> None:
        """Load one bucket: `payloads` has one entry for all ranks, or one per tensor-parallel rank."""
        payload: Payload = pickle.loads(payloads[self.rank if len(payloads) > 1 else 0])
        bucket = payload.open(self.device.index or 0)
        tensors = bucket.tensors(self.device.index or 0)
        with self._rljob_context(), torch.no_grad():
            if isinstance(payload.memory, DeviceMemory):
                # Layerwise reload keeps tensors until their layer is complete, which may be a bucket later; by then
                # the sender has filled this memory with others.
                tensors = ((name, tensor.clone()) for name, tensor in tensors)
            self.model_runner.model.load_weights(tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rljob_end_update(self) -> None:
        """Finish layers that are not complete by themselves, and leave the loading state."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._rljob_context(), torch.no_grad():
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
            if self.device.type == "cpu":
                repack_tied_weights(self.model_runner.model)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rljob_checksum(self) -> int:
        """Over the weights as Hugging Face names and stores them; one tensor-parallel rank only."""
        with self._rljob_context(), torch.no_grad():
            return combine_checksums(
                compute_tensor_checksum(name, tensor) for name, tensor in self._rljob_iterate_weights()
            )

    def _rljob_context(self) -> ExitStack:
        """What vLLM's own weight transfer sets: 0.24 the device, 0.33 the config."""
        from vllm.config import set_current_vllm_config

        stack = ExitStack()
        stack.enter_context(set_current_vllm_config(self.vllm_config))
        stack.enter_context(torch.device(self.device))
        return stack

    def _rljob_iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        config = self.model_config.hf_text_config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        sizes = {"qkv_proj": [q_size, kv_size, kv_size], "gate_up_proj": [config.intermediate_size] * 2}
        vocabulary = {"embed_tokens", "lm_head"}
        for module_name, module in self.model_runner.model.named_modules():
            prefix, _, kind = module_name.rpartition(".")
            if kind == "lm_head" and config.tie_word_embeddings:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                tensor = read_weight(module) if name == "weight" else parameter.data
                tensor = tensor.to(self.model_config.dtype)  # some CPU kernels keep biases in float32
                if kind in vocabulary:
                    tensor = tensor[: config.vocab_size]
                if kind not in FUSED:
                    yield f"{module_name}.{name}", tensor
                    continue
                for part, split in zip(FUSED[kind], tensor.split(sizes[kind]), strict=True):
                    yield f"{prefix}.{part}.{name}", split


def repack_tied_weights(model: nn.Module) -> None:
    """A tied head shares its parameter with the embedding, but computes with a packed copy of its own, which layerwise
    reload does not renew (vLLM 0.32 on CPUs: logits of the old weights)."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        layer: Any = module
        weight = module._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), module) is not module and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def read_weight(module: nn.Module) -> Tensor:
    """(O, I) of a linear, or whatever another module keeps as `weight`.

    On CPUs vLLM repacks the weights of linears and drops the originals. Multiplying the identity by them is exact: each
    sum has one non-zero term.
    """
    layer: Any = module
    weight: Tensor = layer.weight.data
    if weight.numel() or not hasattr(layer, "quant_method"):
        return weight
    identity_II = torch.eye(layer.input_size_per_partition, dtype=layer.params_dtype, device=weight.device)
    return layer.quant_method.apply(layer, identity_II, bias=None).T.contiguous()
