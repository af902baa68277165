"""Prompts in a model's own chat template, rendered in a process with bounds, as the template is the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, tokenization_utils_base

from corpus.tokens.chat_template import CHAT_TEMPLATE, EARLIER_TEMPLATES, check_values
from infra.errors import stage_error
from infra.io import templates


@dataclass(frozen=True)
class ChatPrompt:
    """Settings for asking texts as the user of a chat.

    Args:
        system: text of the system message before each text; None for none.
        values: values of the chat template's own variables.
    """

    system: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, text: str) -> list[dict[str, str]]:
        """Return the conversation that ends with the text."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": text}]

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise as `check_template`."""
        check_template(tokenizer, self.values, "safety.chat_template_kwargs")

    def ids(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text followed by the beginning of the assistant's answer, as from transformers'
        `apply_chat_template`. Raises StageError `no_chat_template`, `bad_template`, `unknown_template_value`."""
        self.check(tokenizer)
        with bounded():
            try:
                return [
                    list(
                        tokenizer.apply_chat_template(
                            self.messages(text), add_generation_prompt=True, return_dict=False, **self.values
                        )
                    )
                    for text in texts
                ]
            except TemplateError as error:
                fix = "leave system_instruction out if the template takes no system message, else chat_template too"
                raise stage_error(
                    "bad_template", "chat_template", f"the model's chat template rejects a prompt: {error}", fix
                ) from None


def check_template(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], key: str) -> None:
    """Raise StageError `no_chat_template` for a model without a template, `unknown_template_value` for values that the
    template does not read. key: dotted key or option of the values."""
    if not tokenizer.chat_template:
        message = f"expected a chat template in {tokenizer.name_or_path}, found none"
        fix = "leave chat_template out for this model, or import it with base_model, which gives it this project's"
        raise stage_error("no_chat_template", "chat_template", message, fix)
    check_values(tokenizer, values, key)


@contextmanager
def bounded(on_fault: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make transformers render chat templates within bounds of time and memory inside the block.

    on_fault: called when a template refuses a conversation. Raises StageError `bad_template` for a template that
    exceeds the bounds.
    """
    render = tokenization_utils_base.render_jinja_template
    tokenization_utils_base.render_jinja_template = partial(_render, render, on_fault)
    try:
        yield
    finally:
        tokenization_utils_base.render_jinja_template = render


def _render(render: Callable[..., Any], on_fault: Callable[[], None], **arguments: Any) -> tuple[list[str], list[Any]]:
    """Return the result of transformers' `render`; only this project's own templates are rendered in this process."""
    if arguments["chat_template"] in (CHAT_TEMPLATE, *EARLIER_TEMPLATES):
        rendered, indices = render(**arguments)
        return list(rendered), list(indices)
    try:
        return templates.chat(**arguments)
    except templates.TemplateFault as fault:
        if fault.is_own:
            on_fault()
            raise TemplateError(str(fault)) from None
        raise stage_error(
            "bad_template", "chat_template", f"the model's chat template cannot be rendered: {fault}", "leave it out"
        ) from None
