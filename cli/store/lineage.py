"""stemma lineage ARTIFACT: the ancestors or descendants of an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option
from cli.common.output import as_json

if TYPE_CHECKING:
    from infra.store.ancestry import LineageGraph
    from infra.store.store import Store


@click.command("lineage")
@click.argument("artifact", required=False, shell_complete=artifacts)
@click.option("--up", "direction", flag_value="up", default="up", help="Show ancestors (the default).")
@click.option("--down", "direction", flag_value="down", help="Show descendants.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "json", "html"]),
    default="tree",
    help="html: one page on stdout.",
)
@click.option("--rebuild", is_flag=True, help="Rebuild a lost MLflow store from the manifests; takes no ARTIFACT.")
@root_option
@as_json
def command(
    artifact: str | None, direction: str, form: str, rebuild: bool, root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Show the lineage of ARTIFACT, read from the manifests in the store.

    ARTIFACT is a folder, STAGE/FINGERPRINT or a unique prefix of it, or STAGE for its newest artifact. With --down it
    may also be a file outside the store, by its path or SHA-256: every artifact, model and score that descends from
    its bytes is listed.
    """
    if rebuild and artifact is not None:
        raise click.UsageError("--rebuild takes no ARTIFACT: it applies to the whole store.")
    if rebuild:
        return _rebuild(root_of(root), as_json)
    if artifact is None:
        raise click.UsageError("Missing argument 'ARTIFACT'.")
    import json

    from flows.runs.lineage import lineage_document
    from infra.store.store import Store

    store = Store(root_of(root), reading=True)
    graph = _descendants(store, artifact) if direction == "down" else _ancestors(store, artifact)
    document = {"status": "done", "root": store.place, "direction": direction, **lineage_document(graph, store)}
    if as_json:
        return document, 0
    if form == "json":
        click.echo(json.dumps({"errors": [], **document}, indent=1))
    elif form == "html":
        from evaluation.pages.lineage import lineage_page

        click.echo(lineage_page(document), nl=False)
    else:
        from cli.store.tree import print_tree

        print_tree(document, down=direction == "down")
    return document, 0


def _rebuild(root: Path, as_json: bool) -> tuple[dict[str, Any], int]:
    from infra.lineage.rebuild import rebuild
    from infra.store.roots import refuse_url

    refuse_url(
        root, "stemma lineage --rebuild", "the manifests in the bucket are the record, and stemma lineage reads them"
    )
    builds = rebuild(root)
    if not as_json:
        click.echo(f"{builds} builds written into a new MLflow store in {root}")
    return {"status": "done", "root": str(root), "builds": builds, "nodes": [], "edges": []}, 0


def _ancestors(store: Store, artifact: str) -> LineageGraph:
    from infra.store.ancestry import ancestry
    from infra.store.reference import resolve

    return ancestry(store, [resolve(store, artifact)])


def _descendants(store: Store, text: str) -> LineageGraph:
    from infra.errors import ConfigError, Problem
    from infra.io.hashing import hash_file
    from infra.store.ancestry import artifact_member, descent, file_member
    from infra.store.layout import MANIFEST
    from infra.store.reference import resolve

    path = Path(text).absolute()
    if path.is_file() and path.name != MANIFEST:
        return descent(store, file_member(str(path), hash_file(path)))
    try:
        return descent(store, artifact_member(store, *resolve(store, text)))
    except ConfigError as error:
        # Not an artifact: a file, which may be gone by now, or its hash.
        is_hash = len(text) == 64 and set(text.lower()) <= set("0123456789abcdef")
        graph = descent(store, file_member("", text.lower()) if is_hash else file_member(str(path), ""))
        if len(graph.members) > 1:
            return graph
        if is_hash:
            raise ConfigError(
                Problem("unknown_source", text, "no artifact in this store descends from these bytes")
            ) from None
        raise error
