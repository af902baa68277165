"""Contents of a store: runs, artifacts, figures and curves as data frames, and models as objects of transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stemma.home import add_home

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from infra.store.store import Store

Root = str | os.PathLike[str] | None


def runs(root: Root = None) -> pd.DataFrame:
    """Runs of pipelines, newest first: run_id, pipeline, config, status, started, seconds, built, reused."""
    import pandas as pd

    store = _store(root)
    from flows.runs import listing

    columns = ["run_id", "pipeline", "config", "status", "started", "seconds", "built", "reused"]
    frame = pd.DataFrame(list(listing.runs(store)), columns=columns)
    frame["started"] = pd.to_datetime(frame["started"], utc=True)
    return frame


def artifacts(root: Root = None, *, models_only: bool = False) -> pd.DataFrame:
    """Finished artifacts, newest first: artifact, step, pipeline, finished, bytes, headline, path."""
    import pandas as pd

    columns = ["artifact", "step", "pipeline", "finished", "bytes", "headline", "path"]
    frame = pd.DataFrame(_artifact_rows(root, models_only), columns=columns)
    frame["finished"] = pd.to_datetime(frame["finished"], utc=True)
    return frame


def figures(root: Root = None, *, models_only: bool = False) -> pd.DataFrame:
    """Figures of the artifacts, one row per figure: artifact, step, figure, value."""
    import pandas as pd

    rows = [
        (row["artifact"], row["step"], name, value)
        for row in _artifact_rows(root, models_only)
        for name, value in row["figures"].items()
    ]
    return pd.DataFrame(rows, columns=["artifact", "step", "figure", "value"])


def metrics(*names: str, root: Root = None) -> pd.DataFrame:
    """Metrics that artifacts recorded while they were built, one row per point: artifact, step, metric, value.

    Args:
        names: artifacts such as `sft/1f2e`, or stages such as `pretrain` for their newest.
    """
    import pandas as pd

    store = _store(root)
    from flows.dashboard.curves import METRICS, Curves
    from infra.store.reference import resolve
    from infra.store.store import address_of

    rows: list[tuple[str, int, str, float]] = []
    for name in names:
        folder, manifest = resolve(store, name)
        if not any(file.path == f"aux/{METRICS}" for file in manifest.files):
            continue
        store.peek(manifest, f"aux/{METRICS}", folder=folder)
        curves = Curves(folder / "aux" / METRICS)
        curves.follow()
        rows += [
            (address_of(manifest), int(step), metric, float(value))
            for metric, points in curves.points.items()
            for step, value in points
        ]
    return pd.DataFrame(rows, columns=["artifact", "step", "metric", "value"])


@dataclass(frozen=True)
class Comparison:
    """Differences between artifacts, runs or configs; the columns are the names that were given.

    differences: settings, sources, versions and code that are not the same. figures: their figures. paired: differences
        from the first over the same items, with their 95 % intervals; `shown` is true if zero is outside.
    """

    differences: pd.DataFrame
    figures: pd.DataFrame
    paired: pd.DataFrame
    warnings: tuple[str, ...]


def compare(*names: str, root: Root = None) -> Comparison:
    """Compare artifacts, runs or configs with the first, as `stemma compare` does."""
    import pandas as pd

    store = _store(root)
    from flows.compare.compare import compare as compared
    from flows.compare.compared import find
    from infra.errors import ConfigError, Problem

    if len(names) < 2:
        raise ConfigError(Problem("bad_comparison", "", "two or more names were expected", "compare('sft', 'rlhf')"))
    document = compared(find(store, names))
    columns = list(names)

    def table(rows: list[dict[str, Any]], key: str) -> pd.DataFrame:
        return pd.DataFrame([row["values"] for row in rows], index=[row[key] for row in rows], columns=columns)

    keys = ["name", "figure", "unit", "difference", "low", "high", "shown"]
    return Comparison(
        table(document["differences"], "key"),
        table(document["figures"], "figure"),
        pd.DataFrame(document["paired"], columns=keys),
        tuple(str(Problem(**warning)) for warning in document["warnings"]),
    )


def model_path(name: str, root: Root = None) -> Path:
    """The folder of a model: a folder, an artifact such as `sft/1f2e`, or a stage such as `rlhf` for its newest."""
    store = _store(root)
    from cli.models.chat import model_folder

    return model_folder(name, store.root)


def load_model(name: str, root: Root = None) -> PreTrainedModel:
    """The model with its weights, checked as before training: on the CPU, in the precision in which it is stored.

    Args:
        name: as of `model_path`.
    """
    folder = model_path(name, root)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from corpus.model_folders.pretrained import load_pretrained_model
    from infra.io.json import read_own_json

    kinds = read_own_json(folder / "config.json").get("architectures") or []
    scores = any(kind.endswith("ForSequenceClassification") for kind in kinds)
    model: PreTrainedModel = load_pretrained_model(
        AutoModelForSequenceClassification if scores else AutoModelForCausalLM, folder
    )
    return model.eval()


def load_tokenizer(name: str, root: Root = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its chat template if it has one. name: as of `model_path`."""
    folder = model_path(name, root)
    from corpus.model_folders.pretrained import load_pretrained_tokenizer

    tokenizer: PreTrainedTokenizerBase = load_pretrained_tokenizer(folder)
    return tokenizer


def _store(root: Root) -> Store:
    add_home()
    from infra import project
    from infra.store.layout import Layout
    from infra.store.store import Store

    return Store(Layout(project.root_of(os.fspath(root) if root is not None else _default_root())).root, reading=True)


def _default_root() -> str:
    """The store of the commands that run in this folder."""
    from stemma.home import variables

    return os.environ.get("STEMMA_ROOT") or variables().get("STEMMA_ROOT", "")


def _artifact_rows(root: Root, models_only: bool) -> list[dict[str, Any]]:
    store = _store(root)
    from flows.runs import listing

    return listing.artifacts(store, models_only=models_only)
