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
    commands = [("Talk to it:", f"stemma chat {addresses[-1]}")]
    if len(addresses) > 1:
        commands.append(("Two models side by side in the browser:", f"stemma serve {' '.join(addresses[-2:])}"))
    return commands


def _address(artifact: Artifact) -> str:
    return f"{artifact.stage}/{artifact.manifest.fingerprint[:8]}" if artifact.manifest else artifact.id


def _weights(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return a link to the folder of each model's weights: the report is two folders below the store's."""
    models = [(name, pipeline.model(name)) for name in pipeline.models]
    return [
        (f"weights of the {pipeline.long_name(name)}", _inside(artifact))
        for name, artifact in models
        if artifact.manifest
    ]


def _pages(pipeline: PipelineResults) -> list[tuple[str, str]]:
    pages = []
    for stage, file, label in PAGES:
        for id in pipeline.steps(stage):
            artifact = pipeline.artifacts[id]
            if artifact.manifest and (artifact.folder / file).is_file():
                pages.append((label if id == stage else f"{label} of {id}", f"{_inside(artifact)}{file}"))
    return pages


def _servers(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return links to the run that built the last artifact, in MLflow and Prefect, if these are running now."""
    artifact = max(
        (artifact for artifact in pipeline.artifacts.values() if artifact.manifest), key=_finished, default=None
    )
    if artifact is None or artifact.manifest is None:
        return []
    root = store_root(artifact.folder)
    links = [("this run in MLflow", run_url(root, artifact.manifest.run_id))]
    if artifact.manifest.flow_run_id and (prefect := prefect_page(root)):
        links.append(("in Prefect", f"{prefect}/runs/flow-run/{artifact.manifest.flow_run_id}"))
    return [(label, url) for label, url in links if url]


def _finished(artifact: Artifact) -> str:
    return artifact.manifest.finished if artifact.manifest else ""


def _inside(artifact: Artifact) -> str:
    """Return the relative path from one artifact's folder to another's, which is at its address if only its records
    were brought here."""
    is_in_store = artifact.manifest is None or store_root(artifact.folder) == artifact.folder.parent.parent
    name = artifact.folder.name if is_in_store or artifact.manifest is None else artifact.manifest.fingerprint
    return f"../../{artifact.folder.parent.name}/{name}/"
