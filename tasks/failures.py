"""Any exception as a failure that a user can read: a code, what failed, what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
import traceback
from pathlib import Path

from infra.errors import Problem, StageError, StemmaError
from infra.secrets import hide
from infra.store.store import disk_error

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}


def failure_of(error: BaseException, where: str, root: Path) -> StemmaError:
    """The error to tell of: itself if a message was written for it, else one that names it.

    where: the stage, or what else failed, for errors that name no place of their own. root: the store's folder.
    """
    if isinstance(error, StemmaError):
        return error
    if isinstance(error, OSError | sqlite3.OperationalError):
        told = disk_error(error, where, root)
        if isinstance(told, StemmaError):
            return told
    if isinstance(error, OSError) and error.errno in _REFUSED:
        path = str(error.filename or root)
        message = f"{where} may not write or read it: {error.strerror}"
        return StageError(Problem("not_permitted", path, message, f"let user {os.geteuid()} write under {root}"))
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return StageError(Problem("crashed", where, line, "--debug shows the traceback; so does the log on the page"))


def traceback_of(error: BaseException) -> str:
    """Where an exception came from, without the secrets that it may quote."""
    return hide("".join(traceback.format_exception(error)))
