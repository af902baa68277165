"""Clients that send half a request, too much, or do not read: none holds a connection of our servers for good."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from infra.servers.asgi_server import BoundedBody, Server, TimedProtocol
from infra.servers.prefect.callers import App, Receive, Scope, Send
from tests.support.programs.processes import wait_until
from tests.support.services.raw_http import ask

MOST_BYTES = 100_000


async def size_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the number of bytes of the body; /unread does not read it, /large responds with 100 MB."""
    count, more = 0, scope["path"] == "/"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        count, more = count + len(message["body"]), message["more_body"]
    body = bytes(100_000_000) if scope["path"] == "/large" else json.dumps(count).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-read", b"yes")]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(app: App) -> Iterator[tuple[str, Server]]:
    """The app over real HTTP on a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = Server(app, "127.0.0.1", port)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            assert not thread.is_alive()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for limit in ("head_s", "body_s", "unread_s", "discard_s"):
        monkeypatch.setattr(TimedProtocol, limit, 0.2)
    with serving(BoundedBody(size_of_body, MOST_BYTES, lambda path: path == "/files")) as (url, _):
        yield url


def connected(url: str, *sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
    for part in sent:
        client.sendall(part)
    return client


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection; a client that waits a minute for that fails."""
    read = b""
    with client, suppress(ConnectionResetError):
        while part := client.recv(65_536):
            read += part
    return read


GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
HALVES = [
    pytest.param([b""], b"", id="nothing"),
    pytest.param([b"GET / HT"], b"408", id="half a line"),
    pytest.param([GET], b"408", id="half a head"),
    pytest.param([POST, b"half"], b"408", id="half a body"),
    pytest.param([CHUNKED + b"5\r\nab"], b"408", id="half a chunk"),
    pytest.param([POST.replace(b"/ ", b"/unread "), b"half"], b"200", id="half a body that is not read"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "status"), HALVES)
def test_half_a_request_is_given_up(url: str, sent: list[bytes], status: bytes) -> None:
    assert rest(connected(url, *sent))[9:12] == status


@pytest.mark.parametrize("first", [GET + b"\r\n", POST + bytes(1000)], ids=["GET", "POST"])
@pytest.mark.parametrize("second", [GET, POST], ids=["head", "body"])
def test_half_a_second_request_is_given_up_too(url: str, first: bytes, second: bytes) -> None:
    """The keep-alive limit ends with the first byte of the next request, or is none while both come together."""
    together = rest(connected(url, first + second))
    client = connected(url, first)
    before = client.recv(10_000)
    client.sendall(second)
    apart = before + rest(client)
    for read in (together, apart):
        statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", read)]
        assert statuses[0] == 200 and statuses[1:] in ([408], []), read


def test_a_client_that_sends_drop_by_drop_is_given_up(url: str) -> None:
    client = connected(url, POST)
    with pytest.raises(OSError):
        wait_until(lambda: client.sendall(b"a"))  # 20 bytes a second and more, and never the end
    client.close()


def test_300_half_sent_requests_are_given_up_and_others_are_served_meanwhile(url: str) -> None:
    clients = [connected(url, POST, b"half") for _ in range(300)]
    assert ask(url, "GET", "/").body == b"0"
    assert {rest(client)[9:12] for client in clients} == {b"408"}


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    closed = []
    lost = TimedProtocol.connection_lost
    monkeypatch.setattr(TimedProtocol, "connection_lost", lambda self, error: (closed.append(1), lost(self, error)))
    with connected(url, GET.replace(b"/ ", b"/large ") + b"\r\n"):
        wait_until(lambda: closed)
    assert ask(url, "GET", "/").status == 200, "others are served"


def test_a_slow_upload_within_the_rate_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a body grows with what has arrived: here a byte buys a second."""
    monkeypatch.setattr("infra.servers.asgi_server.SLOWEST_BYTES_PER_S", 1)
    client = connected(url, POST)
    assert ask(url, "GET", "/").status == 200  # the head of the first request has been read by now
    client.sendall(b"a")
    late = connected(url, POST)
    assert rest(late)[9:12] == b"408"  # it began later and sent nothing: the first one's limit is over too
    client.sendall(bytes(999))
    assert client.recv(10_000)[9:12] == b"200"
    client.close()


def chunked(size: int) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (1000, bytes(1000)) for _ in range(size // 1000)) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [(b"/", MOST_BYTES, b"200"), (b"/", MOST_BYTES + 1000, b"413"), (b"/files", 3 * MOST_BYTES, b"200")],
)
def test_a_body_is_bounded_whatever_its_length_is_called(url: str, path: bytes, size: int, status: bytes) -> None:
    assert rest(connected(url, chunked(size) % path))[9:12] == status
    plain = b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (path, size)
    assert rest(connected(url, plain, bytes(size)))[9:12] == status
    if status == b"413":  # refused by its head alone
        assert connected(url, plain).recv(10_000)[9:12] == status


def test_a_body_that_is_refused_never_reaches_the_app() -> None:
    async def none(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the app was called")

    sent = []

    async def send(message: object) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": bytes(60_000), "more_body": True}

    for headers in ([(b"content-length", b"700000000")], [(b"transfer-encoding", b"chunked")]):
        scope = {"type": "http", "path": "/", "headers": headers}
        asyncio.run(BoundedBody(none, MOST_BYTES)(scope, receive, send))  # type: ignore[arg-type]
    assert [message["status"] for message in sent if "status" in message] == [413, 413]  # type: ignore[operator, index]


async def hanging(scope: Scope, receive: Receive, send: Send) -> None:
    """A response that never ends, whatever becomes of its client."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await asyncio.Event().wait()


def test_a_server_ends_although_responses_hang_and_requests_are_half_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.servers.asgi_server.LIMITS", {"http": TimedProtocol, "timeout_graceful_shutdown": 1})
    with serving(BoundedBody(hanging, MOST_BYTES)) as (url, server):
        stream = connected(url, GET + b"\r\n")
        wait_until(lambda: b"begun" in stream.recv(10_000))
        half = connected(url, CHUNKED, b"5\r\nab")
        wait_until(lambda: len(server.server_state.tasks) == 2)
        server.should_exit = True
        assert rest(half)[9:12] == b"503"
        rest(stream)
