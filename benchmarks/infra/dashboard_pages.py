"""First paint of the page's home and list of models on a store of many artifacts, made of manifests alone.

python -m benchmarks.infra.dashboard_pages [--artifacts 5000] [--points 1000000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from math import inf
from pathlib import Path
from statistics import median

from starlette.testclient import TestClient

from benchmarks.infra.manifests import write_manifest
from evaluation.pages.charts import Line, line_chart, smoothed
from flows.dashboard.curves import Curves
from flows.dashboard.reading import SETTLED_NS
from flows.dashboard.server import app
from flows.runs.journal import JournalRow, RunJournal
from infra.store.manifest import Manifest, SourceRecord

STAGES = ("pretrain", "sft", "reward_model", "rlhf", "tokenizer")
RUNS, ROUNDS = 200, 9


def make_store(root: Path, artifacts: int) -> None:
    """Write a store of pipelines of five steps, each reading from the one before it, and its runs."""
    (root / "runs").mkdir(parents=True)
    (root / "format").write_text("1\n", encoding="utf8")
    before: Manifest | None = None
    for number in range(artifacts):
        stage = STAGES[number % len(STAGES)]
        fingerprint = f"{number:016x}"
        before = write_manifest(
            root / stage / fingerprint,
            stage,
            fingerprint,
            {"model": before} if before and number % len(STAGES) else {},
            files=12,
            figures=20,
            config={f"key_{key}": key for key in range(60)},
            identity={},
            sources=(SourceRecord("read", "0" * 64, {"text.jsonl": "0" * 64}),),
            step=stage,
            pipeline=f"pipeline-{number % 7}",
            finished=f"2026-11-28T{number % 24:02d}:00:00.000+00:00",
        )
    for number in range(RUNS):
        journal = RunJournal(root / "runs", f"20261128-{number:06d}-000000-aaaaaa")
        journal.begin(pipeline=f"pipeline-{number % 7}", config="c.yaml")
        address = {"fingerprint": f"{number:016x}", "digest": f"{number:064x}"}
        rows = [{"stage": stage, "status": "built", **address} for stage in STAGES]
        for stage in STAGES:
            journal.row(JournalRow(stage, "built", **address, seconds=60.0))
        journal.end({"status": "done", "errors": [], "stages": rows, "seconds": 300.0})


def milliseconds(client: TestClient, path: str) -> tuple[list[float], list[float]]:
    """Return the time of each request, and the processor time of it, which other programs change little."""
    taken, processor = [], []
    for _ in range(ROUNDS):
        started, used = time.perf_counter(), time.process_time()
        assert client.get(path).status_code == 200
        taken.append(1000 * (time.perf_counter() - started))
        processor.append(1000 * (time.process_time() - used))
    return taken, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=5000)
    parser.add_argument("--points", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        make_store(root, options.artifacts)
        client = TestClient(app(root, None), base_url="http://127.0.0.1:4100")
        time.sleep(SETTLED_NS / 1e9)  # the page trusts a folder that changed a moment ago for one look only
        measured = {path: milliseconds(client, path) for path in ("/", "/models", "/model/rlhf")}
    curves = Curves(Path("none.jsonl"))
    curves.points["loss"] = [(float(step), 3.0 + 1.0 / (1 + step)) for step in range(options.points)]
    started = time.perf_counter()
    points = curves.between("loss", -inf, inf)
    chart = line_chart("loss", [Line("loss", smoothed(points, 100.0), "train")], x_label="batch", y_label="")
    drawn_ms = 1000 * (time.perf_counter() - started)
    rows = {
        path: {
            "first_ms": round(taken[0], 1),
            "median_ms": round(median(taken[1:]), 1),
            "least_ms": round(min(taken), 1),
            "first_processor_ms": round(processor[0], 1),
            "median_processor_ms": round(median(processor[1:]), 1),
        }
        for path, (taken, processor) in measured.items()
    }
    curve = {"points": options.points, "drawn_ms": round(drawn_ms, 1), "svg_bytes": len(chart)}
    print(json.dumps({"artifacts": options.artifacts, "pages": rows, "curve": curve}, indent=1))


if __name__ == "__main__":
    main()
