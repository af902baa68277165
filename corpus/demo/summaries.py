"""Prompts that ask what a function does, with the summary sentence of its docstring: what pairs are made from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from corpus.demo.config import DocstringPairs
from corpus.demo.docstrings import Docstring, Kind, Unparsed, first_sentence, group_of
from corpus.demo.parsing import read_docstrings

MAX_SIGNATURE_CHARACTERS = 90
MIN_WORDS = 4
MIN_LETTER_SHARE = 0.75

FUNCTION_PROMPTS = (
    "What does `{}` do?",
    "Describe `{}` in one sentence.",
    "Summarise what `{}` does.",
    "Write the first line of the docstring of `{}`.",
    "Explain in one sentence what `{}` is for.",
)
CLASS_PROMPTS = (
    "What is the class `{}`?",
    "Describe the class `{}` in one sentence.",
    "Summarise what the class `{}` is for.",
    "Write the first line of the docstring of the class `{}`.",
    "Explain in one sentence what the class `{}` represents.",
)


@dataclass(frozen=True)
class Summary:
    """One question about a function or class and its answer.

    kind: "function" or "class". signature: as it appears in the prompt. group: the key of the split, that of the whole
    docstring, so that its text and this pair are on the same side.
    """

    kind: Kind
    signature: str
    prompt: str
    response: str
    group: str
    package: str
    source: str


def read_summaries(config: DocstringPairs) -> Iterator[Summary | Unparsed]:
    """Good summaries of the selected packages, up to `config.limit`, none of them twice.

    Two summaries that differ only in the names they mention ("Config class of FooModel.") count as one: otherwise a
    held-out pair would have its twin among the training pairs.
    """
    seen: set[str] = set()
    taken = 0
    for item in read_docstrings(config.packages, config.exclude_packages):
        if isinstance(item, Unparsed):
            yield item
            continue
        response = summary_of(item, config.min_characters, config.max_characters)
        if response is None or (pattern := _pattern(response)) in seen:
            continue
        seen.add(pattern)
        yield Summary(
            item.kind,
            shortened(item.signature),
            prompt_for(item),
            response,
            group_of(item.text),
            item.package,
            f"docstrings/{item.source}",
        )
        taken += 1
        if taken == config.limit:
            return


def summary_of(item: Docstring, min_characters: int, max_characters: int) -> str | None:
    """The first sentence of a public function's or class's docstring; None if it has no meaning by itself."""
    name = item.signature.split("(")[0].rsplit(".", 1)[-1]
    if item.kind not in ("function", "class") or name.startswith(("_", "test")):
        return None
    sentence = first_sentence(item.text)
    if sentence and sentence[-1] not in ".!?":
        sentence += "."
    letters = sum(character.isalpha() or character == " " for character in sentence)
    is_good = (
        min_characters <= len(sentence) <= max_characters
        and len(sentence.split()) >= MIN_WORDS
        and letters >= MIN_LETTER_SHARE * len(sentence)
        and sentence[0].isupper()
        and sentence.isascii()
        and not _BOILERPLATE.search(sentence)
        and sentence.count("`") % 2 == 0
        and sentence.count("(") == sentence.count(")")
    )
    return sentence if is_good else None


def prompt_for(item: Docstring) -> str:
    """A question about the function; which wording depends on nothing but its name."""
    prompts = CLASS_PROMPTS if item.kind == "class" else FUNCTION_PROMPTS
    choice = int.from_bytes(hashlib.sha256(item.source.encode()).digest()[:4], "big")
    return prompts[choice % len(prompts)].format(shortened(item.signature))


def shortened(signature: str) -> str:
    """A signature of at most about 90 characters: later parameters become "...", then outer modules go."""
    name, bracket, parameters = signature.partition("(")
    if not bracket:
        return name
    names = parameters.removesuffix(")").split(", ")
    while len(names) > 1 and len(name) + len(", ".join(names)) > MAX_SIGNATURE_CHARACTERS:
        names = [*names[: -2 if names[-1] == "..." else -1], "..."]
    return f"{name}({', '.join(names)})"


_BOILERPLATE = re.compile(
    r"""
    \b(Args|Arguments|Parameters|Returns|Return\ value|Raises|Yields|Example|Examples|Usage|Note|Notes|Attributes)\s*:
    | ^(See|Same\ as|Alias|Like|Ditto|Inherit|Overrid|Override|Implements?\ (the\ )?abstract|Refer|TODO|FIXME|XXX)\b
    | ^(Deprecated|DEPRECATED|Experimental|Internal|Placeholder|Stub|Dummy|Helper|Test|Tests|Regression|Copyright)\b
    | >>>|\.\.\s|::|https?:|\bself\b|__|:param|:return|\|\w+\||[{}<>=\\*|]|\.\.\.
    | \b(repr|str)\(self\)|for\ (more\ )?(details|information)
    | [:,;]\.?$|\w`\w
    | ^This\ (method|function|class)\ (is|was)\ (deprecated|not|auto|generated)
    """,
    re.VERBOSE,
)
_NAME_LIKE = re.compile(r"`[^`]*`|\"[^\"]*\"|'[^']*'|\S*[a-z_][A-Z]\S*|\S*_\S*|\S*\d\S*|\S+\.\S+|[A-Z]{2,}\S*")


def _pattern(sentence: str) -> str:
    """A sentence without the names in it."""
    return re.sub(r"[\W_]+", " ", _NAME_LIKE.sub(" ", sentence).lower()).strip()
