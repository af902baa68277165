"""Tokenizers that may be given a text in pieces, and the cuts for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from corpus.tokens.cuts import SPACE_SIGN, Cuts, before_words, between_pretokens
from infra.io.json import parse_own_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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

PIECES_OF_WORDS = r"[\s\S]{1,1000}"
"""Cuts a pre-token into pieces that WordPiece takes apart."""
Part = dict[str, Any]
# What SentencePiece's normalisation is made of: it sees no further than a run of spaces or a letter with its marks.
_SPACES_TO_SIGN = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SIGN}
_RUNS_TO_SIGN = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE_SIGN}
_SIGN_IN_FRONT = {"type": "Prepend", "prepend": SPACE_SIGN}
_STRIP_RIGHT = {"type": "Strip", "strip_left": False, "strip_right": True}
_SPLIT_NOTHING = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


class Cutting(NamedTuple):
    """The cuts for a tokenizer.

    added: words of its vocabulary that it looks for before anything else; a text that has one must stay whole.
    space_in_front: it puts a space before any input: each text must get one, each chunk none
    (`without_space_in_front`).
    """

    cuts: Cuts
    added: tuple[str, ...]
    space_in_front: bool = False


def cutting_of(tokenizer: Tokenizer) -> Cutting | None:
    """Return cuts that leave a tokenizer's ids unchanged; None if it must have whole texts."""
    parts: Part = parse_own_json(tokenizer.to_str())
    normalizers = _parts(parts["normalizer"], "normalizers")
    splitters = _parts(parts["pre_tokenizer"], "pretokenizers")
    added = [token for token in parts["added_tokens"] if not token["special"]]
    if parts["model"].get("dropout") or (normalizers and any(token["normalized"] for token in added)):
        return None
    words = tuple(token["content"] for token in added)
    if _splits_to_pretokens(normalizers, splitters):
        digits_apart = any(splitter["type"] == "Digits" for splitter in splitters)
        cuts = between_pretokens(like_gpt2=any(map(_splits_like_gpt2, splitters)), digits_apart=digits_apart)
        return Cutting(cuts, words)
    if _splits_to_words(normalizers, splitters):
        return Cutting(before_words(), words)
    if _merges_within_words(normalizers, splitters, parts["model"]):
        return Cutting(before_words(), words, _SIGN_IN_FRONT in normalizers)
    return None


def without_space_in_front(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer like this one that puts no space before what it is given."""
    from tokenizers import Tokenizer, normalizers

    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    copy.normalizer = normalizers.Replace(" ", SPACE_SIGN)
    return copy


def _parts(part: Part | None, key: str) -> list[Part]:
    """A normaliser or pre-tokeniser, or those that it is a sequence of."""
    if part is None:
        return []
    return [leaf for inner in part[key] for leaf in _parts(inner, key)] if part["type"] == "Sequence" else [part]


def _splits_to_pretokens(normalizers: list[Part], splitters: list[Part]) -> bool:
    # The normalisers change characters one by one, or with marks that follow them.
    return (
        all(normalizer["type"] in ("NFC", "Lowercase", "BertNormalizer") for normalizer in normalizers)
        and all(_splits(splitter) or _splits_further(splitter) for splitter in splitters)
        and any(map(_splits, splitters))
    )


def _splits(splitter: Part) -> bool:
    """Return True if a pre-tokeniser begins a pre-token at every cut."""
    match splitter["type"]:
        case "BertPreTokenizer":
            return True
        case "ByteLevel":
            return bool(splitter["use_regex"] and not splitter["add_prefix_space"])
        case "Split":
            matches_are_kept = (splitter["behavior"], splitter["invert"]) in (("Isolated", False), ("Removed", True))
            return matches_are_kept and splitter["pattern"].get("Regex") in EXPRESSIONS.values()
    return False


def _splits_like_gpt2(splitter: Part) -> bool:
    """Return True if a pre-tokeniser that splits at every cut does it as GPT-2's expression, or at more places
    (BERT's)."""
    if splitter["type"] == "Split":
        return bool(splitter["pattern"].get("Regex") == EXPRESSIONS["gpt-2"])
    return _splits(splitter)


def _splits_further(splitter: Part) -> bool:
    """Return True if a pre-tokeniser splits by single characters or into pieces of one length, or turns bytes into
    letters and no more."""
    if splitter["type"] == "Split":
        return bool(splitter["pattern"].get("Regex") == PIECES_OF_WORDS and splitter["behavior"] == "Isolated")
    return splitter["type"] == "Digits" or (splitter["type"] == "ByteLevel" and not splitter["add_prefix_space"])


def _splits_to_words(normalizers: list[Part], splitters: list[Part]) -> bool:
    """Return True if words are split as SentencePiece's are: T5, XLM-R.

    Metaspace puts a space before what has none there: the first chunk of a text, and no other.
    """
    return (
        all(
            normalizer["type"] == "Precompiled" or normalizer in (_RUNS_TO_SIGN, _STRIP_RIGHT)
            for normalizer in normalizers
        )
        and all(splitter["type"] in ("WhitespaceSplit", "Metaspace") for splitter in splitters)
        and any(_is_metaspace(splitter) and splitter["split"] for splitter in splitters)
    )


def _merges_within_words(normalizers: list[Part], splitters: list[Part], model: Part) -> bool:
    """Return True if nothing is split, but no merge reaches over a space: Llama 2, Mistral, Gemma.

    None does if no entry of the vocabulary has the sign of a space after another character.
    """
    if _SPACES_TO_SIGN in normalizers:
        signs = all(normalizer in (_SPACES_TO_SIGN, _SIGN_IN_FRONT) for normalizer in normalizers)
        signs = signs and splitters in ([], [_SPLIT_NOTHING])
    else:
        signs = not normalizers and len(splitters) == 1 and _is_metaspace(splitters[0])
    return (
        signs
        and model["type"] == "BPE"
        and not model["end_of_word_suffix"]
        and not model["ignore_merges"]
        and SPACE_SIGN in model["vocab"]
        and not any(SPACE_SIGN in entry.lstrip(SPACE_SIGN) for entry in model["vocab"])
    )


def _is_metaspace(splitter: Part) -> bool:
    return splitter["type"] == "Metaspace" and splitter["replacement"] == SPACE_SIGN
