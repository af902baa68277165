"""An endpoint of OpenAI's protocol on loopback that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any, dict[str, str]]
"""Status, body (text, or what becomes JSON) and further headers."""


@dataclass
class Calls:
    """What was asked. most: the largest number of requests that were under way at once."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]


def completion(text: str | None, finish: str = "stop") -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    return 200, {"object": "chat.completion", "model": "scripted-1", "choices": [choice], "usage": usage}, {}


@contextmanager
def endpoint(reply: Callable[[dict[str, Any], int], Reply]) -> Iterator[tuple[str, Calls]]:
    """The address up to /v1, and the calls. reply: given the body of a request and its number, from 0."""
    calls = Calls()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            if self.path != "/v1/chat/completions":
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with calls.lock:
                number = len(calls.bodies)
                calls.bodies.append(body)
                calls.headers.append(dict(self.headers))
                calls.now += 1
                calls.most = max(calls.most, calls.now)
            try:
                status, said, headers = reply(body, number)
            finally:
                with calls.lock:
                    calls.now -= 1
            data = (said if isinstance(said, str) else json.dumps(said)).encode()
            with suppress(OSError):  # a client that gave up
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", calls
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
