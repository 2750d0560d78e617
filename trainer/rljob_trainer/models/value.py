"""The critic: a decoder with a scalar head that maps packs to values, on the same packed attention as the policy.

Shape legend: R response tokens of a pack, E hidden size.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.packed_attention import ATTENTION_NAME
from rljob_trainer.models.packed_batch import EXACT_LAYOUT, PackedBatch
from rljob_trainer.models.policy import find_blocks, load_config
from rljob_trainer.models.sequence_parallel import SequenceGroup, take_own_part

HEAD_NAME: Final = "score"


class ValueModel(nn.Module):
    """A token classifier with one label whose forward returns the value of the state before each response token."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier
        self.keep_gathered = False
        """See `models.sharding.iterate_micro_batches`."""
        self.pack_layout = EXACT_LAYOUT
        self.sequence_group: SequenceGroup | None = None
        """Ranks that share the tokens of a pack."""
        self.blocks = find_blocks(classifier)
        """Decoder blocks in order: the units of sharding and recomputation."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """values_R, float32: V(prompt and response tokens before t), read where the policy predicts token t."""
        classifier: Any = self.classifier
        own = take_own_part(batch, self.sequence_group)
        output = classifier.base_model(
            input_ids=own.input_ids_1n,
            position_ids=own.position_ids_1n,
            use_cache=False,
            packing=batch.packing,
            **own.attention_arguments,
        )
        hidden_RE = output.last_hidden_state.squeeze(0)[own.head_index_r]
        # Not through the classifier's dropout: values of the same state must be the same in every pass. In float32:
        # bfloat16 would round values to 1/256 of their size.
        head: nn.Linear = classifier.score
        # Not `linear(...).squeeze()`: FSDP2's hook for the backward pass does not survive changes of a view.
        values_R = hidden_RE.float() @ head.weight[0].float()
        return own.join(values_R if head.bias is None else values_R + head.bias.float())

    def copy_backbone(self, policy: nn.Module) -> None:
        """Start from the policy's weights as they are now, without adapters (both sharded alike, or both whole).

        Raises:
            ConfigurationError: the two have other parameters.
        """
        policy_any: Any = policy
        classifier: Any = self.classifier
        origins = {
            name.replace("base_layer.", ""): parameter
            for name, parameter in policy_any.causal_lm.base_model.named_parameters()
            if ".lora_" not in name
        }
        targets = dict(classifier.base_model.named_parameters())
        if set(origins) != set(targets):
            names = sorted(set(origins) ^ set(targets))
            raise ConfigurationError(
                f"spec.critic.source: the critic's decoder differs from the policy's in {names[:3]}; use the same model"
            )
        with torch.no_grad():
            for name, target in targets.items():
                _get_local(target).copy_(_get_local(origins[name]))


def load_value_config(source: str, revision: str | None, *, field: str) -> Any:
    """The config of a critic.

    Raises:
        ConfigurationError: not a decoder, or more than one label.
    """
    config = load_config(source, revision, field=field)
    if is_classifier(config) and config.num_labels != 1:
        raise ConfigurationError(
            f"{field}: {source!r} has {config.num_labels} labels; a value is one number: use a model with one label, "
            "or a causal LM"
        )
    config.num_labels = 1
    return config


def load_value_model(source: str, revision: str | None = None, *, field: str = "spec.critic.source") -> ValueModel:
    """The critic on the CPU with float32 weights, in eval mode.

    `source` is a causal LM (the head is new) or a classifier with one label, a reward model for example (its head is
    kept). A new head is zero: all first values are 0, so the first advantages are the returns and carry no noise of a
    random head; it also makes every rank start alike.

    Raises:
        ConfigurationError: not a decoder, more than one label, or weights that do not fit the config.
    """
    config = load_value_config(source, revision, field=field)
    try:
        model, report = AutoModelForTokenClassification.from_pretrained(
            source,
            revision=revision,
            config=config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{field}: weights of {source!r} cannot be loaded as a critic: {error}") from error
    head = getattr(model, HEAD_NAME, None)
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(
            f"{field}: {source!r} ({type(model).__name__}) has no linear head {HEAD_NAME!r}; use a decoder such as "
            "Qwen2, Qwen3 or Llama"
        )
    head_names = {f"{HEAD_NAME}.weight", f"{HEAD_NAME}.bias"}
    missing = set(report["missing_keys"])
    if missing - head_names:
        # transformers would initialise them at random and only warn.
        raise ConfigurationError(
            f"{field}: weights of {source!r} lack {len(missing - head_names)} tensors, for example "
            f"{sorted(missing - head_names)[0]!r}; the checkpoint does not belong to this config.json"
        )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if f"{HEAD_NAME}.{name}" in missing:
                parameter.zero_()
    return ValueModel(model.eval())


def is_classifier(config: Any) -> bool:
    """Whether a config says that the weights come with a classification head."""
    return any("Classification" in name for name in getattr(config, "architectures", None) or ())


def _get_local(parameter: Any) -> Tensor:
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local
