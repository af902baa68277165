"""Entry point of the command `stemma`: makes the application's packages known to this process and those it starts."""

from __future__ import annotations

import os

from stemma.home import IN_WHEEL, add_home, variables


def main() -> None:
    """Run the command line; see `cli.main`."""
    add_home()
    if IN_WHEEL:
        os.environ.update(variables())
    from cli.main import main as run

    run()


if __name__ == "__main__":
    main()
