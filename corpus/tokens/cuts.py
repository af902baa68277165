"""Places at which a text may be cut into pieces without changing the ids that a tokenizer gives it.

Most tokenizers split a text into pre-tokens first, by a regular expression that is matched from left to right, and a
model turns each pre-token into ids without looking at the others. A text may be cut where the expression begins a new
pre-token regardless of the text before and after. For the expressions of `corpus/tokens/cutting.py` that is

- before a space that follows no space: only at its beginning does a pre-token have a space beside other characters;
- before a line break, a tab or an ASCII sign other than the apostrophe that follows a letter or a number: letters and
  numbers end a pre-token, unless a contraction follows (GPT-4o's expression has it in the same pre-token);
- before the last of several white characters if something else follows it: expressions leave it to what follows.
  GPT-2's does so with line breaks too, the others leave those together;
- before a letter or a number that follows a line break;
- before a letter or a number that follows an ASCII sign, but not where an expression takes (word for one pre-token.

Digits are not cut from letters: BERT takes b2b for one word.
"""

from __future__ import annotations

import string
import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Cuts = NDArray[np.uint8]
"""[k, l]: whether to cut before a character of kind l that follows one of kind k."""

# Kinds of characters. BLANK is whatever some version of Unicode or some tokenizer may take for a space.
BLANK, SPACE, TAB, LINE, PLAIN, WORD, SIGN = KINDS = range(7)
# Whether to cut before a character: LAST if a character of a later kind than LINE follows it.
NEVER, ALWAYS, LAST = range(3)

_SIGNS = frozenset(string.punctuation) - {"'"}
# SentencePiece's sign for a space.
SPACE_SIGN = "\u2581"
# What stands for bytes that could not be read; SentencePiece makes a space of it.
REPLACEMENT = "\ufffd"


def before_words() -> Cuts:
    """Cut before spaces that follow no space."""
    cuts = np.full((len(KINDS), len(KINDS)), NEVER, np.uint8)
    cuts[[PLAIN, WORD, SIGN], SPACE] = ALWAYS
    return cuts


def between_pretokens(*, like_gpt2: bool, digits_apart: bool) -> Cuts:
    """Cuts for GPT-2's expression, or for the later ones;

    Args:
        digits_apart: whether digits are split off before them.
    """
    cuts = before_words()
    cuts[WORD, [SIGN, LINE, TAB]] = ALWAYS
    cuts[LINE, WORD] = ALWAYS
    if like_gpt2:
        cuts[SIGN, WORD] = ALWAYS
    if not digits_apart:
        # Where digits are split off first, white characters before one have nothing behind them.
        for last in [SPACE, TAB, LINE] if like_gpt2 else [SPACE, TAB]:
            cuts[[BLANK, SPACE, TAB, LINE], last] = LAST
    elif like_gpt2:
        cuts[LINE, WORD] = NEVER
    return cuts


@lru_cache(maxsize=1)
def kinds() -> NDArray[np.uint8]:
    """The kind of each character of Unicode's first plane; those beyond it are PLAIN."""
    return np.array([_kind(chr(point)) for point in range(0x10000)], np.uint8)


def _kind(character: str) -> int:
    special = {" ": SPACE, "\t": TAB, "\n": LINE, "\r": LINE, SPACE_SIGN: BLANK, REPLACEMENT: BLANK}.get(character)
    if special is not None:
        return special
    if character in _SIGNS:
        return SIGN
    # A category is trusted where an old version of Unicode agrees: a tokenizer may have been built with any.
    categories = unicodedata.category(character)[0] + unicodedata.ucd_3_2_0.category(character)[0]
    if set(categories) & {"Z", "C"}:
        return BLANK
    # What NFC takes apart or lower case makes two of need not end in a letter.
    is_stable = unicodedata.normalize("NFC", character) == character and len(character.lower()) == 1
    return WORD if is_stable and categories in ("LL", "NN") else PLAIN
