"""HTTP servers that bound what a client may use: time, bytes, and the time until the server ends.

uvicorn waits indefinitely for the rest of a request and for a client that does not read its response; Starlette reads a
body of any size into memory. Here each phase of a request has a time limit, as in Apache's mod_reqtimeout:

- The head of a request arrives within HEAD_S.
- Its body arrives within BODY_S, plus one second per SLOWEST_BYTES_PER_S bytes that have arrived.
- A response that is not read is given up after UNREAD_S.
- A body of more bytes than the server allows is refused with 413 before the app sees it.

SIGTERM and SIGINT end a server within GRACE_S; a second signal ends it immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from infra.servers.prefect.callers import App, Receive, Refusal, Scope, Send, refuse

HEAD_S = 20.0
BODY_S = 20.0
SLOWEST_BYTES_PER_S = 10_000
UNREAD_S = 60.0
DISCARD_S = 5.0
"""Seconds for the rest of a body after the response: a client cut off while sending would not see the response."""
TICK_S = 1.0
"""Seconds between two updates of the Date header."""
GRACE_S = 5
"""Seconds for responses that have begun, once a server was asked to end."""


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits for what a client sends and reads."""

    head_s, body_s, unread_s, discard_s = HEAD_S, BODY_S, UNREAD_S, DISCARD_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._phase: tuple[object, ...] = ()
        self._phase_began = 0.0
        self._phase_bytes = 0
        self._phase_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._follow_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._phase_bytes += len(data)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._follow_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _follow_phase(self) -> None:
        """Start the timer in a phase in which the client must send data; stop it in any other phase."""
        phase = self._current_phase()
        if phase == self._phase:
            return
        self._phase, self._phase_began, self._phase_bytes = phase, self.loop.time(), 0
        if self._phase_timer is not None:
            self._phase_timer.cancel()
            self._phase_timer = None
        if phase:
            self._phase_timer = self.loop.call_later(self._allowed_s(), self._check_phase)

    def _current_phase(self) -> tuple[object, ...]:
        """Return the part of a request that the client must still send, and the current scope's id; empty if none."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return ()  # closed, or a websocket by now
        if self.conn.their_state is h11.SEND_BODY:
            return ("rest" if self.conn.our_state is h11.DONE else "body", id(self.scope))
        # Between two requests uvicorn's keep-alive limit applies, until the second one begins.
        is_begun = self.scope is None or bool(self.conn.trailing_data[0])
        return ("head", id(self.scope)) if self.conn.their_state is h11.IDLE and is_begun else ()

    def _allowed_s(self) -> float:
        match self._phase[0]:
            case "head":
                return self.head_s
            case "rest":
                return self.discard_s
            case _:
                return self.body_s + self._phase_bytes / SLOWEST_BYTES_PER_S

    def _check_phase(self) -> None:
        self._phase_timer = None
        if self._current_phase() != self._phase or not self._phase:
            return
        if self._phase[0] == "body" and self.flow.read_paused:
            self._phase_began = self.loop.time()  # the app does not read; the client is not late
        left_s = self._phase_began + self._allowed_s() - self.loop.time()
        if left_s > 0:
            self._phase_timer = self.loop.call_later(left_s, self._check_phase)
        else:
            self._give_up(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")

    def shutdown(self) -> None:
        """End with the server, without waiting for a request that has not fully arrived."""
        if self._phase and self._phase[0] == "body":
            self._give_up(HTTPStatus.SERVICE_UNAVAILABLE, "the server ends")
        else:
            super().shutdown()

    def _give_up(self, status: HTTPStatus, message: str) -> None:
        """End the connection, with a response where the client has begun a request that is not answered yet."""
        is_answered = self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE
        is_begun = self._phase[0] != "head" or bool(self.conn.trailing_data[0])
        if is_begun and not is_answered:
            headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=f"{message}\n".encode()),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # The app learns that its client is gone, and sends nothing after that response.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._phase_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._phase_timer = self._unread_timer = None


class BoundedBody:
    """An ASGI app whose requests have bodies of at most `most_bytes`, and whose clients leave no traceback in the log.

    Args:
        app: The app.
        most_bytes: Largest body of a request.
        takes_files: Returns True for paths that store files of any size; their bodies are not bounded.
    """

    def __init__(self, app: App, most_bytes: int, takes_files: Callable[[str], bool] = lambda path: False) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._takes_files = takes_files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and not self._takes_files(scope["path"]):
                await self._bounded(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except (ClientDisconnect, asyncio.CancelledError):
            return  # its client left, or its server ends: not an error of the app, so no traceback in the log

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if b"transfer-encoding" not in headers:
            # The protocol enforces the length that a client declares.
            if int(headers.get(b"content-length", b"0")) > self._most_bytes:
                await self._refuse(send)
                return
            await self._app(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                await self._refuse(send)
                return
            if not message.get("more_body"):
                break
        read: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return read.pop() if read else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        message = f"the body is larger than the {self._most_bytes:,} bytes that this server takes"
        await refuse(Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message), "http", send)


class Server(uvicorn.Server):
    """uvicorn's server, which ends in a bounded time, and which wakes once per second while it has nothing to do.

    uvicorn itself wakes ten times per second to see whether it was asked to end.

    Args:
        app: The ASGI app.
        host: The address to listen on.
        port: The port to listen on.
        on_end: Called in the event loop when the server is asked to end, before it waits for responses.
        options: Other options of `uvicorn.Config`.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self, app: App, host: str, port: int, on_end: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        super().__init__(uvicorn.Config(app, host=host, port=port, **({"log_level": "warning"} | LIMITS | options)))
        self._on_end = on_end

    @property
    def should_exit(self) -> bool:
        """True once the server was asked to end; set from any thread or signal handler, which wakes the event loop."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._asked_to_end.set)

    async def main_loop(self) -> None:
        self._asked_to_end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # sets the Date header of the next second
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked_to_end.wait(), TICK_S)

    async def shutdown(self, sockets: Any = None) -> None:
        self._on_end()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In uvicorn itself a second SIGTERM has no effect.
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)


LIMITS: dict[str, Any] = {"http": TimedProtocol, "timeout_graceful_shutdown": GRACE_S}
"""Options of `uvicorn.Config` for all our servers."""
