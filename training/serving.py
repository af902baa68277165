"""An OpenAI-compatible endpoint over models of ours, with a page to talk to two of them side by side.

GET /v1/models, POST /v1/chat/completions and POST /v1/completions as in OpenAI's API reference, whole or streamed;
GET / is the page. It answers few people at a time: for many there is vLLM. Requests past its queue get 503.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from evaluation.page.parts import TEMPLATES
from infra.errors import StemmaError
from infra.servers.asgi_server import BoundedBody
from infra.servers.callers import App, Callers, OwnCallersOnly, Receive, Scope, Send
from infra.servers.credentials import Credentials
from training.answer_queue import Answer, AnswerQueue, Talk, Unavailable
from training.chat_session import Spoken, answer, continuation, loaded

MOST_BODY_BYTES = 4_000_000
"""Largest request: a million tokens of text, more than a model of ours reads."""
RETRY_AFTER_S = 5


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str | list[_Part]


class _Asked(BaseModel, ABC):
    """What both kinds of requests share. What is not known here is refused, since it would be ignored in silence."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.7, ge=0, le=2)
    seed: int = 17
    stream: bool = False
    n: Literal[1] = 1
    top_p: float = Field(1, ge=1, le=1)
    user: str | None = None
    stream_options: dict[str, bool] | None = None

    @abstractmethod
    def talk(self, folder: Path) -> Talk:
        """The answer of the model in `folder`, as it comes."""


class _Chat(_Asked):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def talk(self, folder: Path) -> Talk:
        said = [
            {"role": one.role, "content": one.content if isinstance(one.content, str) else _joined(one.content)}
            for one in self.messages
        ]
        return answer(folder, said, self.max_completion_tokens or self.max_tokens, self.temperature, self.seed)


class _Completion(_Asked):
    prompt: str

    def talk(self, folder: Path) -> Talk:
        return continuation(folder, self.prompt, self.max_tokens, self.temperature, self.seed)


def _joined(parts: list[_Part]) -> str:
    return "".join(part.text for part in parts)


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        self.status, self.error = status, {"message": message, "type": "invalid_request_error", "param": param}
        self.error["code"] = code


def app(
    models: Mapping[str, Path], callers: Callers, credentials: Credentials | None, answers: AnswerQueue | None = None
) -> App:
    """The ASGI app. models: folder of each name, the first being the one that a request without a name means.

    callers: whose requests are taken. credentials: asked for as user and password, or the password as an API key.
    answers: where answers wait for their turn; its `end` ends them all.
    """
    for folder in models.values():
        loaded(folder)  # what is wrong with a model is said now
    queue = answers or AnswerQueue()
    began = int(time.time())

    # All are coroutines: the threads that Starlette gives to plain functions are few.
    async def models_list(_: Request) -> Response:
        listed = [{"id": name, "object": "model", "created": began, "owned_by": "stemma"} for name in models]
        return JSONResponse({"object": "list", "data": listed})

    def endpoint(kind: type[_Asked], prefix: str, shape: Callable[[str, bool], dict[str, Any]], name: str) -> Any:
        async def respond(request: Request) -> Response:
            try:
                asked = _read(kind, await request.body())
                model = _named(asked.model, models)
            except _Refused as refused:
                return JSONResponse({"error": refused.error}, refused.status)
            head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
            try:
                answer = queue.begin(asked.talk(models[model]))
            except Unavailable as error:
                return _unavailable(error)
            if asked.stream:
                head["object"] = f"{name}.chunk" if kind is _Chat else name
                return _Streamed(answer, _events(answer, head, shape))
            try:
                text, spoken = await _whole(answer, request)
            except Unavailable as error:
                return _unavailable(error)
            except ClientDisconnect:
                raise
            except Exception as error:
                return JSONResponse({"error": _told(error)}, 400 if isinstance(error, StemmaError) else 500)
            finally:
                answer.stop()
            choice = {"index": 0, **shape(text, False), "finish_reason": _reason(spoken), "logprobs": None}
            usage = {"prompt_tokens": spoken.prompt_tokens, "completion_tokens": spoken.tokens}
            usage["total_tokens"] = sum(usage.values())
            return JSONResponse({**head, "object": name, "choices": [choice], "usage": usage})

        return respond

    page = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    css = (TEMPLATES / "report.css").read_text(encoding="utf8")

    async def chat_page(_: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
        names = list(models)
        shown = page.get_template("chat.html.j2").render(
            css=css, nonce=nonce, columns=[names[0], names[-1]], names=names
        )
        return HTMLResponse(shown, headers={"Content-Security-Policy": policy})

    routes = [
        Route("/", chat_page),
        Route("/v1/models", models_list),
        Route("/v1/chat/completions", endpoint(_Chat, "chatcmpl", _of_chat, "chat.completion"), methods=["POST"]),
        Route("/v1/completions", endpoint(_Completion, "cmpl", _of_text, "text_completion"), methods=["POST"]),
    ]
    bounded = BoundedBody(Starlette(routes=routes), MOST_BODY_BYTES)
    return OwnCallersOnly(_Guarded(bounded, credentials), callers)


class _Guarded:
    """An ASGI app behind HTTP Basic credentials, or their password as a bearer token, as OpenAI's clients send it."""

    def __init__(self, inner: App, known: Credentials | None) -> None:
        self._inner = inner
        self._accepted = [known.header, f"Bearer {known.password}"] if known else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._accepted:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(given, accepted.encode()) for accepted in self._accepted):
                asking = {"WWW-Authenticate": 'Basic realm="stemma"'}
                error = {
                    "message": "credentials were expected",
                    "type": "invalid_request_error",
                    "code": "no_credentials",
                }
                await JSONResponse({"error": error}, 401, asking)(scope, receive, send)
                return
        await self._inner(scope, receive, send)


def _read(kind: type[_Asked], body: bytes) -> _Asked:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise _Refused(400, f"{key}: {first['msg']}".removeprefix(": "), "bad_request", key or None) from None


def _named(name: str | None, models: Mapping[str, Path]) -> str:
    if name is None:
        return next(iter(models))
    if name not in models:
        raise _Refused(404, f"no model {name!r} is served; there are {', '.join(models)}", "model_not_found", "model")
    return name


class _Streamed(StreamingResponse):
    """A streamed answer, which ends with its client."""

    def __init__(self, answer: Answer, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.stop()


async def _whole(answer: Answer, request: Request) -> tuple[str, Spoken]:
    """The whole text and how it ended. Raises ClientDisconnect once the client has left."""

    async def read() -> tuple[str, Spoken]:
        text = "".join([piece async for piece in answer.pieces()])
        assert answer.spoken is not None
        return text, answer.spoken

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(_until_left(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ClientDisconnect
        return reading.result()
    finally:
        reading.cancel()
        leaving.cancel()


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    answer: Answer, head: Mapping[str, Any], shape: Callable[[str, bool], dict[str, Any]]
) -> AsyncIterator[str]:
    """Server-sent events: a chunk a piece, one with the reason why it ended, [DONE]."""

    def event(change: Mapping[str, Any], reason: str | None) -> str:
        choice = {"index": 0, **change, "finish_reason": reason, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    try:
        async for piece in answer.pieces():
            yield event(shape(piece, True), None)
        if answer.spoken is not None:
            yield event(shape("", True), _reason(answer.spoken))
    except Exception as error:
        yield f"data: {json.dumps({'error': _told(error)})}\n\n"
    yield "data: [DONE]\n\n"


def _of_chat(text: str, streamed: bool) -> dict[str, Any]:
    return {"delta" if streamed else "message": {"role": "assistant", "content": text}}


def _of_text(text: str, streamed: bool) -> dict[str, Any]:
    return {"text": text}


def _reason(spoken: Spoken) -> str:
    return "stop" if spoken.ended else "length"


def _told(error: Exception) -> dict[str, Any]:
    if isinstance(error, StemmaError):
        first = error.problems[0]
        kind, code = "invalid_request_error", first.code
        return {"message": str(first), "type": kind, "param": first.path or None, "code": code}
    if isinstance(error, Unavailable):
        return {"message": str(error), "type": "server_error", "param": None, "code": error.code}
    message = f"the answer could not be written: {type(error).__name__}; the server's log has more"
    return {"message": message, "type": "server_error", "param": None, "code": "crashed"}


def _unavailable(error: Unavailable) -> Response:
    return JSONResponse({"error": _told(error)}, 503, {"Retry-After": str(RETRY_AFTER_S)})
