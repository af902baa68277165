"""Put on PYTHONPATH, makes the builds of one stage fail one after the other, in its own process, with real exceptions.

STEMMA_TEST_FAULTS is {"stage": id, "done": file, "raise": [Python expressions]}; once all were raised it builds.
"""

import json
import os
import sys
from pathlib import Path

faults = json.loads(os.environ.get("STEMMA_TEST_FAULTS", "{}"))
if (
    sys.orig_argv[1:3] == ["-m", "tasks.child"]
    and json.loads(Path(sys.orig_argv[3]).read_text())["node"] == faults["stage"]
):
    import importlib
    from dataclasses import replace

    module = importlib.import_module(f"tasks.{faults['stage']}")
    build = module.STAGE.build

    def failing(config, inputs, out, run):
        import torch
        import torch.distributed

        done = Path(faults["done"])
        past = len(done.read_text()) if done.exists() else 0
        if past < len(faults["raise"]):
            done.write_text("x" * (past + 1))
            raise eval(faults["raise"][past], {"torch": torch})
        return build(config, inputs, out, run)

    module.STAGE = replace(module.STAGE, build=failing)
