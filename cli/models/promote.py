"""stemma promote and stemma rollback: choose the promoted model of a name."""

from __future__ import annotations

from typing import Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option
from cli.common.output import as_json


@click.command("promote")
@click.argument("artifact", default="register", shell_complete=artifacts)
@click.option(
    "--force", is_flag=True, help="Promote a model that is worse than the promoted one; never one that a gate rejected."
)
@root_option
@as_json
def command(artifact: str, force: bool, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Promote a registered model: ARTIFACT is a registration such as register/1f2e, or the model itself; by default the
    newest registration.

    A model that a gate rejected is never promoted. A model that is worse than the promoted one on the same items, with
    95 % confidence, is refused. The alias `promoted` in MLflow's registry is updated.
    """
    from flows.prefect.promotion import as_json as as_document
    from flows.prefect.promotion import promote
    from infra.store.store import Store

    store = Store(root_of(root))
    done = promote(store, artifact, force=force)
    if not as_json:
        _print(as_document(done))
    return {"status": "done", "root": store.place, **as_document(done)}, 0


@click.command("rollback")
@click.argument("name", required=False)
@root_option
@as_json
def rollback(name: str | None, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Undo the last promotion of NAME: the previously promoted model becomes current again."""
    from flows.prefect.promotion import as_json as as_document
    from flows.prefect.promotion import rollback as back
    from infra.store.store import Store

    store = Store(root_of(root))
    done = back(store, name)
    if not as_json:
        _print(as_document(done))
    return {"status": "done", "root": store.place, **as_document(done)}, 0


def _print(document: dict[str, Any]) -> None:
    before = f", previously {document['before']['model']}" if document["before"] else ""
    click.echo(f"{document['name']}: promoted {document['promoted']['model']}{before}")
    for row in document["compared"]:
        click.echo(f"  {row['figure']}: {row['difference']:+.4g} ({row['low']:+.4g} to {row['high']:+.4g})")
