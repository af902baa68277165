"""Jinja templates from outside, rendered in a process with bounds: failure classes, chat templates of models.

Jinja's sandbox keeps a template from running code. It does not keep `{{ 'a' * 3000000000 }}`, loops in loops or a macro
that calls itself from taking all memory and time, and each of its many ways to multiply a text would need a guard.
So the rendering happens in another process (`infra.io.template_process`), whose memory and time have limits. It is
started at the first template and ends with its starter.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from infra.io.json import parse_own_json
from infra.io.template_process import CPU_S, LENGTH

_PROGRAM = Path(__file__).with_name("template_process.py")
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME")


class TemplateFault(ValueError):
    """A template that cannot be rendered, or not within the bounds.

    Args:
        message: reason.
        is_own: the template itself raised it, as chat templates do for a role that they do not know.
        beyond_bounds: it needs more memory, time or text than the bounds allow.
    """

    def __init__(self, message: str, is_own: bool = False, beyond_bounds: bool = False) -> None:
        super().__init__(message)
        self.is_own = is_own
        self.beyond_bounds = beyond_bounds


def fill(
    where: str | None, templates: Sequence[str], fillings: Sequence[Mapping[str, Any]]
) -> Iterator[list[str] | None]:
    """Yield the templates rendered with each of the fillings; None for a filling that does not fulfil `where`.

    Args:
        where: Jinja expression; None for none.
        templates: texts with Jinja's marks.
        fillings: plain values (numbers, texts, lists, mappings) by the names in the templates.

    Raises:
        TemplateFault: at the first filling that cannot be rendered, or not within the bounds of memory and time.
    """
    return _ask(["fill", where, list(templates), [dict(values) for values in fillings]])


def chat(**arguments: Any) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Return what `render_jinja_template` of transformers returns for these arguments, which are JSON: the text of each
    conversation, and, with `return_assistant_tokens_mask`, the spans of the assistant's turns in each.

    Raises:
        TemplateFault: as `fill`.
    """
    texts, spans = _ask(["chat", parse_own_json(json.dumps(arguments))])
    assert texts is not None and spans is not None
    return texts, [[(start, stop) for start, stop in text_spans] for text_spans in spans]


_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None
_owner = 0


def _ask(question: list[Any]) -> Iterator[list[Any] | None]:
    content = marshal.dumps(question)
    with _lock:
        process = _started()
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # its answer reports the error
                process.stdin.write(LENGTH.pack(len(content)) + content)
                process.stdin.flush()
            answer = _receive(process.stdout)
        except BaseException:  # the next question must not get this answer
            end()
            raise
        if answer is None:
            raise TemplateFault(_end_reason(process.wait()), beyond_bounds=True)
    yield from answer["texts"]
    if "fault" in answer:
        raise TemplateFault(answer["fault"], answer.get("is_own", False), answer.get("beyond_bounds", False))


def _end_reason(code: int) -> str:
    if code == -signal.SIGXCPU:
        return f"it takes more than {CPU_S} s of processor time"
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process that rendered it ended ({reason}): it takes too much memory, or is nested too deep"


def _receive(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next answer; None where the other end is gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = pipe.read(length)
    return dict(parse_own_json(content)) if len(content) == length else None


def _started() -> subprocess.Popen[bytes]:
    global _process, _owner
    if _process is None or _owner != os.getpid() or _process.poll() is not None:
        if _owner != os.getpid():
            _process = None  # that of the process that this one was forked from
        end()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        _process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        if _owner == 0:
            atexit.register(end)
        _owner = os.getpid()
    return _process


def end() -> None:
    """End the process that renders; the next template starts another."""
    global _process
    if _process is not None and _owner == os.getpid():
        _process.kill()
        _process.communicate()
    _process = None
