"""The page of a store as a server: home, runs while they go, reports of finished runs.

python -m flows.dashboard.server ROOT [--host 127.0.0.1] [--port 4100]

GET /            runs, what needs a person, models, services
GET /run/ID      one run; /run/ID/events sends the parts of the page that change, as server-sent events
GET /run/ID/change   the form of another run with its settings
POST /run/ID/cancel, /run/ID/retry, /run/ID/change    as on Prefect's page, by its API
POST /run/ID/keep    save what the stages have, then end
GET /models, /model/NAME    a model by its step, address or digest
POST /model/STAGE/FINGERPRINT/try, …/export, …/promote    the commands of these names; GET …/actions: results
GET /model/STAGE/FINGERPRINT/chat/    a conversation with a model that is tried, which …/chat/v1/* relay to
GET /data, /data/NAME       a corpus; ?q=WORDS searches in it, ?document=ID shows the way of a document
GET /compare?a=A&b=B        runs or models over each other; /compare/chart: one chart between two batches
GET /artifact/STAGE/FINGERPRINT/PATH  a file of a finished artifact, as its manifest lists it

Behind the same rules for callers and the same credentials as Prefect and MLflow.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp

from evaluation.pages.parts import TEMPLATES as REPORT_TEMPLATES
from evaluation.pages.words import seconds, size
from flows.dashboard.access import CredentialsAsked
from flows.dashboard.compare_view import compare_page, compared_chart
from flows.dashboard.data_view import data_page, data_sets
from flows.dashboard.form import FormChange, by_field
from flows.dashboard.home_view import HomeView
from flows.dashboard.model_actions import ACTIONS, READ_ONLY, ModelActions
from flows.dashboard.model_view import example_prompts, model_page
from flows.dashboard.reading import ReadingStore, find
from flows.dashboard.run_view import RunView
from flows.dashboard.served_model import refused
from flows.dashboard.steering import RefusedError, Steering
from infra.errors import ConfigError, StemmaError
from infra.io.json import parse_own_json
from infra.pages import STYLE_SHEET, style
from infra.servers.asgi_server import BoundedBody, Server
from infra.servers.credentials import Credentials, credentials
from infra.servers.prefect.callers import App, OwnCallersOnly
from infra.servers.settings import Settings, mlflow_page, prefect_page
from infra.servers.state import prefect_api_url

T = TypeVar("T")

TEMPLATES = Path(__file__).parent / "templates"
LARGEST_BODY = 50_000
SHORTEST_WAIT_S, LONGEST_WAIT_S = 1.0, 4.0
"""Time between two reads of a watched run: it doubles while nothing changes."""
LONGEST_QUERY, MODELS_SHOWN = 200, 60
LONGEST_NAME = 255
"""Bytes of a name in a folder."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
ARTIFACT_POLICY = "sandbox allow-same-origin; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Artifacts contain text of other people, so no script in them may run under our address."""


CHAT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{}'; connect-src 'self'; img-src data:"
ANSWERING = ("v1/chat/completions", "v1/completions")
"""Requests of a conversation that are relayed to the model."""


class Dashboard:
    """The pages of one store.

    Args:
        root: its folder.
        is_read_only: nothing can be started, cancelled or written from them.
    """

    def __init__(self, root: Path, *, is_read_only: bool = False) -> None:
        self.root = root
        self._is_read_only = is_read_only
        self._actions = ModelActions(root, is_read_only=is_read_only)
        self._templates = Environment(
            loader=FileSystemLoader([TEMPLATES, REPORT_TEMPLATES]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
        )
        files = (STYLE_SHEET, TEMPLATES / "dashboard.css", TEMPLATES / "dashboard.js")
        self._assets = {file.name: file.read_bytes() for file in files}
        self._templates.globals["asset"] = lambda name: f"/{name}?v={_version(self._assets[name])}"
        self._templates.filters |= {"seconds": seconds, "clock": _clock, "moment": _moment, "size": size}
        # However many people watch a page, one thread reads the store for it.
        self._looks: dict[str, asyncio.Lock] = {}
        self._views: dict[str, RunView] = {}
        self._home = HomeView(root)
        self._reading: ReadingStore | None = None

    def app(self) -> Starlette:
        routes = [
            Route("/", self.home),
            Route("/events", self.home_events),
            Route("/health", lambda _: PlainTextResponse("OK")),
            Route("/run/{run_id}", self.run),
            Route("/run/{run_id}/events", self.run_events),
            Route("/run/{run_id}/chart", self.chart),
            Route("/run/{run_id}/change", self.change, methods=["GET"]),
            Route("/run/{run_id}/change/{flow_run}", self.changed),
            Route("/run/{run_id}/{action}", self.act, methods=["POST"]),
            Route("/models", self.models),
            Route("/model/{stage}/{fingerprint}/actions", self.model_states),
            Route("/model/{stage}/{fingerprint}/chat/", self.chat),
            Route("/model/{stage}/{fingerprint}/chat/{path:path}", self.answer, methods=["POST"]),
            Route("/model/{stage}/{fingerprint}/{action}", self.act_on_model, methods=["POST"]),
            Route("/model/{reference:path}", self.model),
            Route("/data", self.data_sets),
            Route("/data/{reference:path}", self.data),
            Route("/compare", self.compare),
            Route("/compare/chart", self.compared_chart),
            Route("/artifact/{stage}/{fingerprint}/{path:path}", self.artifact),
            Route("/{name}.css", self.static),
            Route("/{name}.js", self.static),
        ]
        return Starlette(routes=routes, exception_handlers={ConfigError: _unknown, StemmaError: _problem})

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
        return self._events(request, look, lambda: view.has_ended)

    async def chart(self, request: Request) -> Response:
        """A chart of a run between two steps, drawn from all points there."""
        view = self._view(request.path_params["run_id"])
        title, steps = _zoomed(request)
        charts = await self._look(view.journal.run_id, lambda: dict(view.charts(steps)))
        return _chart_response(charts.get(title))

    async def act(self, request: Request) -> Response:
        """Cancel or retry a run through Prefect, whose rules for these hold."""
        action, view = request.path_params["action"], self._view(request.path_params["run_id"])
        if action not in ("cancel", "keep", "retry", "change"):
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if self._is_read_only:
            return JSONResponse({"message": READ_ONLY, "fields": {}}, HTTPStatus.FORBIDDEN)
        if action == "change":
            settings = _settings(await request.body())
            return await self._steered(lambda: self._change(view, settings))
        return await self._steered(lambda: self._act(view, action))

    async def change(self, request: Request) -> Response:
        """The form of a new run with the settings of this one."""
        view = self._view(request.path_params["run_id"])
        title = f"{view.begun.get('pipeline', 'run')} · change a setting"
        values: dict[str, Any] = {
            "run_id": view.journal.run_id,
            "pipeline": view.begun.get("pipeline", ""),
            "refused": "",
        }
        try:
            values["fields"] = (await asyncio.to_thread(lambda: FormChange(*self._flow_run(view)))).fields
        except (RefusedError, OSError, StemmaError) as error:
            values |= {"fields": [], "refused": str(error)}
        return self._page("change.html.j2", title, {}, "", **values)

    async def changed(self, request: Request) -> Response:
        """The reason why a changed run failed before it began; empty if it did not."""
        view = self._view(request.path_params["run_id"])
        flow_run = request.path_params["flow_run"]
        return await self._steered(lambda: {"message": self._flow_run(view)[0].reason_to_end(flow_run)})

    def _change(self, view: RunView, settings: Mapping[str, str]) -> dict[str, Any]:
        change = FormChange(*self._flow_run(view))
        try:
            run_id, flow_run = change.start(settings)
            return {"message": "passed to the worker; it will start soon", "run_id": run_id, "flow_run": flow_run}
        except ConfigError as error:
            fields, others = by_field(error.problems, change.fields)
            message = "; ".join(others) or "not started: correct the marked settings"
            raise RefusedError(message, HTTPStatus.UNPROCESSABLE_ENTITY, fields) from None

    def _act(self, view: RunView, action: str) -> dict[str, Any]:
        if action == "keep":
            return self._keep(view)
        steering, flow_run = self._flow_run(view)
        if action == "cancel":
            steering.cancel(flow_run)
        elif view.awaits_retry or view.awaits_end:
            raise RefusedError("it is being retried")
        else:
            view.awaits_end = True
            try:
                steering.retry(flow_run, lambda: view.journal.process() is not None)
                view.retried_at = time.monotonic()
            finally:
                view.awaits_end = False
        return {"message": "requested; the steps will stop"}

    def _keep(self, view: RunView) -> dict[str, Any]:
        """Ask a run to save what its stages have and to end; the run itself looks for the request."""
        if view.status != "running":
            raise RefusedError("it is not running")
        try:
            view.journal.ask_to_keep()
        except OSError as error:
            raise RefusedError(f"this page has no permission to write to its store: {error.strerror}") from None
        return {"message": "requested; a training step saves its state after the current batch and ends"}

    def _flow_run(self, view: RunView) -> tuple[Steering, str]:
        """Return the Prefect server that knows the flow run of a run, and its id."""
        flow_run, url = view.begun.get("flow_run_id"), prefect_api_url(self.root)
        if not flow_run:
            raise RefusedError("this run has no flow run")
        if not url:
            raise RefusedError("no Prefect server is running; `stemma up` starts it")
        return Steering(url), str(flow_run)

    async def _steered(self, call: Callable[[], dict[str, Any]]) -> Response:
        """Return the answer of a call to Prefect, or the reason why it was refused."""
        try:
            return JSONResponse(await asyncio.to_thread(call))
        except RefusedError as error:
            return JSONResponse({"message": str(error), "fields": error.fields}, error.status)
        except (OSError, StemmaError) as error:
            return JSONResponse({"message": f"Prefect did not take it: {error}"}, HTTPStatus.BAD_GATEWAY)

    async def models(self, request: Request) -> Response:
        query = request.query_params.get("q", "")[:LONGEST_QUERY].strip()
        rows = await asyncio.to_thread(self._store().models)
        matches = [row for row in rows if _matches(row, query.lower())] if query else rows
        shown = matches[:MODELS_SHOWN]
        return self._page("models.html.j2", "Models", {}, "", models=shown, query=query, count=len(matches))

    async def model(self, request: Request) -> Response:
        reference = request.path_params["reference"]
        values = await asyncio.to_thread(lambda: model_page(self._store(), reference, self._actions))
        return self._page("model.html.j2", values["address"], {}, "", **values)

    async def act_on_model(self, request: Request) -> Response:
        """Try, export or promote a model."""
        name = request.path_params["action"]
        if name not in ACTIONS:
            raise HTTPException(HTTPStatus.NOT_FOUND)

        def act() -> dict[str, Any]:
            folder, manifest = find(self._store(), _address(request), models_only=True)
            return vars(self._actions.start(self._store(), folder, manifest, name))

        return await self._steered(act)

    async def model_states(self, request: Request) -> Response:
        return JSONResponse(self._actions.states(_address(request)), headers={"Cache-Control": "no-store"})

    async def chat(self, request: Request) -> Response:
        """The conversation with a model that is tried; its own page if it is not."""
        address = _address(request)
        if (served := self._actions.served(address)) is None:
            return RedirectResponse(f"/model/{quote(address)}")
        nonce = secrets.token_urlsafe(16)
        examples, is_base = await asyncio.to_thread(lambda: example_prompts(self._store(), address))
        page = self._templates.get_template("chat.html.j2").render(
            css=style(),
            nonce=nonce,
            columns=served.names,
            names=served.names,
            examples=examples,
            back=address,
            is_base=is_base,
        )
        return HTMLResponse(
            page, headers={"Content-Security-Policy": CHAT_POLICY.format(nonce), "Cache-Control": "no-store"}
        )

    async def answer(self, request: Request) -> Response:
        """An answer of a model that is tried."""
        served, path = self._actions.served(_address(request)), request.path_params["path"]
        if path not in ANSWERING:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if served is None:
            return refused("the model is no longer loaded: press Try it on its page again")
        return await served.relay(f"/{path}", await request.body())

    async def data_sets(self, _: Request) -> Response:
        rows = await asyncio.to_thread(lambda: data_sets(self._store()))
        return self._page("data_sets.html.j2", "Data", {}, "", rows=rows)

    async def data(self, request: Request) -> Response:
        reference, query = request.path_params["reference"], request.query_params
        searched, document = (query.get(key, "")[:LONGEST_QUERY].strip() for key in ("q", "document"))
        values = await self._look("data", lambda: data_page(self._store(), reference, searched, document))
        return self._page("data.html.j2", f"Data {values['address']}", {}, "", **values)

    async def compare(self, request: Request) -> Response:
        values = await self._look("compare", lambda: compare_page(self._store(), _compared(request)))
        return self._page("compare.html.j2", "Comparison", {}, "", **values)

    async def compared_chart(self, request: Request) -> Response:
        """A chart of a comparison between two batches."""
        title, batches = _zoomed(request)
        sides = _compared(request)
        return _chart_response(
            await self._look("compare", lambda: compared_chart(self._store(), sides, title, batches))
        )

    def read_ahead(self) -> None:
        with suppress(StemmaError):  # the first page that needs the store reports it
            self._store().models()

    def _store(self) -> ReadingStore:
        """Return the store, whose manifests are kept in memory. Raises StemmaError for a folder that is none."""
        if self._reading is None:
            self._reading = ReadingStore(self.root)
        return self._reading

    async def artifact(self, request: Request) -> Response:
        stage, fingerprint, path = (request.path_params[key] for key in ("stage", "fingerprint", "path"))
        store = self._store()
        manifest = store.find(stage, fingerprint) if _is_name(stage) and _is_name(fingerprint) else None
        if manifest is None or path not in {file.path for file in manifest.files}:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = {"Content-Security-Policy": ARTIFACT_POLICY, "X-Content-Type-Options": "nosniff"}
        kind = {"html": "text/html", "md": "text/plain", "json": "application/json", "jsonl": "text/plain"}
        media_type = kind.get(path.rpartition(".")[2], "application/octet-stream")
        return FileResponse(store.path(manifest) / path, media_type=media_type, headers=headers)

    async def static(self, request: Request) -> Response:
        name, kind = request.path_params["name"], request.scope["path"].rpartition(".")[2]
        if (content := self._assets.get(f"{name}.{kind}")) is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        # Pages name the version: a browser asks once for each, and waits for none when it opens the next page.
        is_named = request.query_params.get("v") == _version(content)
        kept = "max-age=31536000, immutable" if is_named else "no-cache"
        media_type = "text/css" if kind == "css" else "text/javascript"
        return Response(content, media_type=media_type, headers={"Cache-Control": kept})

    def _view(self, run_id: str) -> RunView:
        if run_id not in self._views:
            if not (_is_name(run_id) and (self.root / "runs" / run_id / "journal.jsonl").is_file()):
                raise HTTPException(HTTPStatus.NOT_FOUND, f"no run {run_id[:60]} in this store")
            self._views[run_id] = RunView(self.root, run_id)
            # Finished runs are quickly read again.
            for old in list(self._views)[:-20]:
                del self._views[old]
        return self._views[run_id]

    async def _look(self, key: str, parts: Callable[[], T]) -> T:
        async with self._looks.setdefault(key, asyncio.Lock()):
            return await asyncio.to_thread(parts)

    def _home_parts(self) -> dict[str, str]:
        return self._parts("home_parts.html.j2", self._home.values(self._store()))

    def _run_parts(self, view: RunView) -> dict[str, str]:
        view.follow()
        prefect, mlflow = prefect_page(self.root), mlflow_page(self.root)
        links = (
            [("Prefect", f"{prefect}/runs/flow-run/{view.begun['flow_run_id']}")]
            if prefect and view.begun.get("flow_run_id")
            else []
        )
        links += [("MLflow", mlflow)] if mlflow else []
        return self._parts(
            "run_parts.html.j2",
            {
                "view": view,
                "charts": view.charts(),
                "links": links,
                "has_prefect": prefect is not None,
                "is_read_only": self._is_read_only,
            },
        )

    def _parts(self, template: str, values: dict[str, Any]) -> dict[str, str]:
        """Render each block of a template on its own: the page's parts by the id of their element."""
        blocks = self._templates.get_template(template)
        context = blocks.new_context(values)
        return {name: "".join(block(context)).strip() for name, block in blocks.blocks.items()}

    def _page(self, template: str, title: str, parts: dict[str, str], events: str, **values: Any) -> Response:
        shown = {name: Markup(html) for name, html in parts.items()}  # rendered with autoescape
        # The browser's first request for changes names what it shows: nothing of that is sent, or drawn, again.
        events = f"{events}?{urlencode(_digests(parts))}"
        page = self._templates.get_template(template).render(title=title, parts=shown, events=events, **values)
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-store"})

    def _events(
        self, request: Request, look: Callable[[], Awaitable[dict[str, str]]], has_ended: Callable[[], bool]
    ) -> Response:
        async def events() -> AsyncIterator[str]:
            sent: Mapping[str, str] = request.query_params
            wait_s = SHORTEST_WAIT_S
            while not await request.is_disconnected():
                parts = await look()
                digests = _digests(parts)
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


def _digests(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(html.encode()).hexdigest()[:16] for name, html in parts.items()}


def _address(request: Request) -> str:
    return f"{request.path_params['stage']}/{request.path_params['fingerprint']}"


def _settings(body: bytes) -> dict[str, str]:
    """Return the settings of a form, text by key. Raises HTTPException for a body of another shape."""
    try:
        given = parse_own_json(body).get("settings")
    except (ValueError, AttributeError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise HTTPException(HTTPStatus.BAD_REQUEST, 'expected {"settings": {KEY: TEXT}}')
    return given


def _compared(request: Request) -> list[str]:
    """The runs or models that a comparison is about."""
    sides = [value for key, value in request.query_params.multi_items() if key in ("a", "b", "side") and value]
    return list(dict.fromkeys(sides))


def _zoomed(request: Request) -> tuple[str, tuple[float, float]]:
    """The title of a chart, and the first and last step that are asked for."""
    query = request.query_params
    try:
        return query["title"], (float(query["from"]), float(query["to"]))
    except (KeyError, ValueError):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "expected ?title=…&from=STEP&to=STEP") from None


def _chart_response(chart: str | None) -> Response:
    if chart is None:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return HTMLResponse(chart, headers={"Content-Security-Policy": ARTIFACT_POLICY})


def _matches(model: Mapping[str, Any], query: str) -> bool:
    return any(query in str(model[key]).lower() for key in ("artifact", "step", "pipeline", "finished", "headline"))


def _version(content: bytes) -> str:
    """Return the part of the address of a style sheet or script that changes with its content."""
    return hashlib.sha256(content).hexdigest()[:16]


def _is_name(text: str) -> bool:
    """Return True for one part of a path that leads nowhere else."""
    is_short = len(text.encode("utf8", "replace")) <= LONGEST_NAME
    return bool(text) and is_short and "/" not in text and "\0" not in text and not text.startswith(".")


def _clock(when: float | str) -> str:
    if isinstance(when, str):
        return when[:16].replace("T", " ") + " UTC"
    return time.strftime("%H:%M:%S", time.gmtime(when))


def _moment(when: float) -> str:
    """Return seconds since 1970 as a date and time, as other pages show them."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when))


async def _unknown(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), HTTPStatus.NOT_FOUND)


async def _problem(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def app(root: Path, login: Credentials | None, *, read_ahead: bool = False, is_read_only: bool = False) -> App:
    """Return the app of a store; with credentials, only those who have them reach anything but /health.

    Args:
        read_ahead: read the manifests of the store before the first person asks for them.
        is_read_only: nothing can be started, cancelled or written from the pages.
    """
    dashboard = Dashboard(root, is_read_only=is_read_only)
    if read_ahead:
        threading.Thread(target=dashboard.read_ahead, daemon=True).start()
    pages: ASGIApp = dashboard.app()
    return BoundedBody(CredentialsAsked(pages, login) if login else pages, LARGEST_BODY)


def serve(root: Path, host: str, port: int, *, is_read_only: bool = False) -> None:
    pages = app(root, credentials(), read_ahead=True, is_read_only=is_read_only)
    Server(OwnCallersOnly(pages, Settings(host).callers(port)), host, port).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=4100)
    options = parser.parse_args()
    serve(options.root.absolute(), options.host, options.port)
