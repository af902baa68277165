"""Rendering of Jinja templates from outside; the process of `infra.io.templates`, which starts this file by its path.

It has no credentials in its environment and imports nothing of this project. A template that needs more memory than
`MEMORY_BYTES` raises MemoryError here; one that needs more than `CPU_S` seconds of processor time ends this process.
"""

from __future__ import annotations

import json
import marshal
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 256_000_000
"""Memory for one rendering, besides what the process has before."""
CPU_S = 2
TEXT_CHARACTERS = 10_000_000
"""The most that one request may render."""
LENGTH = struct.Struct("<q")

_BELOW_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number in words: `twenty-one` for 21, `minus two` for -2. Raises ValueError beyond 99."""
    if number < 0:
        return f"minus {in_words(-number)}"
    if number > 99:
        raise ValueError(f"numbers are written in words up to 99, not {number}")
    if number < 20:
        return _BELOW_TWENTY[number]
    tens, units = divmod(number, 10)
    return _TENS[tens] + (f"-{_BELOW_TWENTY[units]}" if units else "")


_TEMPLATES = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
_TEMPLATES.filters["words"] = in_words


@lru_cache(maxsize=256)
def _compiled(template: str) -> Template:
    return _TEMPLATES.from_string(template)


@lru_cache(maxsize=256)
def _condition(expression: str) -> Any:
    return _TEMPLATES.compile_expression(expression, undefined_to_none=False)


def _fill(condition: str | None, templates: list[str], fillings: list[dict[str, Any]]) -> Iterator[list[str] | None]:
    for values in fillings:
        fits = condition is None or _condition(condition)(**values)
        yield [_compiled(template).render(values) for template in templates] if fits else None


def _chat(arguments: dict[str, Any]) -> Iterator[list[Any]]:
    """The text of each conversation, then the spans [start, stop] of the assistant's turns in each."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, spans = render_jinja_template(**arguments)
    yield list(rendered)
    yield list(spans)


def _answer(kind: str, question: list[Any]) -> dict[str, Any]:
    """Return the rendered texts, and the fault that ended the rendering if there was one."""
    results: list[list[Any] | None] = []
    characters_left = TEXT_CHARACTERS
    answer: dict[str, Any] = {"texts": results}
    try:
        for texts in _chat(*question) if kind == "chat" else _fill(*question):
            characters_left -= sum(map(len, texts or ()))
            if characters_left < 0:
                return answer | {"fault": f"it renders more than {TEXT_CHARACTERS:,} characters", "beyond_bounds": True}
            results.append(texts)
    except MemoryError:
        answer |= {"fault": f"it takes more than {MEMORY_BYTES / 1e6:,.0f} MB of memory", "beyond_bounds": True}
    except RecursionError:
        answer |= {"fault": "it recurses without end", "beyond_bounds": True}
    except Exception as error:
        answer["fault"] = str(error)[:500] or type(error).__name__
        answer["is_own"] = isinstance(error, TemplateError)
    return answer


def main() -> None:
    """Answer its starter until that closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while len(head := questions.read(LENGTH.size)) == LENGTH.size:
        kind, *question = marshal.loads(questions.read(*LENGTH.unpack(head)))
        if kind == "chat":
            import transformers.utils.chat_template_utils  # noqa: F401  # seconds, and hundreds of megabytes
        _limit(resource.RLIMIT_DATA, _data_bytes() + MEMORY_BYTES)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + CPU_S)
        content = json.dumps(_answer(kind, question)).encode()
        _limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY)
        _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        answers.write(LENGTH.pack(len(content)) + content)
        answers.flush()


def _limit(kind: int, limit: int) -> None:
    _, hard_limit = resource.getrlimit(kind)
    if hard_limit != resource.RLIM_INFINITY:
        limit = hard_limit if limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(kind, (limit, hard_limit))


def _data_bytes() -> int:
    """Memory that this process has for itself."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))


if __name__ == "__main__":
    main()
