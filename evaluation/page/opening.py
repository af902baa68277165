"""How the report opens: what was built, a frank verdict, the models side by side, where they lie, how to use them."""

from __future__ import annotations

from evaluation.artifacts import Artifact
from evaluation.page.family import Family
from evaluation.page.parts import Opening, Table
from evaluation.summary import frank_verdict, results_table, what_was_built

PAGES = (("register", "MODEL_CARD.md", "model card"), ("corpus_report", "aux/corpus_report.html", "corpus report"))


def opening(family: Family) -> Opening | None:
    """None for a pipeline without a model that writes text."""
    if not family.models:
        return None
    last = family.models[-1]
    rows = results_table(family, family.models)
    columns = ["", *map(family.long_name, family.models)]
    note = "In brackets: 95 % intervals. The claims below say which differences are more than chance."
    table = Table("", columns, rows, note, numeric=tuple(range(1, len(columns)))) if rows else None
    model = family.model(last)
    return Opening(
        what_was_built(family, last),
        frank_verdict(family, last),
        table,
        [*_weights(family), *_pages(family)],
        [("Talk to it:", f"stemma chat {_address(model)}")] if model.manifest else [],
    )


def _address(one: Artifact) -> str:
    return f"{one.stage}/{one.manifest.fingerprint[:8]}" if one.manifest else one.id


def _weights(family: Family) -> list[tuple[str, str]]:
    """A link to the folder of each model's weights: the report lies two folders below the store's."""
    models = [(name, family.model(name)) for name in family.models]
    return [(f"weights of the {family.long_name(name)}", _inside(one)) for name, one in models if one.manifest]


def _pages(family: Family) -> list[tuple[str, str]]:
    found = []
    for stage, file, label in PAGES:
        for id in family.steps(stage):
            one = family.artifacts[id]
            if one.manifest and (one.folder / file).is_file():
                found.append((label if id == stage else f"{label} of {id}", f"{_inside(one)}{file}"))
    return found


def _inside(one: Artifact) -> str:
    return f"../../{one.folder.parent.name}/{one.folder.name}/"
