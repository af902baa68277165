"""Questions that can be answered from the signature in them, so that a rule can check the answer.

A small model learns them within minutes: to count, to find a name, and to copy one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence

from corpus.demo.config import DocstringSignatures
from corpus.demo.docstrings import Docstring, Unparsed
from corpus.demo.parsing import read_docstrings
from corpus.demo.summaries import MAX_SIGNATURE_CHARACTERS
from corpus.pairs.files import Pair

MAX_PARAMETERS = 6
"""More are rare, and hard to count."""
# A parameter that a signature does not have is one of this number of parameters that were read last.
_RECENT = 64


def read_signatures(config: DocstringSignatures) -> Iterator[Pair | Unparsed]:
    """A pair for each signature of the selected packages' public functions and classes, up to `config.limit`, none
    twice; which of `config.questions` is asked depends on the signature alone.

    The group of a pair is the signature without its modules, so that `a.fit(x, y)` is on the same side as
    `b.fit(x, y)`.
    """
    seen: set[str] = set()
    recent: deque[str] = deque(maxlen=_RECENT)
    for item in read_docstrings(config.packages, config.exclude_packages):
        if isinstance(item, Unparsed):
            yield item
            continue
        signature, parameters = signature_of(item)
        if not signature or signature in seen:
            continue
        seen.add(signature)
        others = [name for name in recent if name not in parameters]
        prompt, response = question_about(signature, parameters, others, config.questions)
        recent.extend(name for name in parameters if name not in recent)
        yield Pair({"prompt": prompt, "response": response}, f"signatures/{item.source}", signature, verify="exact")
        if len(seen) == config.limit:
            return


def signature_of(item: Docstring) -> tuple[str, list[str]]:
    """Return `norm(x, ord, axis)`, with its parameters' names, of a public function or class; "" for all else and for
    tests.
    """
    path, bracket, inside = item.signature.removesuffix(")").partition("(")
    name = path.rsplit(".", 1)[-1]
    parameters = inside.split(", ") if inside else []
    signature = f"{name}({inside})"
    is_asked = (
        item.kind in ("function", "class")
        and bool(bracket)
        and signature.isascii()
        and not name.startswith(("_", "test", "Test"))
        and len(parameters) <= MAX_PARAMETERS
        and len(signature) <= MAX_SIGNATURE_CHARACTERS
    )
    return (signature, [parameter.lstrip("*") for parameter in parameters]) if is_asked else ("", [])


def question_about(
    signature: str, parameters: list[str], others: list[str], questions: Sequence[str]
) -> tuple[str, str]:
    """Prompt and response: how many parameters there are, whether one is there, or which is the first.

    Args:
        others: names that the signature does not have.
        questions: of these one is asked; of no parameters only their count.
    """
    choice = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:4], "big")
    question, choice = questions[choice % len(questions)], choice // len(questions)
    if question == "count" or not parameters or not others:
        return f"How many parameters does `{signature}` take?", str(len(parameters))
    if question == "first":
        return f"What is the first parameter of `{signature}`?", parameters[0]
    is_there, choice = choice % 2 == 0, choice // 2
    names = parameters if is_there else others
    name = names[choice % len(names)]
    return f"Does `{signature}` take a parameter `{name}`?", "Yes." if is_there else "No."
