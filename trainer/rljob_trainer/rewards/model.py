"""`type: Model`: a sequence classifier with one label scores responses, on the GPUs of the ranks (or on CPUs).

Shape legend: B samples of a micro-batch, L longest of them in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.functions import FunctionPlan
from rljob_trainer.rewards.outcome import FailureKind, Score, ScoreFailure, ScoreRequest

MICRO_BATCH_TOKENS: Final = 16_384
"""Padded tokens of one forward pass."""

ModelScore = Score | ScoreFailure


class SequenceScorer:
    """The classifier itself: a list of samples in, a list of scores out."""

    def __init__(self, plan: FunctionPlan, device: str) -> None:
        """`device`: `cpu` or `cuda:<index>`. Nothing is loaded yet."""
        self._plan, self._device = plan, device
        self._model: Any = None
        self._tokenizer: Any = None

    def load(self) -> None:
        """Read weights and tokenizer; float32 on CPUs, bfloat16 on GPUs (the head is applied in float32).

        Raises:
            ConfigurationError: not a classifier with exactly one label and its own weights, or no usable tokenizer.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from rljob_trainer.models.policy import load_config
        from rljob_trainer.models.value import is_classifier
        from rljob_trainer.quiet import quiet_libraries

        quiet_libraries()
        place, path = f"{self._plan.field_path}.path", str(self._plan.options["path"])
        config = load_config(path, field=place)
        if not is_classifier(config) or config.num_labels != 1:
            found = f"{config.num_labels} labels" if is_classifier(config) else f"{config.architectures}"
            raise ConfigurationError(
                f"{place}: {path!r} is no sequence classifier with one label (found {found}); give a reward model such "
                "as Skywork/Skywork-Reward-V2-Qwen3-0.6B"
            )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                config=config,
                dtype=torch.float32 if self._device == "cpu" else torch.bfloat16,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"{place}: the reward model {path!r} cannot be loaded: {error}") from error
        missing = sorted(report["missing_keys"])
        if missing:
            # transformers would initialise them at random and only warn: the reward would be noise.
            raise ConfigurationError(
                f"{place}: weights of {path!r} lack {len(missing)} tensors, for example {missing[0]!r}"
            )
        if not hasattr(model, "score"):
            raise ConfigurationError(
                f"{place}: {type(model).__name__} has no head `score` on a decoder; use a reward model built on a "
                "decoder such as Qwen2, Qwen3 or Llama"
            )
        self._model = model.eval().requires_grad_(False)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ModelScore]:
        """Scores in the order of the requests; a sample that does not fit the model is a failure of its own."""
        import torch

        self._model.to(self._device)
        token_ids = [self._encode(request) for request in requests]
        limit = int(getattr(self._model.config, "max_position_embeddings", 2**31))
        results: list[ModelScore | None] = [
            ScoreFailure(
                FailureKind.EXCEPTION,
                self._plan.name,
                f"prompt and response have {len(ids)} tokens, the reward model takes {limit}; lower "
                "spec.rollout.maxResponseTokens or use another reward model",
            )
            if len(ids) > limit
            else None
            for ids in token_ids
        ]
        fitting = [index for index, result in enumerate(results) if result is None]
        for batch in split_by_tokens(fitting, [len(ids) for ids in token_ids], MICRO_BATCH_TOKENS):
            with torch.inference_mode():
                scores_B = self._forward([token_ids[index] for index in batch])
            for index, score in zip(batch, scores_B, strict=True):
                is_finite = score == score and abs(score) != float("inf")
                results[index] = Score(score if is_finite else None, {}, not is_finite)
        return [result for result in results if result is not None]

    def release(self) -> None:
        """Free the GPU until the next sample: trainer and engine need its memory."""
        if self._model is not None and self._device != "cpu":
            import torch

            self._model.to("cpu")
            torch.cuda.empty_cache()

    def _encode(self, request: ScoreRequest) -> list[int]:
        """Prompt and response in the reward model's own chat template: the policy's special tokens mean nothing to it.
        Without a template, the plain texts one after the other."""
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer(request.prompt + request.response, verbose=False)["input_ids"])
        messages = list(request.messages) or [{"role": "user", "content": request.prompt}]
        text = self._tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": request.response}], tokenize=False
        )
        # The template has written the special tokens; the tokenizer would add a second BOS.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _forward(self, token_ids: list[list[int]]) -> list[float]:
        """The classifier's logit at the last token of each sample.

        Not `model(...).logits`: it looks for the last token that is not padding, and where the padding token also ends
        a sample that is another one.
        """
        import torch
        from torch.nn import functional

        longest = max(len(ids) for ids in token_ids)
        ids_BL = torch.zeros(len(token_ids), longest, dtype=torch.int64)
        mask_BL = torch.zeros(len(token_ids), longest, dtype=torch.int64)
        for row, ids in enumerate(token_ids):
            ids_BL[row, : len(ids)] = torch.tensor(ids)
            mask_BL[row, : len(ids)] = 1
        output = self._model.base_model(
            input_ids=ids_BL.to(self._device), attention_mask=mask_BL.to(self._device), use_cache=False
        )
        last_B = mask_BL.sum(dim=1) - 1
        hidden_BE = output.last_hidden_state[torch.arange(len(token_ids)), last_B.to(self._device)]
        head = self._model.score
        bias = None if head.bias is None else head.bias.float()
        scores: list[float] = functional.linear(hidden_BE.float(), head.weight.float(), bias).squeeze(-1).tolist()
        return scores


def split_by_tokens(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of samples of similar length, each at most `max_tokens` when padded (a longer sample alone)."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(indices, key=lambda index: lengths[index]):
        longest = max(longest, lengths[index])
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches
