"""Entry point of the `stemma` command. Interrupt handlers are installed before anything else is imported."""

from __future__ import annotations

import sys

from cli.common.answer import CANCELLED, answer, cancelled
from infra.process import interrupts


def main() -> None:
    """Run the command line and exit with its code. An interrupt at any moment exits with 130 (`cancelled` in JSON)."""
    interrupts.listen()
    try:
        from cli.commands import run

        code = run()
    except BaseException as error:
        # Prefect and others raise their own exceptions for it.
        if isinstance(error, SystemExit) or not (
            interrupts.interrupt_received.is_set() or isinstance(error, KeyboardInterrupt)
        ):
            raise
        if "--json" in sys.argv:
            answer(cancelled())
        code = CANCELLED
    from infra.process.lifetime import leave

    leave(code)


if __name__ == "__main__":
    main()
