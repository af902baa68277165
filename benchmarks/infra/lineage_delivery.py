"""What it costs to tell MLflow: for the sender, and for the relay.

python benchmarks/infra/lineage_delivery.py --lines 2000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infra.lineage.ledger import Ledger
from infra.lineage.messages import MetricsFile, PipelineStarted, StageFinished, StageStarted
from infra.lineage.outbox import Outbox
from infra.lineage.tracking import database_uri

VALUES_A_LINE = 5


def main(lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        begin = time.time()
        sender = {"host": "", "pid": 0, "started": 0.0}
        started = StageStarted("t", "p", "bench", "pretrain", "0" * 16, begin, config={"lr": 1e-3})
        outbox = Outbox(root)
        _say("send one message", _seconds(lambda: outbox.send(started), times=200))

        _say("import MLflow", _seconds(_import_delivery))
        from infra.lineage.delivery import Delivery

        ledger = Ledger(root)
        _say("make the database", _seconds(lambda: Delivery(root, database_uri(root), ledger)))
        delivery = Delivery(root, database_uri(root), ledger)
        _say("first message", _seconds(lambda: delivery.deliver(PipelineStarted("p", "bench", begin), sender)))
        _say("start of a stage", _seconds(lambda: delivery.deliver(started, sender)))
        journal = root / "journal.jsonl"
        _write_metrics(journal, lines, begin)
        delivery.deliver(MetricsFile("t", str(journal)), sender)
        _say("one metric, in batches", _seconds(delivery.follow_metrics) / (lines * VALUES_A_LINE))
        finished = StageFinished("t", "FINISHED", begin + 1, {"validation_loss": 3.2})
        _say("end of a stage", _seconds(lambda: delivery.deliver(finished, sender)))
        ledger.close()


def _import_delivery() -> None:
    import infra.lineage.delivery  # noqa: F401


def _write_metrics(path: Path, lines: int, begin: float) -> None:
    with open(path, "w") as file:
        for step in range(lines):
            values = {f"train/{index}": step + index / 10 for index in range(VALUES_A_LINE)}
            file.write(json.dumps({"kind": "metric", "time": begin + step, "step": step, "values": values}) + "\n")


def _seconds(work: Callable[[], object], times: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times


def _say(what: str, seconds: float) -> None:
    print(f"{what:24}{1e3 * seconds:12.3f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=2000, help="metric lines of five figures each")
    main(parser.parse_args().lines)
