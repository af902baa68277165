"""Put on PYTHONPATH, makes the builds of one stage fail one after the other, in its own process, with real exceptions.

STEMMA_TEST_FAULTS is {"stage": id, "done": file, "raise": [Python expressions]}; once all were raised it builds.
Stages are not forked where such a file is on PYTHONPATH: it has to act in each process.
"""

import functools
import json
import os
import sys
from pathlib import Path

faults = json.loads(os.environ.get("STEMMA_TEST_FAULTS", "{}"))
if (
    sys.orig_argv[1:3] == ["-m", "tasks.processes.child"]
    and json.loads(Path(sys.orig_argv[3]).read_text())["node"] == faults["stage"]
):
    from tasks.stage import Stage

    load = Stage.load

    def failing(function, config, inputs, out, run):
        import torch
        import torch.distributed

        done = Path(faults["done"])
        past = len(done.read_text()) if done.exists() else 0
        if past < len(faults["raise"]):
            done.write_text("x" * (past + 1))
            raise eval(faults["raise"][past], {"torch": torch})
        return function(config, inputs, out, run)

    Stage.load = lambda stage: functools.partial(failing, load(stage)) if stage.name == faults["stage"] else load(stage)
