"""A model as its page shows it: card, family in both directions, figures against relatives, commands."""

from __future__ import annotations

import heapq
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from evaluation.pages.comparison import figures_section
from evaluation.pages.parts import Figure, Section, Table
from evaluation.release.registrations import newest_registration
from flows.compare.compare import figures_of
from flows.compare.compared import ModelOfStore, compared_models
from flows.dashboard.family import family_picture
from flows.dashboard.model_actions import ModelActions
from flows.dashboard.reading import CARD, ReadingStore, address_of, find, is_model, page_of
from infra.errors import StemmaError
from infra.io.json import parse_own_json, read_own_json
from infra.store.ancestry import AncestryMember, LineageGraph, ancestry, artifact_member, descent
from infra.store.layout import AUX
from infra.store.manifest import Manifest
from infra.store.store import Store
from tasks.stages import STAGES

RECORD = "registration.json"
EXAMPLES, LONGEST_EXAMPLE = 4, 200
RELATIVES = 3
"""Most ancestors, and most siblings, whose figures are shown."""

Pair = tuple[Path, Manifest]


def model_page(store: ReadingStore, text: str, actions: ModelActions) -> dict[str, Any]:
    """Return the values of the page of a model. Raises ConfigError for a text that names none."""
    folder, manifest = find(store, text, models_only=True)
    up = ancestry(store, [(folder, manifest)])
    down = descent(store, artifact_member(store, folder, manifest), store.readers())
    ancestors = [
        (member.folder, member.manifest)
        for member in up.artifacts[1:]
        if member.folder and member.manifest and is_model(member.manifest)
    ]
    alike = [pair for pair in ancestors if _kind(pair[1]) == _kind(manifest)]
    measured = store.newest_measurement(manifest)
    siblings = _siblings(store, manifest)
    registration = newest_registration(store, manifest.digest)
    return {
        "address": address_of(folder, manifest),
        "manifest": manifest,
        "headline": str((measured[1] if measured else manifest).result.get("headline", "")),
        "size": sum(file.size for file in manifest.files),
        "relatives": [("ancestor", address_of(*pair), pair[1]) for pair in ancestors]
        + [("sibling", address_of(*pair), pair[1]) for pair in siblings],
        "sections": [
            _family(up, down),
            _figures(store, [(folder, manifest), *alike[:RELATIVES], *siblings]),
        ],
        "card": _card(store, registration),
        "registration": address_of(*registration) if registration else "",
        "actions": actions.of(store, folder, manifest),
        "states": actions.states(address_of(folder, manifest)),
        "commands": _commands(store, address_of(folder, manifest), registration),
    }


def example_prompts(store: ReadingStore, address: str) -> tuple[list[str], bool]:
    """Return prompts to try a model with, and whether it continues text, as no tuning has taught it to answer.

    The prompts are those that a measurement of it, or of its relatives, has asked: in the form that it was trained on.
    """
    _, manifest = find(store, address, models_only=True)
    measured = store.newest_measurement(manifest)
    samples = measured[0] / AUX / "samples.jsonl" if measured else None
    prompts: list[str] = []
    if samples is not None and samples.is_file():
        with open(samples, encoding="utf8") as file:
            for line in islice(file, EXAMPLES):
                with suppress(ValueError, AttributeError, RecursionError):
                    prompts.append(str(parse_own_json(line).get("prompt", "")))
    return [prompt for prompt in prompts if 0 < len(prompt) <= LONGEST_EXAMPLE], manifest.stage == "pretrain"


def _kind(manifest: Manifest) -> str:
    return STAGES[manifest.stage].makes


def _siblings(store: ReadingStore, manifest: Manifest) -> list[Pair]:
    """Return the newest models of the same stage that have an input in common, or the pipeline."""
    others: dict[str, Pair] = {}
    for reference in manifest.inputs.values():
        for folder, other, *_, requires in store.readers().get((reference.stage, reference.digest), ()):
            if other.stage == manifest.stage and not requires:
                others[str(folder)] = folder, other
    if not manifest.inputs:
        of_stage = store.manifests(manifest.stage)
        others = {str(pair[0]): pair for pair in of_stage if pair[1].pipeline == manifest.pipeline}
    siblings = [pair for pair in others.values() if "." not in pair[0].name and pair[1].digest != manifest.digest]
    return heapq.nlargest(RELATIVES, siblings, key=lambda pair: pair[1].age_key)


def _family(up: LineageGraph, down: LineageGraph) -> Section:
    members = {**up.members, **down.members}
    links = {(link.parent, link.child): link for link in (*up.links, *down.links)}
    start = next(iter(up.members))
    drawn = family_picture(members, list(links.values()), start)
    caption = "From the oldest data to everything derived from the model; click a box to open its page."
    figures = [Figure("Lineage", drawn, caption, "", wide=True)] if drawn else []
    rows: list[list[str]] = []
    for relation, graph in (("ancestor", up), ("descendant", down)):
        for member in graph.members.values():
            if member.id != start:
                headline = str(member.manifest.result.get("headline", "")) if member.manifest else member.kind
                rows.append([relation, _link(member), headline])
    lead = "" if drawn else f"{len(members):,} artifacts: too many to draw."
    table = Table(f"All {len(rows)} relatives", ["", "", "result"], rows, folded=True, mono=(1,))
    return Section("family", "Family", lead, figures, [table] if rows else [])


def _link(member: AncestryMember) -> Markup | str:
    address = page_of(member.id, member.manifest) if member.manifest else ""
    return Markup('<a href="{}">{}</a>').format(address, member.id) if address else str(escape(member.id))


def _figures(store: ReadingStore, pairs: Sequence[Pair]) -> Section:
    """Return the figures of the first model next to those of its relatives."""
    pairs = list({address_of(*pair): pair for pair in pairs}.values())
    if len(pairs) < 2:
        manifest = pairs[0][1]
        rows = [[name, f"{value:,.4g}"] for name, value in manifest.result.get("figures", {}).items()]
        return Section("figures", "Figures", "", tables=[Table("", ["figure", "value"], rows, numeric=(1,))])
    labels = [
        f"{manifest.step or manifest.stage} {address_of(folder, manifest)[-16:][:8]}" for folder, manifest in pairs
    ]
    models = [ModelOfStore(folder, manifest, store.newest_measurement(manifest)) for folder, manifest in pairs]
    return figures_section({"figures": figures_of(compared_models(store, models))}, labels)


def _card(store: Store, registration: Pair | None) -> dict[str, Any]:
    """Return the text of the model card as HTML, the registration's status and its reasons; empty without one."""
    card: dict[str, Any] = {"html": "", "status": "", "reasons": []}
    if registration is None:
        return card
    folder, manifest = registration
    with suppress(OSError, ValueError, StemmaError):
        at = store.peek(manifest, CARD, RECORD, folder=folder)
        card["html"] = as_html((at / CARD).read_text(encoding="utf8"))
        record = read_own_json(at / RECORD)
        card["status"] = str(record.get("status", ""))
        card["reasons"] = [str(reason.get("message", "")) for reason in record.get("reasons", [])]
    return card


@lru_cache(maxsize=32)
def as_html(markdown: str) -> Markup:
    """Return Markdown of other people as HTML. HTML in it is shown as text, and links lead to http and https alone."""
    from markdown_it import MarkdownIt  # of rich, which Prefect needs; only this page reads Markdown

    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    parser.validateLink = lambda url: url.startswith(("https://", "http://", "#"))  # type: ignore[method-assign]
    if markdown.startswith("---\n"):  # metadata of the hub
        markdown = markdown.partition("\n---\n")[2] or markdown
    return Markup(parser.render(markdown))


def _commands(store: Store, address: str, registration: Pair | None) -> list[tuple[str, str]]:
    root = f" --root {shlex.quote(store.place)}"
    commands = [
        ("Chat", f"stemma chat {address}{root}"),
        ("Serve", f"stemma serve {address}{root}"),
        ("Evaluate", f"stemma eval {address} --tasks TASK{root}"),
        ("Export", f"stemma export {address} FOLDER{root}"),
    ]
    if registration:
        commands.append(("Promote", f"stemma promote {address_of(*registration)}{root}"))
    return commands
