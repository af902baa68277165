"""The chat format: special tokens and the template that every tokenizer of ours carries."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"

# The order gives the ids 0 to 4 of a tokenizer that we train.
SPECIAL_TOKENS = (END_OF_TEXT, PAD, USER, ASSISTANT, END)

# The generation marks let transformers tell which tokens are the assistant's (return_assistant_tokens_mask).
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ raise_exception('expected the roles user and assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
