"""stemma open [WHAT]: open the newest report, corpus report, model card, or a server's page in the browser."""

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
@click.option("--print", "only_print", is_flag=True, help="Print the location without opening it.")
@root_option
@as_json
def command(what: str, only_print: bool, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Open the newest report in the browser, or WHAT: the corpus report, the model card, a server's page.

    Also prints its location. With --json, or without a display, nothing is opened. `stemma open page` needs no
    servers: if none is running, it serves the store's page until Ctrl-C.
    """
    import os
    import webbrowser

    folder = root_of(root)
    if what == "page" and not (only_print or as_json) and folder.exists() and not _answering("page", folder):
        _serve_page(folder)
        return {"status": "done"}, 0
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
        fix = f"run a pipeline with the section {stage}:, or choose another --root"
        raise ConfigError(Problem("no_page", kind, f"no {stage} was built in {store.place}", fix))
    return opened(store, stage)[0] / file


def _server(kind: str, root: Path) -> str:
    from infra.errors import ConfigError, Problem

    if url := _answering(kind, root):
        return url
    fix = "stemma up, or stemma open page without --print and --json" if kind == "page" else "stemma up"
    raise ConfigError(Problem("no_server", kind, f"no {kind} server answers for {root}", fix))


def _answering(kind: str, root: Path) -> str:
    """Return the URL of a running server of the store; "" if there is none."""
    from infra.servers.services import states
    from infra.servers.settings import settings_of

    for service, state in states(root) if root.exists() else []:
        if service.name == kind and state == "answers":
            return settings_of(root).page_of(service.url) or service.url
    return ""


def _serve_page(root: Path) -> None:
    """Serve the page of a store to this machine, until Ctrl-C."""
    import os
    import threading
    import time
    import webbrowser
    from contextlib import suppress

    from flows.dashboard.server import serve
    from infra.servers.http import answers
    from infra.servers.ports import reserved_port

    with reserved_port(4100) as port:
        url = f"http://127.0.0.1:{port}"

        def open_it() -> None:
            while not answers(f"{url}/health"):
                time.sleep(0.1)
            click.echo(f"{url}  (Ctrl-C stops it)")
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                webbrowser.open(url)

        threading.Thread(target=open_it, daemon=True).start()
        with suppress(KeyboardInterrupt):
            serve(root.absolute(), "127.0.0.1", port, is_read_only=True)
