"""stemma open [WHAT]: a page of the newest run in the browser: report, corpus report, card, or the servers' pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import root_of, root_option
from cli.common.output import as_json

PAGES = {
    "report": ("report", "report.html"),
    "corpus": ("corpus_report", "aux/corpus_report.html"),
    "card": ("register", "MODEL_CARD.md"),
}
SERVERS = ("page", "prefect", "mlflow")


@click.command("open")
@click.argument("what", type=click.Choice([*PAGES, *SERVERS]), default="report")
@click.option("--print", "only_print", is_flag=True, help="Print where it is; open nothing.")
@root_option
@as_json
def command(what: str, only_print: bool, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Open the newest report in the browser, or what WHAT names: the corpus report, the model card, a server's page.

    Prints where it is too. With --json, and where there is no screen, it opens nothing.
    """
    import os
    import webbrowser

    folder = root_of(root)
    page = None if what in SERVERS else _page(what, folder)
    url = page.as_uri() if page else _server(what, folder)
    has_screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    opened = not (only_print or as_json) and has_screen and webbrowser.open(url)
    if not as_json:
        click.echo(page or url)
    return {"status": "done", "what": what, "url": url, "opened": opened}, 0


def _page(kind: str, root: Path) -> Path:
    from infra.errors import ConfigError, Problem
    from infra.store.reference import opened
    from infra.store.store import Store

    stage, file = PAGES[kind]
    store = Store(root, reading=True)
    if stage not in store.stages():
        fix = f"run a pipeline with the section {stage}:, or name another --root"
        raise ConfigError(Problem("no_page", kind, f"no {stage} was built in {store.place}", fix))
    return opened(store, stage)[0] / file


def _server(kind: str, root: Path) -> str:
    from infra.errors import ConfigError, Problem
    from infra.servers.services import states
    from infra.servers.settings import settings_of

    for service, state in states(root) if root.exists() else []:
        if service.name == kind and state == "answers":
            return settings_of(root).page_of(service.url) or service.url
    raise ConfigError(Problem("no_server", kind, f"no {kind} server answers for {root}", "stemma up"))
