"""Questions about which words the name of a function or class is made of: a rule can tell a right answer.

A small model can learn to answer them within minutes, from pieces of the name that stand in the question.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from corpus.demo.config import DocstringNames
from corpus.demo.docstrings import Docstring, Unparsed, read_docstrings
from corpus.pairs import Pair

WORDS = range(2, 6)
"""Names of one word ask nothing; those of more than five are rare, and mostly those of tests and generated code."""
PROMPTS = (
    "Which words make up the name `{}`?",
    "What words is the name `{}` made of?",
    "Split the name `{}` into its words.",
)


def read_names(config: DocstringNames) -> Iterator[Pair | Unparsed]:
    """A pair for each name of the selected packages' public functions and classes, up to `config.limit`, none twice.

    The group of a pair is its words, so that `getData` lies on the same side as `get_data`.
    """
    seen: set[str] = set()
    for item in read_docstrings(config.packages, config.exclude_packages):
        if isinstance(item, Unparsed):
            yield item
            continue
        name = name_of(item)
        if name is None or name in seen:
            continue
        words = words_of(name)
        if len(words) not in WORDS:
            continue
        seen.add(name)
        answer = " ".join(words)
        yield Pair({"prompt": prompt_for(name), "response": answer}, f"names/{item.source}", answer, verify="exact")
        if len(seen) == config.limit:
            return


def name_of(item: Docstring) -> str | None:
    """The last part of the name of a public function or class in ASCII; None for all else and for tests."""
    name = item.signature.split("(")[0].rsplit(".", 1)[-1]
    is_asked = item.kind in ("function", "class") and name.isascii() and not name.startswith(("_", "test", "Test"))
    return name if is_asked else None


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: it is split at underscores, where capitals begin or end, and at numbers.

    >>> words_of("HTTPServer2_get_URLs")
    ['http', 'server', '2', 'get', 'urls']
    """
    return [word.lower() for word in _WORD.findall(name)]


def prompt_for(name: str) -> str:
    """A question about the name; which wording depends on nothing but the name."""
    choice = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return PROMPTS[choice % len(PROMPTS)].format(name)


_WORD = re.compile(
    r"""
    [A-Z]{2,}s(?![a-z])       # the plural of an abbreviation: URLs
    | [A-Z]+(?=[A-Z][a-z])    # an abbreviation before another word: HTTP of HTTPServer
    | [A-Z]?[a-z]+
    | [A-Z]+
    | [0-9]+
    """,
    re.VERBOSE,
)
