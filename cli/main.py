"""Where the `stemma` command begins: it listens for interrupts before anything else is imported."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from cli.answer import CANCELLED, answer, cancelled
from infra import interrupts


def main() -> None:
    """Runs the command line and exits with its code. An interrupt at any moment is 130, and `cancelled` with --json."""
    interrupts.listen()
    try:
        from cli.commands import run

        code = run()
    except BaseException as error:
        # Prefect and others raise exceptions of their own for it.
        if isinstance(error, SystemExit) or not (
            interrupts.interrupt_received.is_set() or isinstance(error, KeyboardInterrupt)
        ):
            raise
        if "--json" in sys.argv:
            answer(cancelled())
        code = CANCELLED
    _leave(code)


def _leave(code: int) -> None:
    """Ends the process as the interpreter does, but for taking itself apart: threads of Prefect and others still run
    then, and one that returns from native code can abort a command that has done its work, with exit code -6."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # whoever read it has gone; the interpreter has its own code for that
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    main()
