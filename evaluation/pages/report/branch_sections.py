"""Training runs that continue from a state of another: their branch points, the changes there, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from evaluation.pages.charts import Line, line_chart, smoothed
from evaluation.pages.parts import Figure, Section, Table
from evaluation.results.pipeline import OTHER_STYLES, PipelineResults
from infra.store.branches import Branch, setting_text

_KINDS = {"schedule": "schedule", "duration": "length", "seed": "seed", "inputs": "data and inputs"}
_CURVES = (("train/loss", "Loss", "loss (nats per token)"), ("train/lr", "Learning rate", "learning rate"))


def branches(pipeline: PipelineResults) -> Section:
    """Draw each curve over a training run and its branches, with a table of the changes made by hand."""
    branch_by_id = {id: artifact.branch for id, artifact in pipeline.artifacts.items() if artifact.branch}
    if not branch_by_id:
        return Section("branches", "Branches")
    tables = []
    for id, branch in branch_by_id.items():
        head = f"{id} continues from {branch}"
        if branch.changed is None:
            tables.append(Table(head, [""], [["What was changed is not known: that training is not in the store."]]))
            continue
        rows = [
            [_kind(change.key), change.key, setting_text(change.before), setting_text(change.after)]
            for change in branch.changed
        ]
        rows += _rate_rows(pipeline, id, branch)
        tables.append(Table(head, ["kind", "key", "before", "after"], rows, mono=(1,)))
    lead = (
        f"{len(branch_by_id)} training{'s' * (len(branch_by_id) > 1)} continued from a kept state of another. "
        "What was trained before the state is shared; what was changed by hand at it is listed below."
    )
    figures = [
        figure
        for trunk, members in _branches_by_trunk(pipeline, branch_by_id).items()
        for name, title, label in _CURVES
        if (figure := _figure(pipeline, branch_by_id, [trunk, *members], name, title, label))
    ]
    return Section("branches", "Branches", lead, figures, tables)


def parent_of(pipeline: PipelineResults, branch: Branch) -> str | None:
    """Return the step from which a branch continues; None if it is not in the pipeline."""
    address = (branch.stage, branch.fingerprint)
    manifests = ((id, artifact.manifest) for id, artifact in pipeline.artifacts.items() if artifact.manifest)
    return next((id for id, manifest in manifests if (manifest.stage, manifest.fingerprint) == address), None)


def _branches_by_trunk(pipeline: PipelineResults, branch_by_id: Mapping[str, Branch]) -> dict[str, list[str]]:
    """Return the branches by the training run that they go back to."""

    def trunk(id: str) -> str:
        while id in branch_by_id and (parent := parent_of(pipeline, branch_by_id[id])):
            id = parent
        return id

    ids = sorted(branch_by_id, key=trunk)
    return {first: [id for id in members if id != first] for first, members in groupby(ids, key=trunk)}


def _figure(
    pipeline: PipelineResults, branch_by_id: Mapping[str, Branch], ids: Sequence[str], name: str, title: str, label: str
) -> Figure | None:
    lines, legend = [], []
    for index, id in enumerate(ids):
        style = "train" if index == 0 else f"other{(index - 1) % OTHER_STYLES}"
        points = pipeline.curve(id, name)
        lines.append(Line(id, smoothed(points, max(3.0, len(points) / 60)) if name == "train/loss" else points, style))
        legend.append((id, style))
    marks = [
        (batch, f"{id} branches off")
        for id in ids
        if id in branch_by_id and (batch := branch_by_id[id].batch) is not None
    ]
    chart = line_chart(f"{title} of {ids[0]} and its branches", lines, x_label="batch", y_label=label, marks=marks)
    if not chart:
        return None
    caption = "A branch begins where the training that it continues had arrived; vertical lines mark the states."
    weak = "Branches on other data are not distinguishable from branches with other settings by their training loss."
    return Figure(f"{title}: {', '.join(ids)}", chart, caption, weak if name == "train/loss" else "", legend)


def _rate_rows(pipeline: PipelineResults, id: str, branch: Branch) -> list[list[str]]:
    """Return the learning rate used in training on both sides of the state, from their curves."""
    parent = parent_of(pipeline, branch)
    trained = pipeline.curve(parent, "train/lr") if parent else []
    before = [value for step, value in trained if step <= (branch.batch or 0)]
    after = pipeline.curve(id, "train/lr")
    if not (before and after):
        return []
    return [["learning rate", "as trained", f"{before[-1]:.4g}", f"{after[0][1]:.4g}"]]


def _kind(key: str) -> str:
    first = key.partition(".")[0]
    return _KINDS.get(first, "setting")
