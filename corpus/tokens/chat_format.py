"""The chat format: special tokens and the template that every tokenizer of ours carries."""

from __future__ import annotations

from pathlib import Path

from infra.io.json import BadJson, read_json

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"

# The order gives the ids 0 to 4 of a tokenizer that we train.
SPECIAL_TOKENS = (END_OF_TEXT, PAD, USER, ASSISTANT, END)

# What the system says is the beginning of the first question, as in Llama 2's and Mistral's formats: it takes no token
# that the tokenizers of earlier versions lack. The generation marks let transformers tell which tokens are the
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
"""Where a folder has its chat template."""


def has_other_template(folder: Path) -> bool:
    """Return whether a model's folder has a chat template that is none of ours. False for one that cannot be read."""
    file, settings = (folder / name for name in FILES)
    try:
        found = {"chat_template": file.read_text(encoding="utf8")} if file.is_file() else read_json(settings)
    except (OSError, UnicodeDecodeError, BadJson):
        return False
    template = found.get("chat_template") if isinstance(found, dict) else None
    return bool(template) and template not in (CHAT_TEMPLATE, *EARLIER_TEMPLATES)
