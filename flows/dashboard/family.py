"""The family of a model as a drawing in layers, in both directions; evaluations are named in the box of their model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from evaluation.pages.lineage import Edge
from evaluation.pages.pipeline import Box, BoxState, Drawing, draw
from flows.dashboard.reading import is_model, page_of
from flows.planning.picture import without_shortcuts
from infra.store.ancestry import AncestryMember, Link
from infra.store.manifest import Manifest
from infra.store.measurements import MEASURE, TRAINED
from tasks.stages import STAGES

MOST = 90
"""Most boxes of a drawing; one with more is unreadable."""


def family_picture(members: Mapping[str, AncestryMember], links: Sequence[Link], shown: str) -> Markup:
    """Return the drawing of a family; empty for one that is too large.

    Sources outside the store are named in the boxes of what read them, validations and evaluations in the box of what
    they are about. An arrow that follows from others is left out.

    Args:
        shown: the member that the page is about.
    """
    within = {id: _box_of(member, members, links) for id, member in members.items() if member.kind != "source"}
    kept = [id for id, box in within.items() if id == box]
    if len(kept) > MOST:
        return Markup("")
    sources: dict[str, list[AncestryMember]] = {}
    pairs = set()
    for link in links:
        box = within[link.child]
        if link.parent not in within:
            sources.setdefault(box, []).append(members[link.parent])
        elif box == link.child:  # what a validation or evaluation read besides is not shown
            pairs.add((within[link.parent], box))
    edges = without_shortcuts([Edge(*pair) for pair in sorted(pairs) if pair[0] != pair[1]])
    evaluations = {box: [members[id] for id in within if within[id] == box != id] for box in kept}
    boxes = tuple(_box(members[id], evaluations[id], sources.get(id, [])) for id in kept)
    drawing = Drawing(boxes, tuple((edge.source, edge.target) for edge in edges))
    # draw() escapes what it is given.
    return Markup(draw(drawing, {shown: BoxState("shown", "this model")}, about="the family of the model"))


def _box_of(member: AncestryMember, members: Mapping[str, AncestryMember], links: Sequence[Link]) -> str:
    """Return the member in whose box a member is named: itself, but for validations, evaluations and measurements."""
    if member.manifest is None:
        return member.id
    stage = member.manifest.stage
    name = TRAINED if stage.startswith(MEASURE) else {"verdict": "data", "scores": "model"}.get(_makes(stage))
    about = next((link.parent for link in links if link.child == member.id and link.name == name), member.id)
    return about if members[about].kind == "artifact" else member.id


def _box(member: AncestryMember, evaluations: Sequence[AncestryMember], sources: Sequence[AncestryMember]) -> Box:
    about = "\n".join(_about(each) for each in (member, *evaluations, *sources))
    manifest = member.manifest
    if manifest is None:
        return Box(member.id, (), ("gone",), about, False, member.id.partition("/")[0])
    notes = [f"{len(sources)} source{'s' if len(sources) > 1 else ''}"] if sources else []
    notes += [_note(evaluation.manifest) for evaluation in evaluations if evaluation.manifest]
    return Box(
        member.id,
        tuple(evaluation.id for evaluation in evaluations),
        tuple(dict.fromkeys(notes)) or (manifest.digest[:10],),
        about,
        is_model(manifest),
        manifest.step or manifest.stage,
        page_of(member.id, manifest),
    )


def _note(manifest: Manifest) -> str:
    if manifest.stage.startswith(MEASURE):
        return "measured"
    return "validated" if _makes(manifest.stage) == "verdict" else manifest.stage.partition("_")[0]


def _makes(stage: str) -> str:
    """Return what a stage makes, by the name of its folder: validate_clean is a use of validate."""
    return STAGES[stage].makes if stage in STAGES else _makes(stage.rpartition("_")[0]) if "_" in stage else ""


def _about(member: AncestryMember) -> str:
    if member.source is not None:
        return f"{member.source.key or 'source'}: {', '.join(list(member.source.files)[:5])}"
    if member.manifest is None:
        return f"{member.id} is no longer in the store"
    return f"{member.id}: {member.manifest.result.get('headline', '')}"
