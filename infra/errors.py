"""Errors for users: each names the fault, its place, what was expected, and what to do."""

from __future__ import annotations

import errno
import re
from dataclasses import asdict, dataclass

from infra.secrets import hide

QUOTED_CHARACTERS = 200
MESSAGE_CHARACTERS = 3_000
PATH_CHARACTERS = 500
_LONG_WORD = re.compile(r"\S{501,}")


def shortened(text: str, most: int = QUOTED_CHARACTERS) -> str:
    """Return text of at most `most` characters. If it is cut, the total number of characters follows."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def quoted(value: object, most: int = QUOTED_CHARACTERS) -> str:
    """Return a short form of a value for an error message: a value in a file or command line may have a gigabyte."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}… ({len(value):,} characters)"
    try:
        return shortened(repr(value), most)
    except ValueError:  # Python prints no integer of over 4,300 digits
        return "a number of over 4,300 digits"


def bounded(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """Return a message of at most `most` characters, with words of over 500 characters cut."""
    return shortened(_LONG_WORD.sub(lambda word: shortened(word[0]), text), most)


def _writable(text: str) -> str:
    """Return the text with halves of surrogate pairs as escapes. Arguments and names of files that are not UTF-8 have
    some, and no stream would take them."""
    return text if text.isascii() else text.encode("utf8", "backslashreplace").decode("utf8")


@dataclass(frozen=True)
class Problem:
    """One fault, in the terms of the command contract.

    code: a short stable word for programs (`unknown_key`, `missing_source`, `disk_full`, …).
    path: the dotted config key, or `file:line`, of the fault; empty if neither applies.
    message: what is wrong and what was expected, in one line.
    fix: what to do about it, in one line; empty if there is no advice.
    """

    code: str
    path: str
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        """Hide secrets, bound lengths, and show halves of surrogate pairs as escapes: a message may quote a library's
        text, such as an address with its password, or a file of any size."""
        bounds = {"path": PATH_CHARACTERS, "message": MESSAGE_CHARACTERS, "fix": MESSAGE_CHARACTERS}
        for name, limit in bounds.items():
            object.__setattr__(self, name, _writable(bounded(hide(getattr(self, name)), limit)))

    def __str__(self) -> str:
        prefix = f"{self.path}: " if self.path else ""
        fix = f" ({self.fix})" if self.fix else ""
        return f"{prefix}{self.message}{fix}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class StemmaError(Exception):
    """Base of all errors that are reported in one line instead of a traceback.

    Each subclass has one exit code of the command contract; `status` is its word in `--json`.
    """

    exit_code = 1
    status = "failed"

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems

    def __reduce__(self) -> tuple:
        return type(self), self.problems


class StageError(StemmaError):
    """A stage could not do its work: a missing source, a failed validation, a full disk, a dead process."""


class ConfigError(StemmaError):
    """The config or the command line is wrong; nothing was started."""

    exit_code = 2
    status = "invalid"


class MissingUpstream(ConfigError):
    """A single stage was requested, and an artifact that it needs does not exist."""


class GateRefused(StemmaError):
    """A gate refused the model."""

    exit_code = 3
    status = "refused"


class Cancelled(StemmaError):
    """The run was cancelled."""

    exit_code = 130
    status = "cancelled"

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*(problems or (Problem("cancelled", "", "the run was cancelled"),)))


def stage_error(code: str, path: str, message: str, fix: str = "") -> StageError:
    return StageError(Problem(code, path, message, fix))


def disk_failure(error: BaseException, path: str) -> StageError | None:
    """Return the error to report for a disk that failed to read or write (EIO), also under SQLite; None for others."""
    is_sqlite = getattr(error, "sqlite_errorcode", 0) & 0xFF == 10  # SQLITE_IOERR
    if not is_sqlite and not (isinstance(error, OSError) and error.errno == errno.EIO):
        return None
    name = str(getattr(error, "filename", None) or path)
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    message = f"the disk failed to read or write it: {reason}"
    return stage_error("disk_failed", name, message, "examine the disk (dmesg, smartctl), and run again to continue")
