"""lm-eval's tasks of one model as partitions, several of which a cluster named by `launch.ray` asks at once.

Each worker reads the model from the store, which all machines see, and asks one task. Tasks then share no batches, so
the figures equal those of one process up to rounding, which affects a model's sums. A task that itself draws at random
draws as it does when it is the only task.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.config import BenchmarksConfig
from infra.launch.config import LaunchConfig
from infra.process.pace import report
from infra.process.partitions import map_partitions, partition_folder
from infra.run import Run

if TYPE_CHECKING:
    from evaluation.generation.language_model import LoadedModel
    from evaluation.harness.vllm_model import VllmLM

_RESULTS = "found.pickle"
_LAUNCH = {"device", "precision", "threads"}
"""Keys of `launch:` that affect how a worker asks a model; a change of other keys keeps finished partitions valid."""
_Item = tuple[int, BenchmarksConfig, str, bool, LaunchConfig]


def by_workers(config: BenchmarksConfig, run: Run) -> bool:
    """Return True if the workers of `run.mapper` ask the tasks; a vLLM server belongs to this stage alone."""
    return run.mapper is not None and config.engine == "own"


def evaluate_tasks(
    config: BenchmarksConfig, lm: LoadedModel | VllmLM | None, folder: Path, run: Run, *, own_shots: bool = True
) -> dict[str, Any]:
    """Run `evaluation.harness.tasks.evaluate_model` on all tasks: here with `lm`, or, if it is None, in workers with
    the model in `folder`."""
    if lm is not None:
        from evaluation.harness.tasks import evaluate_model

        return evaluate_model(config, lm, run, own_shots=own_shots)
    launch = LaunchConfig(**run.launch.model_dump(include=_LAUNCH))
    items: list[_Item] = [(index, config, str(folder), own_shots, launch) for index in range(len(config.tasks))]
    # One folder per number of shots, so that an interrupted stage finds all their results again.
    step = f"tasks_{config.num_fewshot}" + ("" if own_shots else "_alone")
    summaries = map_partitions(run, step, _evaluate_one, items, unit="tasks")
    for name, message in dict.fromkeys(tuple(event) for summary in summaries for event in summary["events"]):
        run.event(name, message)
    results: dict[str, Any] = {}
    for index in range(len(items)):
        part = pickle.loads((partition_folder(run, step, index) / _RESULTS).read_bytes())
        for key, value in part.items():
            results[key] = {**results.get(key, {}), **value} if isinstance(value, Mapping) else value
    return results


def _evaluate_one(item: _Item, out: Path) -> dict[str, Any]:
    from evaluation.generation.language_model import load_model
    from evaluation.harness.tasks import evaluate_model

    index, config, folder, own_shots, launch = item
    with tempfile.TemporaryDirectory(prefix="stemma-task-") as work:
        run = _WorkersRun(Path(work), launch, out)
        results = evaluate_model(config, load_model(Path(folder), run), run, own_shots=own_shots, only=index)
        (out / _RESULTS).write_bytes(pickle.dumps(results))
    return {"events": run.events}


class _WorkersRun(Run):
    """Run that reports the finished fraction of a partition, and keeps events for the stage to record, since a worker
    has no journal."""

    def __init__(self, work_dir: Path, launch: LaunchConfig, out: Path) -> None:
        super().__init__(work_dir, launch)
        self._out = out
        self.events: list[tuple[str, str]] = []

    def progress(self, done: float, total: float | None, unit: str, note: str = "") -> None:
        if total:
            report(self._out, done / total)

    def event(self, name: str, message: str, **fields: Any) -> None:
        self.events.append((name, message))
