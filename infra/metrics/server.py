"""The metrics of one store for Prometheus, behind the same credentials as the pages where STEMMA_AUTH is set.

python -m infra.metrics.server ROOT --port 9464
"""

from __future__ import annotations

import argparse
import hmac
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from infra.metrics.queue import QueueCollector
from infra.metrics.store import StoreCollector
from infra.servers.callers import HEADERS, Callers
from infra.servers.credentials import Credentials, credentials
from infra.servers.settings import Settings

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def serve(root: Path, host: str, port: int) -> None:
    registry = CollectorRegistry()
    registry.register(StoreCollector(root))
    registry.register(QueueCollector(root))
    app = _guarded(make_wsgi_app(registry), credentials(), Settings(host).callers(port))
    make_server(host, port, app, server_class=_Server, handler_class=_Quiet).serve_forever()


def _guarded(metrics: App, known: Credentials | None, callers: Callers) -> App:
    """/health answers all of our callers, anything else only who knows the credentials."""

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if refused := callers.refusal(environ["REQUEST_METHOD"], _headers(environ)):
            start(f"{refused.status.value} {refused.status.phrase}", list(HEADERS))
            return [refused.body]
        if environ["PATH_INFO"] == "/health":
            start("200 OK", [("Content-Type", "text/plain")])
            return [b"OK"]
        given = environ.get("HTTP_AUTHORIZATION", "")
        if known and not hmac.compare_digest(given.encode(), known.header.encode()):
            start("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="stemma"'), ("Content-Type", "text/plain")])
            return [b"credentials were expected"]
        return metrics(environ, start)

    return app


def _headers(environ: Mapping[str, Any]) -> dict[str, str]:
    """WSGI has `HTTP_SEC_FETCH_SITE` for Sec-Fetch-Site, and says of a body's absence that it has no length."""
    found = {key[5:]: value for key, value in environ.items() if key.startswith("HTTP_")}
    found |= {key: environ[key] for key in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(key)}
    return {name.lower().replace("_", "-"): value for name, value in found.items()}


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9464)
    options = parser.parse_args()
    serve(options.root.absolute(), options.host, options.port)
