"""A sweep that a person starts in the Prefect page: `<pipeline>/sweep`, whose form asks for keys and values.

`stemma deploy CONFIG` makes the deployment. Each trial is a run of `<pipeline>/pipeline` on the worker, with a page of
its own, as those of `stemma sweep` are where `stemma up` runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from pydantic import BaseModel, Field

from evaluation.pages.sweep_page import bounds, isoflop_sentences, law_sentences, number
from flows.config.forms import renamed
from flows.config.graph import graph
from flows.config.read import PipelineConfig
from flows.deployment.deploy import apply_deployment
from flows.prefect.admission import turned_away
from flows.prefect.schedules import Timing
from flows.runs.journal import RunJournal
from flows.runs.trials import Trials
from flows.sweeps.definition import MEASURED, Pruner, Sampler, Wishes, define
from flows.sweeps.law import check
from flows.sweeps.space import read_space, settings_text
from flows.sweeps.whole import whole_sweep
from infra.errors import Problem, StemmaError
from infra.lineage.ledger import run_url
from infra.project import root_of
from infra.store.roots import shown_root
from infra.store.store import Store
from training.config import TrainerConfig

SWEEP = "sweep"
"""Name in the deployment `<pipeline>/sweep`."""


class SweptKey(BaseModel):
    """A config key and the values to try."""

    key: str = Field(description="Dotted, such as pretrain.optimizer.learning_rate.")
    values: str = Field(description="A list such as 1e-4, 3e-4 or a range such as 1e-4..1e-2@log.")


def _name() -> str:
    keys = flow_run.get_parameters().get("keys") or []
    names = [one["key"] if isinstance(one, dict) else one.key for one in keys]
    return f"sweep of {', '.join(name.rpartition('.')[2] for name in names)}" if names else "sweep"


@flow(name=SWEEP, flow_run_name=_name, persist_result=False)
def sweep_run(
    config_path: str,
    keys: list[SweptKey] = [],  # noqa: B006 - Prefect shows it as the form's default
    seeds: int = 1,
    measure: str = "",
    sampler: Sampler | None = None,
    trials: int | None = None,
    pruner: Pruner = "none",
    at_once: int = 1,
    law: bool = False,
    maximise: bool | None = None,
    ablations: dict[str, dict[str, Any]] = {},  # noqa: B006
    settings: dict[str, Any] = {},  # noqa: B006
    root: str = "",
) -> State:
    """Run the pipeline with several values of its keys and report the best, as `stemma sweep` does.

    Args:
        config_path: The pipeline's config file, read when the sweep begins.
        keys: Keys to vary; several keys form a grid.
        seeds: Runs per choice, with different seeds.
        measure: STEP.FIGURE to compare; empty for the validation loss of the first training that the sweep changes.
        sampler: Method of choosing settings; empty for grid of lists and tpe of ranges.
        trials: Number of settings to draw, for random and tpe.
        pruner: Stop drawn trials early if their intermediate validation is poor.
        at_once: Trials to run in parallel.
        law: Fit a scaling law to sizes and durations.
        maximise: True if a larger figure is better; empty to derive it from its name.
        ablations: Settings to compare with the unchanged config, {NAME: {KEY: VALUE}}, in place of keys.
        settings: Values for the whole sweep, by dotted key.
        root: The store's folder.
    """
    if state := turned_away(config_path):
        return state
    try:
        space = read_space(tuple(f"{one.key.strip()}={one.values.strip()}" for one in keys))
        wishes = Wishes(
            Path(config_path),
            settings_text(settings),
            space,
            ablations,
            seeds,
            measure.strip(),
            maximise,
            sampler,
            pruner,
            trials,
            lambda: root_of(root),
        )
        sweep = define(wishes)
        if law:
            check(sweep)
        store = Store(root_of(root))
        document = whole_sweep(sweep, store, max(1, at_once), law, None, get_run_logger().info)
    except StemmaError as error:
        return Failed(message=str(error))
    create_markdown_artifact(_sheet(document, store), key="sweep", description=f"Sweep by {sweep.measure}")
    best = document["best"]
    if document["status"] == "cancelled":
        return Cancelled(message="cancelled; Retry or the same form continues it")
    if document["status"] != "done":
        return Failed(message="; ".join(str(Problem(**one)) for one in document["errors"][:3]))
    return Completed(message=f"best: {best['name']}, {sweep.measure} {number(best['mean'])}" if best else None)


def first_keys(config: PipelineConfig) -> list[dict[str, str]]:
    """First content of the form: the first training's learning rate, a third of it and three times it."""
    for node in graph(config).values():
        if node.stage.name in MEASURED and not node.adopted and isinstance(node.config, TrainerConfig):
            rate = node.config.optimizer.learning_rate
            values = ",".join(f"{rate * factor:.2g}" for factor in (1 / 3, 1.0, 3.0))
            return [{"key": f"{node.key}.optimizer.learning_rate", "values": values}]
    return []


def _sheet(document: dict[str, Any], store: Store) -> str:
    """Leaderboard, ablations, the law and where each trial is, in Markdown."""
    best = document["best"]
    lines = [
        f"**Best: {best['name']}**, {document['measure']} {number(best['mean'])}" if best else "Nothing has ended."
    ]
    rows = [
        [row["name"], number(row["mean"]), number(row["sd"]), bounds(row), row["status"]]
        for row in document["settings"]
    ]
    lines += ["", *_table(["settings", document["measure"], "sd", "95 % interval", ""], rows)]
    if document["ablations"]:
        rows = [
            [row["name"], row["figure"], number(row["difference"]), bounds(row), "yes" if row["shown"] else "no"]
            for row in document["ablations"]
        ]
        lines += ["", *_table(["ablation", "figure", "minus the base", "95 % interval", "more than chance"], rows)]
    if document["law"]:
        lines += ["", *(f"- {sentence}" for sentence in law_sentences(document["law"]))]
        lines += [f"- {sentence}" for sentence in isoflop_sentences(document["law"]["isoflop"])]
    rows = [
        [_link(trial, store), json.dumps(trial["settings"]), str(trial["seed"]), number(trial["value"]), trial["error"]]
        for trial in document["trials"]
    ]
    lines += ["", "### Trials", "", *_table(["", "settings", "seed", document["measure"], ""], rows)]
    url = run_url(store.root, Trials(store.root, document["sweep"]).about()["build_id"])
    lines += ["", f"[This sweep in MLflow]({url})"] if url else []
    return "\n".join([*lines, "", f"Curves, parallel coordinates and importance: `{document['page']}`"])


def _link(trial: dict[str, Any], store: Store) -> str:
    """A trial's status, with the page of its run where it has one."""
    found = RunJournal(store.layout.runs, trial["run_id"]).result() if trial["run_id"] else None
    url = found.get("flow_run_url") if found else None
    return f"[{trial['status']}]({url})" if url else str(trial["status"])


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


def deploy_sweep(config: PipelineConfig, root: Path, config_path: str) -> UUID:
    """Makes or updates `<pipeline>/sweep`, whose form asks for keys and values."""
    parameters = {
        "config_path": str(Path(config_path).absolute()),
        "keys": first_keys(config),
        "root": shown_root(root),
    }
    message = f"Runs {config.name} with several values of its keys and reports the best."
    return apply_deployment(config, root, renamed(sweep_run, config.name), SWEEP, parameters, message, Timing())
