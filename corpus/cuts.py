"""Where a text may be cut into pieces that a tokenizer turns into the same ids one by one as together.

Most tokenizers split a text into pre-tokens first, by a regular expression that is matched from left to right, and a
model turns each pre-token into ids without looking at the others. Where the expression begins a new pre-token whatever
stands before and behind, a text may be cut. For the expressions below that is

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

import json
import string
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Cuts = NDArray[np.uint8]

# Kinds of characters. BLANK is whatever some version of Unicode may take for a space.
BLANK, SPACE, TAB, LINE, PLAIN, WORD, SIGN = KINDS = range(7)

_SIGNS = frozenset(string.punctuation) - {"'"}
# Whether to cut before a character: LAST if a character of a later kind than LINE follows it.
NEVER, ALWAYS, LAST = range(3)

_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGN_RUN = r" ?[^\s\p{L}\p{N}]+"
_WORD = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_WHITE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

EXPRESSIONS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt-4, llama 3": rf"{_WORD}|\p{{N}}{{1,3}}|{_SIGN_RUN}[\r\n]*|{_WHITE}",
    "qwen 2": rf"{_WORD}|\p{{N}}|{_SIGN_RUN}[\r\n]*|{_WHITE}",
    "gpt-4o": rf"{_CASED}{_CONTRACTION}?|{_UPPER}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SIGN_RUN}[\r\n/]*|{_WHITE}",
    "tekken": rf"{_CASED}|{_UPPER}|\p{{N}}|{_SIGN_RUN}[\r\n/]*|{_WHITE}",
}


def cuts_of(tokenizer: Tokenizer) -> Cuts | None:
    """Cuts that leave a tokenizer's ids as they are: [k, l] says whether to cut before kind l where it follows kind k.

    None if there are no such cuts. Between cuts a tokenizer still looks for its `added_words`.
    """
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    splitters = _parts(parts["pre_tokenizer"], "pretokenizers")
    digits_apart = any(splitter["type"] == "Digits" for splitter in splitters)
    looks_across = (
        not all(map(_is_local, _parts(parts["normalizer"], "normalizers")))
        or not all(_splits(one) or _splits_further(one) for one in splitters)
        or not any(map(_splits, splitters))
        or parts["model"].get("dropout")
        or (parts["normalizer"] and any(token["normalized"] for token in _added(parts)))
    )
    return None if looks_across else _cuts(any(map(_splits_like_gpt2, splitters)), digits_apart)


def _cuts(like_gpt2: bool, digits_apart: bool) -> Cuts:
    cuts = np.full((len(KINDS), len(KINDS)), NEVER, np.uint8)
    cuts[[PLAIN, WORD, SIGN], SPACE] = ALWAYS
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


def added_words(tokenizer: Tokenizer) -> list[str]:
    """The words that are found in a text before it is split, as written; special tokens are never looked for."""
    return [token["content"] for token in _added(json.loads(tokenizer.to_str()))]


def _added(parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [token for token in parts["added_tokens"] if not token["special"]]


@lru_cache(maxsize=1)
def kinds() -> NDArray[np.uint8]:
    """The kind of each character of Unicode's first plane; those beyond it are PLAIN."""
    return np.array([_kind(chr(point)) for point in range(0x10000)], np.uint8)


def _kind(character: str) -> int:
    if character == " ":
        return SPACE
    if character == "\t":
        return TAB
    if character in "\n\r":
        return LINE
    if character in _SIGNS:
        return SIGN
    # A category is trusted where an old version of Unicode agrees: a tokenizer may have been built with any.
    categories = unicodedata.category(character)[0] + unicodedata.ucd_3_2_0.category(character)[0]
    if set(categories) & {"Z", "C"}:
        return BLANK
    # What NFC takes apart or lower case makes two of need not end in a letter.
    whole = unicodedata.normalize("NFC", character) == character and len(character.lower()) == 1
    return WORD if whole and categories in ("LL", "NN") else PLAIN


def _parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A normaliser or pre-tokeniser, or those that it is a sequence of."""
    if part is None:
        return []
    return [one for inner in part[key] for one in _parts(inner, key)] if part["type"] == "Sequence" else [part]


def _is_local(normalizer: dict[str, Any]) -> bool:
    """Whether a normaliser changes characters one by one, or with marks that follow them."""
    return normalizer["type"] in ("NFC", "Lowercase", "BertNormalizer")


def _splits(splitter: dict[str, Any]) -> bool:
    """Whether a pre-tokeniser begins a pre-token at every cut."""
    match splitter["type"]:
        case "BertPreTokenizer":
            return True
        case "ByteLevel":
            return bool(splitter["use_regex"] and not splitter["add_prefix_space"])
        case "Split":
            matches_are_kept = (splitter["behavior"], splitter["invert"]) in (("Isolated", False), ("Removed", True))
            return matches_are_kept and splitter["pattern"].get("Regex") in EXPRESSIONS.values()
    return False


def _splits_like_gpt2(splitter: dict[str, Any]) -> bool:
    """Whether a pre-tokeniser that splits at every cut does it as GPT-2's expression, or at more places (BERT's)."""
    if splitter["type"] == "Split":
        return bool(splitter["pattern"].get("Regex") == EXPRESSIONS["gpt-2"])
    return _splits(splitter)


def _splits_further(splitter: dict[str, Any]) -> bool:
    """Whether a pre-tokeniser splits by single characters, or turns bytes into letters and no more."""
    return splitter["type"] == "Digits" or (splitter["type"] == "ByteLevel" and not splitter["add_prefix_space"])
