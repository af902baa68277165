"""The page of a store as a server: home, runs while they go, reports of finished runs.

python -m flows.dashboard.server ROOT [--host 127.0.0.1] [--port 4100]

GET /            runs, what runs now, models, services
GET /run/ID      one run; /run/ID/events sends the parts of the page that change, as server-sent events
POST /run/ID/cancel, /run/ID/retry    as the buttons of Prefect's page, by its API
GET /artifact/STAGE/FINGERPRINT/PATH  a file of a finished artifact, as its manifest lists it

Behind the same rules for callers and the same credentials as Prefect and MLflow.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from evaluation.pages.parts import TEMPLATES as REPORT_TEMPLATES
from evaluation.pages.words import seconds
from flows.dashboard.run_view import RunView
from flows.runs.listing import artifacts, runs
from infra.errors import StemmaError
from infra.servers.asgi_server import BoundedBody, Server
from infra.servers.credentials import Credentials, credentials
from infra.servers.http import post
from infra.servers.prefect.callers import App, OwnCallersOnly
from infra.servers.services import states
from infra.servers.settings import Settings, mlflow_page, prefect_page, settings_of
from infra.servers.state import prefect_api_url
from infra.store.store import Store

TEMPLATES = Path(__file__).parent / "templates"
LARGEST_BODY = 10_000
SHORTEST_WAIT_S, LONGEST_WAIT_S = 1.0, 4.0
"""Time between two reads of a watched run: it doubles while nothing changes."""
RUNS_SHOWN, MODELS_SHOWN = 40, 20
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ARTIFACT_POLICY = "sandbox allow-same-origin; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Artifacts contain text of other people, so no script in them may run under our address."""
STATES = {
    "cancel": {"type": "CANCELLING", "name": "Cancelling", "message": "cancelled in the page"},
    "retry": {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "retried in the page"},
}


class Dashboard:
    """The pages of one store. root: its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._templates.filters |= {"seconds": seconds, "clock": _clock}
        # However many people watch a page, one thread reads the store for it.
        self._looks: dict[str, asyncio.Lock] = {}
        self._views: dict[str, RunView] = {}

    def app(self) -> Starlette:
        routes = [
            Route("/", self.home),
            Route("/events", self.home_events),
            Route("/health", lambda _: PlainTextResponse("OK")),
            Route("/run/{run_id}", self.run),
            Route("/run/{run_id}/events", self.run_events),
            Route("/run/{run_id}/{action}", self.act, methods=["POST"]),
            Route("/artifact/{stage}/{fingerprint}/{path:path}", self.artifact),
            Route("/{name}.css", self.static),
            Route("/{name}.js", self.static),
        ]
        return Starlette(routes=routes, exception_handlers={StemmaError: _problem})

    async def home(self, _: Request) -> Response:
        parts = await self._look("", self._home_parts)
        return self._page("home.html.j2", "Stemma", parts, "/events")

    async def home_events(self, request: Request) -> Response:
        return self._events(request, lambda: self._look("", self._home_parts), lambda: False)

    async def run(self, request: Request) -> Response:
        view = self._view(request.path_params["run_id"])
        parts = await self._look(view.journal.run_id, lambda: self._run_parts(view))
        title = f"{view.begun.get('pipeline', 'run')} · {view.journal.run_id}"
        return self._page("run.html.j2", title, parts, f"/run/{view.journal.run_id}/events")

    async def run_events(self, request: Request) -> Response:
        view = self._view(request.path_params["run_id"])
        look = lambda: self._look(view.journal.run_id, lambda: self._run_parts(view))  # noqa: E731 - two lines as a def
        return self._events(request, look, lambda: view.result is not None and not view.awaits_retry)

    async def act(self, request: Request) -> Response:
        """Cancel or retry a run through Prefect, whose rules for these hold."""
        action, view = request.path_params["action"], self._view(request.path_params["run_id"])
        flow_run, url = view.begun.get("flow_run_id"), prefect_api_url(self.root)
        if action not in STATES:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if not (flow_run and url):
            message = "no Prefect server runs here; `stemma up` starts it" if flow_run else "this run has no flow run"
            return JSONResponse({"message": message}, HTTPStatus.CONFLICT)
        try:
            body = {"state": STATES[action], "force": True}  # as the page of Prefect
            answer = await asyncio.to_thread(post, f"{url}/flow_runs/{flow_run}/set_state", body, 10.0)
        except (OSError, StemmaError) as error:
            return JSONResponse({"message": f"Prefect did not take it: {error}"}, HTTPStatus.BAD_GATEWAY)
        accepted = answer.get("status") == "ACCEPT"
        reason = (answer.get("details") or {}).get("reason") or "no reason given"
        if accepted and action == "retry":
            view.retried_at = time.monotonic()
        message = "asked for; the steps follow" if accepted else f"Prefect refused: {reason}"
        return JSONResponse({"message": message}, HTTPStatus.OK if accepted else HTTPStatus.CONFLICT)

    async def artifact(self, request: Request) -> Response:
        stage, fingerprint, path = (request.path_params[key] for key in ("stage", "fingerprint", "path"))
        store = Store(self.root, reading=True)
        manifest = store.find(stage, fingerprint) if _is_name(stage) and _is_name(fingerprint) else None
        if manifest is None or path not in {file.path for file in manifest.files}:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = {"Content-Security-Policy": ARTIFACT_POLICY, "X-Content-Type-Options": "nosniff"}
        kind = {"html": "text/html", "md": "text/plain", "json": "application/json", "jsonl": "text/plain"}
        media_type = kind.get(path.rpartition(".")[2], "application/octet-stream")
        return FileResponse(store.path(manifest) / path, media_type=media_type, headers=headers)

    async def static(self, request: Request) -> Response:
        name, kind = request.path_params["name"], request.url.path.rpartition(".")[2]
        files = {"report.css": REPORT_TEMPLATES, "dashboard.css": TEMPLATES, "dashboard.js": TEMPLATES}
        if (file := f"{name}.{kind}") not in files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return FileResponse(files[file] / file, headers={"Cache-Control": "no-cache"})

    def _view(self, run_id: str) -> RunView:
        if run_id not in self._views:
            if not (_is_name(run_id) and (self.root / "runs" / run_id / "journal.jsonl").is_file()):
                raise HTTPException(HTTPStatus.NOT_FOUND, f"no run {run_id[:60]} in this store")
            self._views[run_id] = RunView(self.root, run_id)
            # Finished runs are quickly read again.
            for old in list(self._views)[:-20]:
                del self._views[old]
        return self._views[run_id]

    async def _look(self, key: str, parts: Callable[[], dict[str, str]]) -> dict[str, str]:
        async with self._looks.setdefault(key, asyncio.Lock()):
            return await asyncio.to_thread(parts)

    def _home_parts(self) -> dict[str, str]:
        store = Store(self.root, reading=True) if (self.root / "runs").is_dir() else None
        settings = settings_of(self.root)
        services = [
            {"name": service.name, "page": settings.page_of(service.url), "state": state}
            for service, state in states(self.root)
            if service.name != "page"
        ]
        rows = []
        for row in runs(store) if store else ():
            rows.append(row)
            if len(rows) == RUNS_SHOWN:
                break
        models = artifacts(store, models_only=True)[:MODELS_SHOWN] if store else []
        return self._parts("home_parts.html.j2", {"runs": rows, "models": models, "services": services})

    def _run_parts(self, view: RunView) -> dict[str, str]:
        view.follow()
        prefect, mlflow = prefect_page(self.root), mlflow_page(self.root)
        links = (
            [("Prefect", f"{prefect}/runs/flow-run/{view.begun['flow_run_id']}")]
            if prefect and view.begun.get("flow_run_id")
            else []
        )
        links += [("MLflow", mlflow)] if mlflow else []
        return self._parts("run_parts.html.j2", {"view": view, "links": links, "has_prefect": prefect is not None})

    def _parts(self, template: str, values: dict[str, Any]) -> dict[str, str]:
        """Render each block of a template on its own: the page's parts by the id of their element."""
        blocks = self._templates.get_template(template)
        context = blocks.new_context(values)
        return {name: "".join(block(context)).strip() for name, block in blocks.blocks.items()}

    def _page(self, template: str, title: str, parts: dict[str, str], events: str) -> Response:
        shown = {name: Markup(html) for name, html in parts.items()}  # rendered with autoescape
        page = self._templates.get_template(template).render(title=title, parts=shown, events=events)
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-store"})

    def _events(
        self, request: Request, look: Callable[[], Awaitable[dict[str, str]]], has_ended: Callable[[], bool]
    ) -> Response:
        async def events() -> AsyncIterator[str]:
            sent: dict[str, bytes] = {}
            wait_s = SHORTEST_WAIT_S
            while not await request.is_disconnected():
                parts = await look()
                digests = {name: hashlib.sha256(html.encode()).digest() for name, html in parts.items()}
                changed = {name: parts[name] for name, digest in digests.items() if sent.get(name) != digest}
                sent = digests
                if changed:
                    yield f"data: {json.dumps(changed)}\n\n"
                else:
                    yield ": nothing new\n\n"
                if has_ended():
                    yield "event: ended\ndata: {}\n\n"
                    return
                wait_s = SHORTEST_WAIT_S if changed else min(LONGEST_WAIT_S, 2 * wait_s)
                await asyncio.sleep(wait_s)

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


class CredentialsAsked:
    """An ASGI app that only callers with the credentials reach, but for /health."""

    def __init__(self, app: ASGIApp, login: Credentials) -> None:
        self._app = app
        self._header = login.header.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._header):
                asking = {"WWW-Authenticate": 'Basic realm="stemma"'}
                await PlainTextResponse("credentials were expected", 401, asking)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_name(text: str) -> bool:
    """Return True for one part of a path that leads nowhere else."""
    return bool(text) and text not in (".", "..") and "/" not in text and "\0" not in text and not text.startswith(".")


def _clock(when: float | str) -> str:
    if isinstance(when, str):
        return when[:16].replace("T", " ") + " UTC"
    return time.strftime("%H:%M:%S", time.localtime(when))


async def _problem(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def app(root: Path, login: Credentials | None) -> App:
    """Return the app of a store; with credentials, only those who have them reach anything but /health."""
    pages: ASGIApp = Dashboard(root).app()
    return BoundedBody(CredentialsAsked(pages, login) if login else pages, LARGEST_BODY)


def serve(root: Path, host: str, port: int) -> None:
    Server(OwnCallersOnly(app(root, credentials()), Settings(host).callers(port)), host, port).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=4100)
    options = parser.parse_args()
    serve(options.root.absolute(), options.host, options.port)
