"""Finds keys, tokens and passwords in a text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

# What every match of a pattern contains → the pattern: most texts contain none of these, and are done.
_KNOWN = tuple(
    (mark, re.compile(pattern))
    for mark, pattern in (
        ("AKIA", r"\bAKIA[0-9A-Z]{16}\b"),
        ("ASIA", r"\bASIA[0-9A-Z]{16}\b"),
        ("gh", r"\bgh[pousr]_[A-Za-z0-9]{36,}"),
        ("github_pat_", r"\bgithub_pat_\w{40,}"),
        ("glpat-", r"\bglpat-[A-Za-z0-9_-]{20,}"),
        ("hf_", r"\bhf_[A-Za-z0-9]{30,}"),
        ("sk-", r"\bsk-(?:proj-|ant-)?(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,}"),
        ("k_live_", r"\b[rsp]k_live_[A-Za-z0-9]{16,}"),
        ("k_test_", r"\b[rsp]k_test_[A-Za-z0-9]{16,}"),
        ("AIza", r"\bAIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])"),
        ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
        ("hooks.slack.com", r"hooks\.slack\.com/services/\w+/\w+/\w+"),
        ("eyJ", r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
        (
            "PRIVATE KEY",
            r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[\s\S]{0,20000}?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)?",
        ),
    )
)
_URL_PASSWORD = re.compile(r"://[^/\s:@]{1,64}:([^/\s@]{3,64})@")
# The second halves of the names of secrets, and what stands behind a name; _NAME must end where that begins.
_NAME_ENDS = ("word", "asswd", "phrase", "ecret", "oken", "key", "WORD", "PHRASE", "ECRET", "OKEN", "KEY", "Key")
_NAME = re.compile(r"(?:password|passwd|passphrase|secret|token|(?:api|access|auth|secret)[_-]?key)$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?:{'|'.join(_NAME_ENDS)})(?P<value>[\"']?\s{{0,2}}(?::=|=>|[:=]|\bis\b)\s{{0,2}}[\"']?([^\s\"'<>,;(){{}}\[\]]{{8,128}}))"
)
_PATH_OR_NAME = re.compile(r"[./]\w+[./]|\w\(|^[\w-]+\.[\w.]+$")
_LONGEST_NAME = 12
_LEAST_BITS = 3.0


def find_secrets(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each secret; of an assignment or a URL that of the secret part alone."""
    for mark, pattern in _KNOWN:
        if mark in text:
            yield from (match.span() for match in pattern.finditer(text))
    if "://" in text and "@" in text:
        yield from (match.span(1) for match in _URL_PASSWORD.finditer(text))
    for end in _NAME_ENDS:
        at = text.find(end)
        while at >= 0:
            match = _ASSIGNED.match(text, at)
            if match and _NAME.search(text[max(0, at - _LONGEST_NAME) : match.start("value")]) and _is_random(match[2]):
                yield match.span(2)
            at = text.find(end, at + len(end))


def _is_random(value: str) -> bool:
    """Whether a value looks drawn and not written: letters and digits mixed, at least 3 bits a character."""
    if not re.search("[0-9]", value) or not re.search("[A-Za-z]", value) or _PATH_OR_NAME.search(value):
        return False
    counts = Counter(value).values()
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts) >= _LEAST_BITS
