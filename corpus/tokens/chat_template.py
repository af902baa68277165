"""The chat format: special tokens and the template that every tokenizer of ours carries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import stage_error
from infra.io.json import BadJson, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"

# The order gives the ids 0 to 4 of a tokenizer that we train.
SPECIAL_TOKENS = (END_OF_TEXT, PAD, USER, ASSISTANT, END)

# The system's message is the beginning of the first question, as in Llama 2's and Mistral's formats: it takes no token
# that the tokenizers of earlier versions lack. The generation marks show transformers which tokens are the
# assistant's (return_assistant_tokens_mask).
CHAT_TEMPLATE = (
    "{% set system = '' %}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + (system if loop.first else '') + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ raise_exception('expected the roles user and assistant, and system first, not ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Of those that earlier versions gave to tokenizers: what is tuned from them today knows a system.
EARLIER_TEMPLATES = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ raise_exception('expected the roles user and assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
)


FILES = ("chat_template.jinja", "tokenizer_config.json")
"""Files of a folder that may hold its chat template."""


def has_other_template(folder: Path) -> bool:
    """Return whether a model's folder has a chat template that is none of ours. False for one that cannot be read."""
    file, settings = (folder / name for name in FILES)
    try:
        content = {"chat_template": file.read_text(encoding="utf8")} if file.is_file() else read_json(settings)
    except (OSError, UnicodeDecodeError, BadJson):
        return False
    template = content.get("chat_template") if isinstance(content, dict) else None
    return bool(template) and template not in (CHAT_TEMPLATE, *EARLIER_TEMPLATES)


_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
"""Variables of a template that are not its own values."""


def check_values(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], key: str) -> None:
    """Raise StageError `unknown_template_value` for values that a tokenizer's chat template would not read.

    Args:
        tokenizer: with its own chat template, this project's, or none.
        values: by the names of the template's variables.
        key: dotted key or option of the values, for the message.
    """
    template = tokenizer.chat_template
    if values and (not template or template in (CHAT_TEMPLATE, *EARLIER_TEMPLATES)):
        message = "expected none: the model has this project's chat template, which takes no values"
        raise stage_error("unknown_template_value", key, message, "leave it out")
    text = "\n".join(template.values()) if isinstance(template, Mapping) else str(template)
    for name in values:
        if name in _GIVEN or name in tokenizer.special_tokens_map:
            message = f"expected a variable of the chat template, but {name} is set by transformers"
        elif not re.search(rf"\b{re.escape(name)}\b", text):
            message = f"expected variables that the model's chat template reads, but it does not read {name}"
        else:
            continue
        raise stage_error("unknown_template_value", f"{key}.{name}", message, "correct its name, or leave it out")
