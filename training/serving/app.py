"""The ASGI app: GET /v1/models, POST /v1/chat/completions and /v1/completions as in OpenAI's API reference, whole or
streamed; GET / is the page. Requests that exceed its queue get 503.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from corpus.model_folders.pretrained import load_pretrained_tokenizer
from evaluation.generation.token_choice import SamplingOptions, TokenBias
from evaluation.pages.parts import TEMPLATES
from infra.errors import StemmaError
from infra.pages import style
from infra.servers.api_keys import RateLimit
from infra.servers.asgi_server import BoundedBody
from infra.servers.credentials import Credentials
from infra.servers.prefect.callers import App, Callers, OwnCallersOnly, Receive, Scope, Send
from training.chat.channels import Reasoning
from training.chat.tool_calls import AnswerFormat, ParsedToolCall
from training.generation.answer_text import AnswerRequest, PlacedToken, Spoken, TextPiece
from training.generation.constraint import Constraint, Vocabulary
from training.generation.session import loaded
from training.serving.answer_queue import AnswerQueue, QueuedAnswers, Unavailable
from training.serving.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Refused,
    RequestPrompt,
    read,
    served_name,
)
from training.serving.responses import ChatShape, Shape, TextShape, TokenTexts, as_call

MOST_BODY_BYTES = 4_000_000
"""Largest request: a million tokens of text, more than a model of ours reads."""
RETRY_AFTER_S = 5


def app(
    models: Mapping[str, Path],
    callers: Callers,
    credentials: Credentials | None,
    answers: AnswerQueue | None = None,
    *,
    keys: Sequence[Credentials] = (),
    rate_limit: RateLimit | None = None,
) -> App:
    """The ASGI app.

    Args:
        models: Folder of each name, the first is the default for requests without a name.
        callers: The clients whose requests are accepted.
        credentials: Required as user and password, or the password as an API key.
        answers: The queue of answers; its `end` ends them all.
        keys: Further names and API keys, which are accepted in the same ways.
        rate_limit: Of the requests for answers of each name, or of each address where no key is required.
    """
    for folder in models.values():
        loaded(folder)  # raises now if a model cannot be loaded
    server = _Server(models, answers or AnswerQueue())
    routes = [
        Route("/", server.chat_page),
        Route("/health", server.health),
        Route("/v1/models", server.models_list),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completion, methods=["POST"]),
    ]
    bounded = BoundedBody(Starlette(routes=routes), MOST_BODY_BYTES)
    known = [*([credentials] if credentials else []), *keys]
    return _JsonErrors(OwnCallersOnly(_Guarded(bounded, known, rate_limit), callers))


EXAMPLES = (
    "Explain in one sentence what a list is.",
    "Write the first line of the docstring of the function `sort_by_key`.",
    "Describe `read_file` in 7 to 9 words.",
    "What is the difference between a list and a tuple?",
)
"""Prompts that the page offers, in the forms that the quickstart's instructions have."""


class _Server:
    """The endpoints. All are coroutines: Starlette has few threads for plain functions."""

    def __init__(self, models: Mapping[str, Path], queue: AnswerQueue) -> None:
        self._models, self._queue = models, queue
        self._began = int(time.time())
        self._positions = {name: queue.positions_of(folder) for name, folder in models.items()}
        self._texts = {name: TokenTexts(loaded(folder).tokenizer) for name, folder in models.items()}
        self._formats = {name: AnswerFormat(loaded(folder).tokenizer) for name, folder in models.items()}
        # Encoding changes settings of a tokenizer, which fails while another thread decodes or encodes with it.
        self._encoders = {name: load_pretrained_tokenizer(folder) for name, folder in models.items()}
        self._encoding = threading.Lock()
        self._vocabularies: dict[str, Vocabulary] = {}
        self._page = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
        self._css = style()

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models_list(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._listed(name) for name in self._models]})

    async def model(self, request: HttpRequest) -> Response:
        try:
            return JSONResponse(self._listed(served_name(request.path_params["name"], self._models)))
        except Refused as refused:
            return JSONResponse({"error": refused.error}, refused.status)

    def _listed(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began, "owned_by": "stemma"}

    async def chat_page(self, _: HttpRequest) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
        names = list(self._models)
        shown = self._page.get_template("chat.html.j2").render(
            css=self._css, nonce=nonce, columns=[names[0], names[-1]], names=names, examples=EXAMPLES
        )
        return HTMLResponse(shown, headers={"Content-Security-Policy": policy})

    async def chat(self, request: HttpRequest) -> Response:
        return await self._respond(request, ChatRequest, ChatShape())

    async def completion(self, request: HttpRequest) -> Response:
        return await self._respond(request, CompletionRequest, TextShape())

    async def _respond(self, request: HttpRequest, kind: type[GenerationRequest], shape: Shape) -> Response:
        try:
            query = read(kind, await request.body())
            name = served_name(query.model, self._models)
            with self._queue.place():
                # In a thread, since encoding a long prompt takes time.
                prompts = await asyncio.to_thread(self._prompts, query, name)
                constraint = await asyncio.to_thread(self._constraint, query, name) if query.is_constrained else None
            choices = _Choices(
                query,
                prompts,
                self._positions[name],
                name,
                shape,
                self._texts[name],
                self._formats[name] if kind is ChatRequest else None,
                constraint,
            )
            answers = self._queue.begin(self._models[name], choices.requests)
        except Refused as refused:
            return JSONResponse({"error": refused.error}, refused.status)
        except StemmaError as error:
            return JSONResponse({"error": _error(error)}, 400)
        except Unavailable as error:
            return _unavailable(error)
        if query.stream:
            return _Streamed(answers, choices.events(answers))
        try:
            return JSONResponse(await _unless_left(choices.whole(answers), request))
        except Unavailable as error:
            return _unavailable(error)
        except ClientDisconnect:
            raise
        except Exception as error:
            return JSONResponse({"error": _error(error)}, 400 if isinstance(error, StemmaError) else 500)
        finally:
            answers.stop()

    def _prompts(self, query: GenerationRequest, name: str) -> list[RequestPrompt]:
        """The request's prompts. Raises Refused where one leaves the model no room for an answer."""
        tokenizer, positions = self._encoders[name], self._positions[name]
        with self._encoding:
            prompts = query.prompts(tokenizer)
        key = "messages" if isinstance(query, ChatRequest) else "prompt"
        for prompt in prompts:
            least = len(prompt.ids) + (query.most_tokens != 0)
            if not prompt.ids:
                raise Refused(400, f"{key}: expected at least one token", "invalid_value", key)
            if least > positions:
                message = (
                    f"This model's maximum context length is {positions} tokens. However, your {key} resulted in "
                    f"{len(prompt.ids)} tokens, which leaves no room for an answer. Please reduce the length of the "
                    f"{key}."
                )
                raise Refused(400, message, "context_length_exceeded", key)
        vocabulary = len(tokenizer)
        if wrong := [token for token in query.logit_bias if not 0 <= token < vocabulary]:
            message = f"logit_bias: expected token ids from 0 to {vocabulary - 1}, not {wrong[0]}"
            raise Refused(400, message, "invalid_token_id", "logit_bias")
        return prompts

    def _constraint(self, asked: GenerationRequest, name: str) -> Constraint | None:
        """The grammar that the answers keep to. Raises Refused where the model cannot write in it."""
        assert isinstance(asked, ChatRequest)
        key = "tool_choice" if asked.must_call else "response_format"
        if (answer_format := self._formats[name]).has_channels:
            message = f"{key}: this value is not supported for models whose answers are messages in channels"
            raise Refused(400, message, "invalid_value", key)
        with self._encoding:
            if name not in self._vocabularies:
                self._vocabularies[name] = Vocabulary(self._encoders[name], answer_format.marks)
        vocabulary = self._vocabularies[name]
        if vocabulary.missing:
            message = f"{key}: this model cannot write JSON: no token of its own has {', '.join(vocabulary.missing)}"
            raise Refused(400, message, "invalid_value", key)
        return asked.constraint(vocabulary, answer_format.form)


class _Choices:
    """The choices of a response: `n` for each prompt."""

    def __init__(
        self,
        asked: GenerationRequest,
        prompts: Sequence[RequestPrompt],
        positions: int,
        name: str,
        shape: Shape,
        texts: TokenTexts,
        answer_format: AnswerFormat | None,
        constraint: Constraint | None,
    ) -> None:
        self._constraint = constraint
        self._asked, self._prompts, self._shape, self._texts = asked, prompts, shape, texts
        self._head = {
            "id": f"{shape.prefix}-{secrets.token_hex(12)}",
            "object": shape.chunk if asked.stream else shape.object,
            "created": int(time.time()),
            "model": name,
        }
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        names = asked.functions_shown
        shown = answer_format.shown(names) if answer_format else frozenset()
        self.requests = [
            self._request(prompt, positions, seed, number, shown) for prompt in prompts for number in range(asked.n)
        ]
        self._readers = [answer_format.reader(names) if answer_format else None for _ in self.requests]

    def _request(
        self, prompt: RequestPrompt, positions: int, seed: int, number: int, shown: frozenset[int]
    ) -> AnswerRequest:
        asked, room = self._asked, positions - len(prompt.ids)
        options = SamplingOptions(
            max_new_tokens=room if asked.most_tokens is None else min(room, asked.most_tokens),
            stop_ids=prompt.stop_ids,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=seed,
            number=number,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            bias=TokenBias({(token,): bias for token, bias in asked.logit_bias.items()}) if asked.logit_bias else None,
            logprobs=asked.likeliest,
        )
        reported = asked.likeliest if asked.echoes else None
        return AnswerRequest(prompt.ids, options, asked.stop, reported, shown, self._constraint)

    def _returns_another_call(self, calls: int) -> bool:
        """Return True if a call of a function follows `calls` earlier ones of the same choice."""
        return not calls or getattr(self._asked, "parallel_tool_calls", True)

    async def whole(self, answers: QueuedAnswers) -> dict[str, Any]:
        texts = {number: [self._echo(number)] for number in range(len(self.requests))}
        tokens: dict[int, list[PlacedToken]] = {number: [] for number in texts}
        calls: dict[int, list[dict[str, Any]]] = {number: [] for number in texts}
        reasoning = dict.fromkeys(texts, "")
        async for number, piece in answers.pieces():
            for part in self._parts(number, piece):
                if isinstance(part, str):
                    texts[number].append(part)
                elif isinstance(part, Reasoning):
                    reasoning[number] += part.text
                elif self._returns_another_call(len(calls[number])):
                    calls[number].append(as_call(part))
            if isinstance(piece, TextPiece):
                tokens[number] += self._placed(number, piece)
        choices = [
            {
                "index": number,
                **self._shape.whole("".join(texts[number]), calls[number], reasoning[number]),
                "logprobs": self._logprobs(tokens[number]),
                "finish_reason": _reason(answers.spoken[number], has_calls=bool(calls[number])),
            }
            for number in texts
        ]
        return {**self._head, "choices": choices, "usage": self._usage(answers)}

    async def events(self, answers: QueuedAnswers) -> AsyncIterator[str]:
        """Server-sent events: a chunk for each piece, one for each choice with the reason why it ended, [DONE]."""
        options = self._asked.stream_options
        with_usage = options is not None and options.include_usage
        usage = {"usage": None} if with_usage else {}

        def event(number: int, change: Mapping[str, Any], tokens: Sequence[PlacedToken], reason: str | None) -> str:
            choice = {"index": number, **change, "logprobs": self._logprobs(tokens), "finish_reason": reason}
            return f"data: {json.dumps({**self._head, 'choices': [choice], **usage})}\n\n"

        try:
            for number in range(len(self.requests)):
                if (first := self._shape.first()) is not None:
                    yield event(number, first, (), None)
                if echo := self._echo(number):
                    yield event(number, self._shape.part(echo), (), None)
            called = dict.fromkeys(range(len(self.requests)), 0)
            async for number, piece in answers.pieces():
                tokens = self._placed(number, piece) if isinstance(piece, TextPiece) else ()
                for part in self._parts(number, piece):
                    if isinstance(part, str):
                        yield event(number, self._shape.part(part), tokens, None)
                    elif isinstance(part, Reasoning):
                        yield event(number, {"delta": {"reasoning_content": part.text}}, tokens, None)
                    elif self._returns_another_call(called[number]):
                        call = {"index": called[number], **as_call(part)}
                        called[number] += 1
                        yield event(number, {"delta": {"tool_calls": [call]}}, tokens, None)
                    tokens = ()
                if tokens:
                    yield event(number, self._shape.part(""), tokens, None)
                if isinstance(piece, Spoken):
                    yield event(number, self._shape.last(), (), _reason(piece, has_calls=bool(called[number])))
            if with_usage:
                yield f"data: {json.dumps({**self._head, 'choices': [], 'usage': self._usage(answers)})}\n\n"
        except Exception as error:
            yield f"data: {json.dumps({'error': _error(error)})}\n\n"
        yield "data: [DONE]\n\n"

    def _parts(self, number: int, piece: TextPiece | Spoken) -> Iterator[str | Reasoning | ParsedToolCall]:
        """The texts, reasoning and calls that a piece of a choice, or its end, makes certain."""
        reader = self._readers[number]
        if isinstance(piece, Spoken):
            yield from reader.end() if reader else ()
        elif reader:
            yield from reader.add(piece.text)
        elif piece.text:
            yield piece.text

    def _echo(self, number: int) -> str:
        """Return the text of a choice's prompt, if the request wants it before the answer."""
        if not self._asked.echoes:
            return ""
        prompt = self._prompts[number // self._asked.n]
        return "".join(self._texts[token] for token in prompt.ids) if prompt.text is None else prompt.text

    def _placed(self, number: int, piece: TextPiece) -> Sequence[PlacedToken]:
        """The tokens of a piece with their places in the text of the choice, which may begin with the prompt's."""
        if not self._asked.echoes or not piece.tokens:
            return piece.tokens
        if not piece.of_prompt:
            length = len(self._echo(number))
            return [PlacedToken(one.token, one.offset + length) for one in piece.tokens]
        placed, offset = [], 0
        for one in piece.tokens[self._prompts[number // self._asked.n].added :]:
            placed.append(PlacedToken(one.token, offset))
            offset += len(self._texts[one.token.id])
        return placed

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        """Log-probabilities of tokens in the endpoint's form; None where the request wants none, or has none here."""
        if self._asked.likeliest is None or (self._asked.stream and not tokens):
            return None
        return self._shape.logprobs(tokens, self._texts)

    def _usage(self, answers: QueuedAnswers) -> dict[str, int]:
        usage = {
            "prompt_tokens": sum(len(prompt.ids) for prompt in self._prompts),
            "completion_tokens": sum(spoken.tokens for spoken in answers.spoken.values()),
        }
        return {**usage, "total_tokens": sum(usage.values())}


class _Streamed(StreamingResponse):
    """A streamed answer, which ends with its client."""

    def __init__(self, answers: QueuedAnswers, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.stop()


async def _unless_left(reading: Coroutine[Any, Any, dict[str, Any]], request: HttpRequest) -> dict[str, Any]:
    """The result of `reading`. Raises ClientDisconnect once the client has left."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, leaving = asyncio.create_task(reading), asyncio.create_task(leave())
    try:
        await asyncio.wait({result, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        result.cancel()
        leaving.cancel()


class _Guarded:
    """An ASGI app behind HTTP Basic credentials, or their password as a bearer token, as OpenAI's clients send it, and
    behind a rate limit of requests that write."""

    def __init__(self, inner: App, known: Sequence[Credentials], rate_limit: RateLimit | None) -> None:
        self._inner, self._rate_limit = inner, rate_limit
        self._accepted = [(one.user, value) for one in known for value in (one.header, f"Bearer {one.password}")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        client: str | None = (scope.get("client") or ("",))[0]
        if self._accepted:
            given = dict(scope["headers"]).get(b"authorization", b"")
            # All are compared, so that the time does not depend on the number of matches.
            matching = [user for user, value in self._accepted if hmac.compare_digest(given, value.encode())]
            if not matching:
                asking = {"WWW-Authenticate": 'Basic realm="stemma"'}
                code = "invalid_api_key" if given else "no_credentials"
                message = "credentials required: an API key, or user and password"
                error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
                await JSONResponse({"error": error}, 401, asking)(scope, receive, send)
                return
            client = matching[0]
        if self._rate_limit is not None and scope["method"] == "POST":
            allowance = self._rate_limit.take(client or "")
            headers = self._rate_limit.headers(allowance)
            if not allowance.is_allowed:
                message = f"more than {self._rate_limit.per_minute} requests per minute: try again later"
                error = {"message": message, "type": "requests", "param": None, "code": "rate_limit_exceeded"}
                await JSONResponse({"error": error}, 429, headers)(scope, receive, send)
                return
            send = _with_headers(send, headers)
        await self._inner(scope, receive, send)


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    added = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending


class _JsonErrors:
    """An ASGI app whose refusals in plain text (an unknown path or method, another host's name, a body that is no
    JSON) have the form of OpenAI's errors."""

    def __init__(self, inner: App) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: MutableMapping[str, Any] | None = None
        body = b""

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                kind = dict(message.get("headers", ())).get(b"content-type", b"")
                start = message if kind.startswith(b"text/plain") else None
            if start is None:
                await send(message)
            elif message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await self._refuse(start, body, scope, receive, send)

        await self._inner(scope, receive, sending)

    async def _refuse(self, start: Mapping[str, Any], body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        status = HTTPStatus(start["status"])
        message, code = body.decode("utf8", "replace").strip(), status.name.lower()
        if status == HTTPStatus.NOT_FOUND:
            message, code = f"{scope['method']} {scope['path']}: this server has no such path", "unknown_url"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{scope['method']} {scope['path']}: the path does not support this method"
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        kept = {
            name.decode(): value.decode()
            for name, value in start.get("headers", ())
            if name.lower() not in (b"content-type", b"content-length")
        }
        await JSONResponse({"error": error}, status, kept)(scope, receive, send)


def _reason(spoken: Spoken, *, has_calls: bool) -> str:
    if not spoken.ended:
        return "length"
    return "tool_calls" if has_calls else "stop"


def _error(error: Exception) -> dict[str, Any]:
    if isinstance(error, StemmaError):
        first = error.problems[0]
        kind, code = "invalid_request_error", first.code
        return {"message": str(first), "type": kind, "param": first.path or None, "code": code}
    if isinstance(error, Unavailable):
        return {"message": str(error), "type": "server_error", "param": None, "code": error.code}
    message = f"the answer could not be written: {type(error).__name__}; the server's log has more"
    return {"message": message, "type": "server_error", "param": None, "code": "crashed"}


def _unavailable(error: Unavailable) -> Response:
    return JSONResponse({"error": _error(error)}, 503, {"Retry-After": str(RETRY_AFTER_S)})
