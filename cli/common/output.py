"""Output of commands: one JSON document on stdout, or lines for a person; errors in one line each."""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import click

from cli.common.answer import CANCELLED, answer, begin, cancelled
from infra.errors import ConfigError, Problem, StageError, StemmaError, bounded, disk_failure, shortened, stage_error
from infra.installed import lock_problem
from infra.process.interrupts import interrupt_received
from infra.project import name_user

_FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN_PIPE = 141
"""Exit code of a command whose reader ended, such as `head`: as a shell reports SIGPIPE."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --debug to a command, and convert its errors to the command contract.

    The command returns (document, exit code) and, unless --json was given, has printed what a person reads; its
    `as_json` parameter is true if --json was given. Errors become the document's `errors`, or one line each on stderr.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout; logs go to stderr.")
    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @wraps(function)
    def command(*args: Any, as_json: bool, debug: bool, **kwargs: Any) -> None:
        begin()
        name_user()
        try:
            document, code = function(*args, as_json=as_json, **kwargs)
        except (click.UsageError, SystemExit):
            raise
        except BaseException as error:
            if debug:
                traceback.print_exc()
            if isinstance(error, BrokenPipeError) and _has_no_reader():
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
                sys.exit(BROKEN_PIPE)
            if interrupt_received.is_set() or isinstance(error, KeyboardInterrupt):
                document, code = cancelled(), CANCELLED
            elif isinstance(error, StemmaError):
                document, code = failure(error), error.exit_code
            else:
                reported = _as_stemma_error(error)
                document, code = failure(reported), reported.exit_code
            if not as_json and code != CANCELLED:
                print_problems(document["errors"])
        if as_json:
            answer(document)
        sys.stdout.flush()
        sys.exit(code)

    return command


def _has_no_reader() -> bool:
    """True if stdout is a pipe whose reader has ended, as after `| head`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def _as_stemma_error(error: BaseException) -> StemmaError:
    """The error to show to the user. Failures of the disk, permissions and file names are not bugs of the program,
    so they are reported without a traceback wherever they are raised."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename2 or error.filename or "")
        message = f"a file name has at most 255 bytes, this one has {max(map(len, os.fsencode(name).split(b'/'))):,}"
        return ConfigError(Problem("name_too_long", shortened(name), message, "shorten it"))
    if (failed := disk_failure(error, "")) is not None:
        return failed
    if isinstance(error, OSError) and error.errno in (*_FULL, *_REFUSED):
        path = str(error.filename2 or error.filename or "")
        if error.errno in _FULL:
            return stage_error(
                "disk_full",
                path,
                "the disk is full: not everything was written",
                "free some space and run the command again",
            )
        message = f"user {os.geteuid()} has no permission to read or write it: {error.strerror}"
        return stage_error("not_permitted", path, message, "grant that user access, or use another path")
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, ImportError) and (problem := lock_problem("not_installed", "", line)):
        return StageError(problem)
    return stage_error("crashed", "", line, "--debug prints the traceback")


def failure(error: StemmaError) -> dict[str, Any]:
    return {"status": error.status, "errors": [problem.as_json() for problem in error.problems]}


def print_problems(problems: Any) -> None:
    for problem in problems:
        message = problem if isinstance(problem, Problem) else Problem(**problem)
        click.secho("error: ", fg="red", bold=True, err=True, nl=False)
        click.echo(str(message), err=True)


def print_warnings(problems: Sequence[Problem]) -> None:
    for problem in problems:
        click.secho("warning: ", fg="yellow", bold=True, err=True, nl=False)
        click.echo(str(problem), err=True)


def fail_usage(error: click.UsageError) -> int:
    """Report bad usage: exit code 2, as JSON if --json was given."""
    error = click.UsageError(bounded(error.format_message()), error.ctx)
    if "--json" in sys.argv:
        problem = Problem("bad_usage", "", error.format_message(), "see stemma --help")
        answer({"status": "invalid", "errors": [problem.as_json()]})
    else:
        error.show()
    return 2


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """A table for a person; `columns` maps keys of the rows to headings."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    styles = {"built": "green", "reused": "cyan", "reuse": "cyan", "failed": "red", "build": "yellow", "skipped": "dim"}
    for key, heading in columns.items():
        table.add_column(heading, overflow="fold", justify="right" if key == "seconds" else "left")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(key)), style=styles.get(str(row.get(key)), "")) for key in columns))
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)


def with_short_artifacts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their `artifact` as a person types it: `sft/0761f4fa`."""
    return [{**row, "artifact": short_artifact(row["artifact"]) if row.get("artifact") else None} for row in rows]


def short_artifact(artifact: str) -> str:
    """Short address such as `sft/0761f4fa`. Every command accepts it if no other artifact has the same prefix."""
    stage, _, fingerprint = artifact.rpartition("/")
    return f"{stage}/{fingerprint[:8]}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    return str(value)
