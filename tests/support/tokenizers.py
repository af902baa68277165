"""Tokenizers of tests and benchmarks, with the tokens and the template of chats."""

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from corpus.tokens.chat_template import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS


def with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers loads it, with our chat tokens and template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
