"""Targets: requests to `serve`, and to the pages of a store. Each must be answered, with no error of the server's."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

from tests.fuzz import damage, store
from tests.fuzz.harness import Target, Violation


class Request(NamedTuple):
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a"],
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "pattern": "^a+$"},
                "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            },
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"x": {"type": "null"}},
        },
    },
}
CHATS = [
    {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9,
    "seed": 1, "n": 2},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]}],
    "max_completion_tokens": 2,
     "stop": ["a"], "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.0}, "presence_penalty": 1,
     "frequency_penalty": -1},
    {"model": "m", "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}, {"role": "tool",
        "tool_call_id": "c", "content": "2"}],
     "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2},
    {"messages": [{"role": "user", "content": "Q"}], "stream": True, "stream_options": {"include_usage": True},
    "max_tokens": 2},
    {"messages": [{"role": "user", "content": "Q"}], "response_format": SCHEMA, "max_tokens": 4},
    {"messages": [{"role": "user", "content": "Q"}], "response_format": {"type": "json_object"}, "max_tokens": 4,
    "user": "u"},
    {"messages": [{"role": "user", "content": "Q"}], "tools": [TOOL], "tool_choice": {"type": "function",
    "function": {"name": "f"}},
     "parallel_tool_calls": False, "max_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}},
]  # fmt: skip
COMPLETIONS = [
    {"prompt": "Once", "max_tokens": 3, "echo": True, "logprobs": 2, "n": 1, "best_of": 1},
    {"prompt": ["Once", "Twice"], "max_tokens": 2, "stop": "x", "suffix": None, "stream": True},
    {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": [5, 6], "max_tokens": 2, "temperature": 2, "seed": 3},
]
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "get", "X" * 50, "")
HEADERS = (
    (b"host", b"127.0.0.1"), (b"host", b"evil.example"), (b"host", b""), (b"host", b"\xff"), (b"origin", b"null"),
    (b"origin", b"http://a"),
    (b"content-type", b"application/json"), (b"content-type", b"text/plain"), (b"content-type",
    b"application/json; charset=utf-16"),
    (b"content-length", b"-1"), (b"content-length", b"99999999999"), (b"authorization",
    b"Basic ????"),
    (b"authorization", b"Bearer \xff"), (b"sec-fetch-site", b"cross-site"), (b"accept", b"*/*"), (b"range",
    b"bytes=0-5"), (b"range", b"bytes=a-"),
    (b"range", b"bytes=5-1,2-3"), (b"if-range", b"x"), (b"cookie", b"a=b; =; \xff"), (b"x" * 300, b"y" * 5_000),
    (b"transfer-encoding", b"chunked"),
)  # fmt: skip
_USUAL = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]


@composite
def requests(
    draw: DrawFn, paths: Sequence[str], bodies: SearchStrategy[bytes], usual: Sequence[tuple[str, str]]
) -> Request:
    if draw(st.integers(0, 3)):
        method, path = draw(st.sampled_from(list(usual)))
    else:
        method, path = draw(st.sampled_from(METHODS)), draw(st.sampled_from(list(paths)))
    if not draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(path)))
        path = path[:at] + draw(damage.texts()) + path[at:]
    query = b""
    if not draw(st.integers(0, 2)):
        pairs = draw(st.lists(st.tuples(st.sampled_from(QUERIES), st.sampled_from(QUERY_VALUES)), max_size=4))
        query = "&".join(f"{key}={value}" for key, value in pairs).encode()
        query = draw(damage.damaged(query, 1))
    headers = list(_USUAL)
    for header in draw(st.lists(st.sampled_from(HEADERS), max_size=2)):
        if draw(st.booleans()):
            headers = [item for item in headers if item[0] != header[0]]
        headers.append(header)
    return Request(method, path, query, headers, draw(bodies) if method not in ("GET", "HEAD") else b"")


QUERIES = ("q", "a", "b", "side", "title", "from", "to", "document", "x", "", "%00", "page")
QUERY_VALUES = (
    "", "1", "-1", "nan", "inf", "1e999", "pretrain", "register", "pretrain/0", "20261121-071500-123456-1f2e3d",
    "sft/..", "%ff", "%00", "a%20b",
    "%F0%9F%98%80", "x" * 3_000, "(", "[a", "*", "\\", "'", '"', "<b>", "loss", "+", "%", "ingest", "ingest/1",
    "%ed%a0%80",
)  # fmt: skip


def _answer(app: Callable[..., Any], request: Request) -> tuple[int, bytes]:
    """The status and body that an ASGI app gives; a client that leaves once its request was sent."""
    messages: list[MutableMapping[str, Any]] = []
    sent = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        if is_endless:
            return {"type": "http.disconnect"}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    from urllib.parse import unquote_to_bytes

    raw = request.path.encode("utf8", "surrogatepass")
    is_endless = "events" in request.path
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": unquote_to_bytes(raw).decode("utf8", "replace"), "raw_path": raw, "query_string": request.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers], "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    starts = [message for message in messages if message["type"] == "http.response.start"]
    if len(starts) != 1:
        raise Violation(f"{len(starts)} responses to {request.method} {request.path[:80]}")
    body = b"".join(message.get("body", b"") for message in messages if message["type"] == "http.response.body")
    return starts[0]["status"], body


@cache
def _model(process: int) -> Path:
    """A model of one layer, untrained, in a folder for this process."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from corpus.tokens.chat_template import SPECIAL_TOKENS
    from tests.support.tokenizers import with_chat
    from training.checkpoint.export import export
    from training.config import ModelConfig
    from training.model.models import build, hf_config

    folder = Path(tempfile.mkdtemp(prefix="stemma-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["What is a list? It is a sequence."], trainer)
    with_chat(tokenizer).save_pretrained(folder / "tokenizer")
    config = ModelConfig(family="llama", layers=1, width=16, heads=2, positions=512)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    export(build(hf_config(config, 300, special), seed=3), folder / "tokenizer", folder / "model")
    return folder / "model"


@cache
def _serving(process: int) -> Callable[..., Any]:
    from infra.servers.settings import Settings
    from training.serving import app

    served: Callable[..., Any] = app({"m": _model(process)}, Settings().callers(0), None)
    return served


def check_serve(request: Request, _: Path) -> None:
    status, body = _answer(_serving(os.getpid()), request)
    if status >= 500 or b'"code": "crashed"' in body or b'"code":"crashed"' in body:
        raise Violation(f"status {status} of {request.path[:60]}: {body[:500]!r}")
    if status >= 400:
        error = json.loads(body)["error"] if request.method != "HEAD" and body else {"message": "x"}
        if not error["message"]:
            raise Violation("an error without a message")
    elif b"data: " in body[:6] and not body.endswith(b"data: [DONE]\n\n"):
        raise Violation("a stream without an end")


@cache
def _pages(process: int) -> Callable[..., Any]:
    from flows.dashboard.server import app
    from infra.servers.prefect.callers import OwnCallersOnly
    from infra.servers.settings import Settings

    folder = store._base()
    store.built(folder)
    return OwnCallersOnly(app(folder / "store", None), Settings().callers(0))


def check_pages(request: Request, _: Path) -> None:
    status, body = _answer(_pages(os.getpid()), request)
    if status >= 500 and status != 502:
        raise Violation(f"status {status} of {request.path[:60]}: {body[:500]!r}")


def check_damaged_pages(value: tuple[store.Damaged, Request], _: Path) -> None:
    """A page of a store in which a file is damaged: what Starlette answers with 500 by itself is raised here."""
    from flows.dashboard.server import app

    damaged, request = value
    with store.with_damage(damaged) as folder:
        _answer(app(folder / "store", None), request)


@composite
def serve_requests(draw: DrawFn) -> Request:
    paths = (
        "/",
        "/health",
        "/v1/models",
        "/v1/models/m",
        "/v1/models/",
        "/v1",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/chat/completions/",
    )
    if draw(st.integers(0, 2)):
        return draw(requests(paths, _bodies(CHATS), (("POST", "/v1/chat/completions"),)))
    return draw(
        requests(paths, _bodies(COMPLETIONS), (("POST", "/v1/completions"), ("GET", "/v1/models/m"), ("GET", "/")))
    )


@composite
def _bodies(draw: DrawFn, values: Sequence[Any]) -> bytes:
    body = damage.encoded(damage.as_json(draw(damage.edited(values, 2))))
    return body if draw(st.integers(0, 3)) else draw(damage.damaged(draw(damage.recoded(body)), 2))


@composite
def page_requests(draw: DrawFn) -> Request:
    run = "20261121-071500-123456-1f2e3d"
    gets = (
        "/", "/events", "/health", f"/run/{run}", f"/run/{run}/events", f"/run/{run}/chart", f"/run/{run}/change",
        "/models", "/model/pretrain",
        "/model/register", "/data", "/data/ingest", "/compare", "/style.css", "/dashboard.js",
        "/artifact/pretrain/0/config.json",
        "/artifact/..%2f../x/y", "/run/..", "/run/%2e%2e/events", "/model/", "/data/ingest/0", "/x.css", "/run/%00",
    )  # fmt: skip
    posts = (f"/run/{run}/cancel", f"/run/{run}/retry", f"/run/{run}/change", f"/run/{run}/x", "/run/x/cancel")
    usual = [*(("GET", path) for path in gets), *(("POST", path) for path in posts)]
    return draw(requests((*gets, *posts), _bodies([{"settings": {"sft.seed": "3"}}]), usual))


class _Errors(logging.Handler):
    """Faults that a server logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@cache
def _server(process: int) -> tuple[int, _Errors]:
    """The pages of a store on a port, with the limits for clients that the real server has."""
    from infra.servers.asgi_server import Server
    from infra.servers.ports import any_free_port

    port, errors = any_free_port(), _Errors()
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).addHandler(errors)
    server = Server(_pages(process), "127.0.0.1", port)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return port, errors


RAW = (
    b"GET /models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    b"GET /data?q=a%20b HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /run/20261121-071500-123456-1f2e3d/cancel HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\nConnection: close\r\n\r\n{}",
    b"POST /run/20261121-071500-123456-1f2e3d/change HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n10\r\n{"settings": {}}\r\n0\r\n\r\n',
)
RAW_TOKENS = (
    *damage.TOKENS, b"Content-Length: x\r\n", b"Content-Length: -1\r\n", b"Content-Length: 5\r\n",
    b"Transfer-Encoding: gzip\r\n",
    b"Host: \xff\r\n", b" HTTP/2.0", b" HTTP/9", b"CONNECT ", b"http://a/", b"*", b"Upgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"\r\n\r\n", b"ffffffff\r\n", b"X: " + b"y" * 70_000 + b"\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
)  # fmt: skip


def check_raw(content: bytes, _: Path) -> None:
    """A client that sends these bytes, and no more, gets an answer or is left, and the server goes on."""
    port, errors = _server(os.getpid())
    errors.texts.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client, suppress(OSError):
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65_536):
            answer += part
        status = answer.split(b" ", 2)[1][:3] if answer.startswith(b"HTTP/") else b""
        if status[:1] == b"5" and status != b"502":
            raise Violation(f"status {status!r}: {answer[:500]!r}")
    if errors.texts:
        raise Violation(f"the server logged {errors.texts[0][-3_000:]}")


TARGETS = (
    Target(
        "http-damaged-store",
        lambda: st.tuples(store.damaged_files(), page_requests()),
        check_damaged_pages,
    ),
    Target("http-raw", lambda: damage.byte_files(RAW, 4, RAW_TOKENS), check_raw),
    Target("http-serve", serve_requests, check_serve),
    Target("http-pages", page_requests, check_pages),
)
