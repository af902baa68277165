"""Receivers of notices on loopback: a webhook and a mail server that keep what they get."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The address, and the list that (path, JSON document) pairs are added to."""
    got: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, json.loads(body)))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}", got


@contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """The port, and the list that each mail's lines are added to as one text. Speaks as much SMTP as a sender needs."""
    got: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 ready")
            for line in self.rfile:
                match line.split(maxsplit=1)[0].upper():
                    case b"DATA":
                        self._say("354 go on")
                        got.append(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                        self._say("250 kept")
                    case b"QUIT":
                        self._say("221 bye")
                        break
                    case _:
                        self._say("250 fine")

        def _say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield port, got


@contextmanager
def _serving(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
