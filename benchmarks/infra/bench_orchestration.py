"""What orchestration costs: a run with nothing to do against an empty Prefect flow, and bookkeeping against work.

python benchmarks/infra/bench_orchestration.py [CONFIG]     after `stemma up` and one full run of CONFIG

Alternates, in one run: `stemma run CONFIG` with every artifact there, and an empty flow run the same way (through the
worker, then in the process itself). Then the share of the last full run's wall time that was not a stage's own work,
and where our own seconds went.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flows.config.read import load  # noqa: E402
from flows.runs.journal import latest  # noqa: E402
from infra.project import default_root  # noqa: E402
from infra.servers.state import prefect_api_url  # noqa: E402
from infra.store.store import Store  # noqa: E402


def seconds(command: list[str], **variables: str) -> float:
    """Wall seconds of a whole process."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    begun = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    took = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
    return took


def race(config: Path, root: Path, rounds: int) -> None:
    url = prefect_api_url(root)
    if url is None:
        sys.exit("no Prefect server is running for this store: `stemma up` first")
    ours = [sys.executable, "-m", "cli.main", "run", str(config), "--root", str(root)]
    empty = [sys.executable, str(PROJECT / "benchmarks" / "infra" / "empty_flow.py")]
    api = {"PREFECT_API_URL": url}
    times: dict[str, list[float]] = {"empty, worker": [], "stemma run, worker": []}
    for _ in range(rounds):
        times["empty, worker"].append(seconds([*empty, "worker"], **api))
        times["stemma run, worker"].append(seconds(ours))
    print(f"nothing to do, {len(load(config).model_fields_set)} sections, medians of {rounds}, seconds")
    for name, values in times.items():
        print(f"  {name:<22} {statistics.median(values):6.2f}   ({min(values):.2f} to {max(values):.2f})")
    beyond = statistics.median(times["stemma run, worker"]) - statistics.median(times["empty, worker"])
    print(f"  {'beyond the empty flow':<22} {beyond:6.2f}   (aim: at most 1.5)")


def overhead(config: Path, root: Path) -> None:
    """The last run that built anything: wall time, the time in which some stage worked, and what is left."""
    store = Store(root)
    for journal in latest(store.layout.runs, load(config).name):
        result = journal.result()
        if result and all(row["status"] == "built" for row in result["stages"]):
            break
    else:
        print("no run of this config built everything: no overhead to report")
        return
    spans, costs = [], {}
    for row in result["stages"]:
        manifest = store.read(Path(row["path"]))
        assert manifest is not None
        spans.append((_time(manifest.started), _time(manifest.finished)))
        for name, value in manifest.bookkeeping_s.items():
            costs[name] = costs.get(name, 0.0) + value
    worked = _union(spans)
    wall = result["seconds"]
    print(f"\nrun {journal.run_id}: {wall:.1f} s, of which some stage worked {worked:.1f} s")
    print(f"  orchestration overhead {100 * (wall - worked) / wall:.1f} %   (aim: under 5 %)")
    told = ", ".join(f"{name} {1000 * value / len(spans):.1f}" for name, value in sorted(costs.items()))
    print(f"  our own bookkeeping, milliseconds a stage: {told}")


def _time(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


def _union(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=PROJECT / "configs" / "quickstart.yaml")
    parser.add_argument("--root", type=Path, default=default_root())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    overhead(options.config, options.root)
    race(options.config, options.root, options.rounds)
    print(json.dumps({"host cores": os.cpu_count(), "load": os.getloadavg()[0]}))
