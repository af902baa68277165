"""Secrets: they come from the environment, are refused in configs, and are taken out of whatever is said or written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, unquote

HIDDEN = "•••"
SHORTEST = 6
"""Shorter values are left alone: `true` or `8080` are no secrets, and hiding them would garble every line."""

_SECRET_NAME = re.compile(
    r"SECRET|TOKEN(?!IZ)|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH(?!OR)|WEBHOOK|^STEMMA_NOTICE_",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile(r"(_FILE|_PATH|_DIR|_HOME|_SOCK|_URI|_ENDPOINT|_HOST|_PORT)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"\w://[^/\s:@]*:([^/\s@]+)@")
_RECOGNISED = (
    (_URL_PASSWORD, "a URL with a password"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "an AWS access key"),
    (re.compile(r"\bhf_[A-Za-z0-9]{30,}"), "a Hugging Face token"),
    (re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,})"), "a GitHub token"),
    (re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/\w+/\w+/\w+"), "a Slack token"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), "a private key"),
)
_TOKENS = [pattern for pattern, _ in _RECOGNISED if pattern is not _URL_PASSWORD]


def hide(text: str) -> str:
    """The text without the secrets that this process's environment holds."""
    return Hider().hide(text)


class Hider:
    """Takes out of texts the secrets that the environment held when this was made, and what looks like one."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        found = set(_secrets(os.environ if environ is None else environ))
        forms = {form for secret in found for form in (secret, quote(secret, safe=""), unquote(secret))}
        longest_first = sorted((form for form in forms if len(form) >= SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def hide(self, text: str) -> str:
        text = self._pattern.sub(HIDDEN, text) if self._pattern else text
        for pattern in _TOKENS:
            text = pattern.sub(HIDDEN, text)
        return text


class HidingStream:
    """A text stream that secrets do not get through; all else is the wrapped stream's business."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._hider = Hider()

    def write(self, text: str) -> int:
        self._stream.write(self._hider.hide(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def recognised(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, what it looks like) of each text in plain data that has no business in a config file."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from recognised(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from recognised(item, f"{path}.{number}")
    elif isinstance(value, str):
        yield from ((path, told) for pattern, told in _RECOGNISED if pattern.search(value))


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        yield from _URL_PASSWORD.findall(value)
        if _SECRET_NAME.search(name) and not _PLACE_NAME.search(name):
            yield value
            user, colon, password = value.partition(":")
            if colon and user.isidentifier():
                yield password
