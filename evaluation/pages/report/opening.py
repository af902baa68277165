"""Opening of the report: what was built, a frank verdict, the models side by side, their locations, and their usage."""

from __future__ import annotations

from evaluation.pages.parts import Opening, Table
from evaluation.pages.summary import frank_verdict, results_table, what_was_built
from evaluation.results.artifacts import Artifact
from evaluation.results.pipeline import PipelineResults
from infra.lineage.ledger import run_url
from infra.servers.settings import prefect_page
from infra.store.manifest import store_root

PAGES = (("register", "MODEL_CARD.md", "model card"), ("corpus_report", "aux/corpus_report.html", "corpus report"))


def opening(pipeline: PipelineResults) -> Opening | None:
    """Return the opening; None for a pipeline without a model that writes text."""
    if not pipeline.models:
        return None
    last = pipeline.models[-1]
    rows = results_table(pipeline, pipeline.models)
    columns = ["", *map(pipeline.long_name, pipeline.models)]
    note = "In brackets: 95 % intervals. The claims below say which differences are more than chance."
    table = Table("", columns, rows, note, numeric=tuple(range(1, len(columns)))) if rows else None
    model = pipeline.model(last)
    return Opening(
        what_was_built(pipeline, last),
        frank_verdict(pipeline, last),
        table,
        [*_weights(pipeline), *_pages(pipeline), *_servers(pipeline)],
        _commands(pipeline) if model.manifest else [],
    )


def _commands(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return commands that a user may run next."""
    addresses = [_address(pipeline.model(name)) for name in pipeline.models]
    found = [("Talk to it:", f"stemma chat {addresses[-1]}")]
    if len(addresses) > 1:
        found.append(("Two models side by side in the browser:", f"stemma serve {' '.join(addresses[-2:])}"))
    return found


def _address(one: Artifact) -> str:
    return f"{one.stage}/{one.manifest.fingerprint[:8]}" if one.manifest else one.id


def _weights(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return a link to the folder of each model's weights: the report is two folders below the store's."""
    models = [(name, pipeline.model(name)) for name in pipeline.models]
    return [(f"weights of the {pipeline.long_name(name)}", _inside(one)) for name, one in models if one.manifest]


def _pages(pipeline: PipelineResults) -> list[tuple[str, str]]:
    found = []
    for stage, file, label in PAGES:
        for id in pipeline.steps(stage):
            one = pipeline.artifacts[id]
            if one.manifest and (one.folder / file).is_file():
                found.append((label if id == stage else f"{label} of {id}", f"{_inside(one)}{file}"))
    return found


def _servers(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return links to the run that built the last artifact, in MLflow and Prefect, if these are running now."""
    one = max((one for one in pipeline.artifacts.values() if one.manifest), key=_finished, default=None)
    if one is None or one.manifest is None:
        return []
    root = store_root(one.folder)
    found = [("this run in MLflow", run_url(root, one.manifest.run_id))]
    if one.manifest.flow_run_id and (prefect := prefect_page(root)):
        found.append(("in Prefect", f"{prefect}/runs/flow-run/{one.manifest.flow_run_id}"))
    return [(label, url) for label, url in found if url]


def _finished(one: Artifact) -> str:
    return one.manifest.finished if one.manifest else ""


def _inside(one: Artifact) -> str:
    """Return the relative path from one artifact's folder to another's, which is at its address if only its records
    were brought here."""
    is_there = one.manifest is None or store_root(one.folder) == one.folder.parent.parent
    name = one.folder.name if is_there or one.manifest is None else one.manifest.fingerprint
    return f"../../{one.folder.parent.name}/{name}/"
