"""Waits for the Prefect server of PREFECT_API_URL, then works for a pool, which it makes if there is none.

python -m infra.servers.worker stemma
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from infra.servers.http import answers, misdirected


def main(pool: str) -> None:
    # Imported while the server starts: these are seconds.
    import prefect.cli.worker
    import prefect.runner.runner
    import prefect.workers.process

    from infra.servers.flow_runs import FlowRuns

    health = f"{os.environ['PREFECT_API_URL']}/health"
    while not answers(health):
        # Waiting would not change that.
        if message := misdirected(health):
            sys.exit(f"{health}: {message}")
        time.sleep(0.1)
    runner: Any = prefect.runner.runner
    runner.run_process = FlowRuns(runner.run_process).run_process
    sys.argv = ["prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", os.uname().nodename]
    prefect.cli.app()


if __name__ == "__main__":
    main(sys.argv[1])
