"""Stemma from Python: run and check pipelines, load models, and read what a store holds as data frames.

    import stemma

    plan = stemma.check("configs/quickstart.yaml")
    result = stemma.run("configs/quickstart.yaml", settings={"pretrain.duration": "100 batches"})
    model, tokenizer = stemma.load_model("rlhf"), stemma.load_tokenizer("rlhf")
    stemma.metrics("pretrain").query("metric == 'train/loss'").plot(x="step", y="value")

Importing this package imports nothing else of Stemma and starts nothing. `run` and `check` are the commands of the same
names, in separate processes; all else works in this process and only reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stemma.pipelines import CheckResult, RunResult, StageRow, check, run
from stemma.store import Comparison, artifacts, compare, figures, load_model, load_tokenizer, metrics, model_path, runs

if TYPE_CHECKING:
    from infra.errors import Problem, StemmaError

__all__ = [
    "CheckResult",
    "Comparison",
    "Problem",
    "RunResult",
    "StageRow",
    "StemmaError",
    "artifacts",
    "check",
    "compare",
    "figures",
    "load_model",
    "load_tokenizer",
    "metrics",
    "model_path",
    "run",
    "runs",
]


def __getattr__(name: str) -> Any:
    """The errors of Stemma, which are imported when they are named."""
    if name in ("Problem", "StemmaError"):
        from stemma.home import add_home

        add_home()
        from infra import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
