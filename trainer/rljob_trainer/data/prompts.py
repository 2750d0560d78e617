"""Renders prompts to token ids: chat template rules in one place, for RL prompts and demonstrations alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rljob_api.v1alpha1.data import Data
from rljob_trainer.data.cells import Message
from rljob_trainer.errors import DataError


@dataclass(frozen=True)
class Rendered:
    """A prompt as it is sent to the engine."""

    text: str
    """Rendered text."""
    ids: list[int]
    """Its token ids."""


class PromptRenderer:
    """Applies `data.chatTemplate` (or the tokenizer's own template) and `data.systemPrompt`.

    * With a template, text becomes one user message (after the system prompt, if any) and lists are rendered as they
      are; the generation prompt is added.
    * Without a template, text is tokenised as it is; messages and system prompts are refused.
    """

    def __init__(self, data: Data, tokenizer: Any) -> None:
        """`tokenizer` is a transformers tokenizer. Raises DataError for a system prompt without a template."""
        self._tokenizer = tokenizer
        self._template: str | None = data.chat_template or tokenizer.chat_template
        self._system_prompt = data.system_prompt
        # Demonstrations repeat their prompts; rendering a template costs more than all the rest of a row.
        self._render_template = functools.lru_cache(maxsize=4096)(self._apply_template)
        if self._system_prompt is not None and self._template is None:
            raise DataError(
                f"spec.data.systemPrompt is set, but the tokenizer of {tokenizer.name_or_path} has no chat template; "
                "set spec.data.chatTemplate or leave systemPrompt out"
            )

    def render_text(self, prompt: str | list[Message], place: str) -> str:
        """The text of one prompt; `place` names the row in errors.

        Raises:
            DataError: messages without a template, or a template that cannot render them.
        """
        if self._template is None:
            if isinstance(prompt, str):
                return prompt
            raise DataError(
                f"{place}: the prompt is a list of messages, but the tokenizer of {self._tokenizer.name_or_path} has "
                "no chat template; set spec.data.chatTemplate, or give prompts as text"
            )
        from jinja2 import TemplateError

        try:
            text = self._render_template(prompt) if isinstance(prompt, str) else self._apply_template(prompt)
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"{place}: the chat template cannot render this prompt: {error}") from error
        return text

    def list_messages(self, prompt: str | list[Message]) -> tuple[Message, ...]:
        """The conversation that the template renders; empty without a template."""
        if self._template is None:
            return ()
        return tuple(self._wrap(prompt) if isinstance(prompt, str) else prompt)

    def _apply_template(self, prompt: str | list[Message]) -> str:
        messages = self._wrap(prompt) if isinstance(prompt, str) else prompt
        return str(
            self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        )

    def tokenize(self, texts: list[str]) -> list[Rendered]:
        """Token ids of rendered texts, in one batch. The template has written its special tokens itself, so the
        tokenizer adds its own (a second BOS) only to texts without a template."""
        if not texts:
            return []
        # Not verbose: the tokenizer would warn about its own length limit; ours is applied to the result.
        batch = self._tokenizer(texts, add_special_tokens=self._template is None, verbose=False)["input_ids"]
        return [Rendered(text, list(ids)) for text, ids in zip(texts, batch, strict=True)]

    def cut_left(self, rendered: Rendered, max_tokens: int) -> Rendered:
        """The last `max_tokens` tokens of a prompt: the end holds the question and the generation prompt."""
        ids = rendered.ids[-max_tokens:]
        return Rendered(self._tokenizer.decode(ids), ids)

    def _wrap(self, text: str) -> list[Message]:
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, {"role": "user", "content": text}]
