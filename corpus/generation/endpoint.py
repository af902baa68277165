"""Asks an endpoint of OpenAI's protocol: many requests at once, each sent again where that helps, each answer kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from corpus.generation.answers import AnswerStore, EndpointAnswer
from corpus.generation.config import EndpointConfig, SamplingConfig
from corpus.generation.responses import answer_of, is_out_of_quota, message_of
from infra.errors import StageError, shortened, stage_error

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LONGEST_RETRY_AFTER_S = 3600.0
"""An endpoint that asks for a longer pause has nothing more to give today: the stage stops."""
CONNECT_S = 30.0
MOST_BYTES = 64_000_000
"""Of an answer: more is no answer."""
_RETRIED = frozenset({408, 409, 425, 429})
_REFUSED = {
    401: "set the API key: endpoint.api_key_variable names its environment variable",
    402: "look at the account of the endpoint",
    403: "check the permissions of the API key",
    404: "correct endpoint.url or endpoint.model",
    405: "correct endpoint.url",
}


@dataclass(frozen=True)
class Request:
    """One question to the model. sample: number of the answer to the same messages. seed: None sends none."""

    messages: Sequence[Mapping[str, str]]
    sample: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class EndpointFailure:
    """A request without an answer."""

    reason: str


@dataclass(frozen=True)
class _Fault:
    """Why one attempt gave no answer. status: of HTTP; 0 where there was none. after_s: the endpoint's Retry-After.
    is_final: no request would be answered."""

    reason: str
    status: int = 0
    is_repeated: bool = False
    after_s: float = 0.0
    is_unreachable: bool = False
    is_final: bool = False


class Endpoint:
    """An endpoint with its limits and its kept answers, for one event loop.

    Args:
        where: dotted key of its config, for errors.
        sleep, now: for tests: how pauses are waited for, and the clock that they are counted by.
    """

    def __init__(
        self,
        config: EndpointConfig,
        sampling: SamplingConfig,
        answers: AnswerStore,
        where: str,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """requests, cached, repeated, prompt_tokens, completion_tokens; the tokens of cached answers are included."""
        self._config, self._sampling, self._answers, self._where = config, sampling, answers, where
        self._sleep, self._now = sleep, now
        headers = {"Authorization": f"Bearer {key}"} if (key := self._key()) else {}
        self._base = config.url
        self._client = httpx.AsyncClient(
            headers={**headers, "Content-Type": "application/json"},
            timeout=httpx.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s)),
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )
        self._slots = asyncio.Semaphore(config.concurrency)
        self._free_at = self._paused_until = float("-inf")
        self._under_way: dict[str, asyncio.Future[EndpointAnswer | EndpointFailure]] = {}
        self._unsaved: list[tuple[str, EndpointAnswer]] = []
        self._saving = asyncio.Lock()

    async def ask(self, request: Request) -> EndpointAnswer | EndpointFailure:
        """The answer to a request: the kept one, that of an equal request under way, or a new one.

        Raises StageError: `endpoint_refused` for a wrong key, model or address; `endpoint_unreachable` and
        `rate_limited` where all attempts were in vain, since a document would fare no better.
        """
        body = self._body(request)
        key = self._key_of(body, request)
        if kept := self._answers.get(key):
            self.counts["cached"] += 1
            self._count_tokens(kept)
            return kept
        if (other := self._under_way.get(key)) is None:
            other = self._under_way[key] = asyncio.ensure_future(self._answer_to(key, body))
            other.add_done_callback(lambda _: self._under_way.pop(key, None))
            return await other
        answer = await other
        if isinstance(answer, EndpointAnswer):
            self.counts["cached"] += 1
            self._count_tokens(answer)
        return answer

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer_to(self, key: str, body: Mapping[str, Any]) -> EndpointAnswer | EndpointFailure:
        named = {"model": self._config.model, "stream": False, **body, self._config.token_limit_key: body["max_tokens"]}
        if self._config.token_limit_key != "max_tokens":
            del named["max_tokens"]
        content = json.dumps(named, ensure_ascii=False).encode()
        attempts = self._config.attempts
        fault = _Fault("")
        for attempt in range(1, attempts + 1):
            async with self._slots:
                await self._turn()
                self.counts["repeated" if attempt > 1 else "requests"] += 1
                answer = await self._post(content)
                if isinstance(answer, EndpointAnswer):  # a crash loses no more answers than there are slots
                    await self._keep(key, answer)
                    self._count_tokens(answer)
                    return answer
            fault = answer
            if fault.status in _REFUSED or 300 <= fault.status < 400:
                raise self._error("endpoint_refused", fault.reason, _REFUSED.get(fault.status, "correct endpoint.url"))
            if fault.is_final:
                raise self._error(
                    "rate_limited", fault.reason, "look at the account of the endpoint; then run it again"
                )
            if fault.after_s > LONGEST_RETRY_AFTER_S:
                message = f"{fault.reason}; it asks for a pause of {fault.after_s / 3600:.1f} hours"
                raise self._error("rate_limited", message, "run it again then: it continues from the cached answers")
            if not fault.is_repeated:
                return EndpointFailure(fault.reason)
            if attempt < attempts:
                if fault.after_s:  # it means all requests, not this one alone
                    self._paused_until = max(self._paused_until, self._now() + fault.after_s)
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
                await self._sleep(fault.after_s or pause * random.uniform(0.5, 1.0))
        message = f"{fault.reason}, {attempts} times"
        if fault.is_unreachable:
            fix = "start it, or correct endpoint.url; then run it again: it continues from the cached answers"
            raise self._error("endpoint_unreachable", message, fix)
        if fault.status == 429:
            fix = (
                "lower endpoint.requests_per_minute or concurrency; run it again: it continues from the cached answers"
            )
            raise self._error("rate_limited", message, fix)
        return EndpointFailure(message)

    async def _turn(self) -> None:
        """Wait until another request may be sent."""
        spacing = 60 / self._config.requests_per_minute if self._config.requests_per_minute else 0.0
        begin = max(self._now(), self._free_at)
        self._free_at = begin + spacing
        while (left := max(begin, self._paused_until) - self._now()) > 0:
            await self._sleep(left)

    async def _post(self, content: bytes) -> EndpointAnswer | _Fault:
        answer = await self._post_to(self._base, content)
        is_missing = isinstance(answer, _Fault) and answer.status in (200, 404, 405)
        if is_missing and self._base == self._config.url and urlsplit(self._base).path == "":
            # Most servers have the protocol under /v1 alone, and their addresses are often written without it.
            answer = await self._post_to(f"{self._base}/v1", content)
            if isinstance(answer, EndpointAnswer):
                self._base = f"{self._config.url}/v1"
        return answer

    async def _post_to(self, base: str, content: bytes) -> EndpointAnswer | _Fault:
        url = f"{base}/chat/completions"
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._client.stream("POST", url, content=content) as got,
            ):
                body = b""
                async for chunk in got.aiter_bytes():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        return _Fault(f"an answer of over {MOST_BYTES / 1e6:.0f} MB", got.status_code)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            return _Fault(f"no complete answer within {self._config.timeout_s:g} s", is_repeated=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            return _Fault(_message(error), is_repeated=True, is_unreachable=True)
        except httpx.TransportError as error:
            return _Fault(_message(error), is_repeated=True)
        except (httpx.DecodingError, httpx.InvalidURL) as error:
            return _Fault(_message(error))
        if got.status_code != 200:
            reason = f"HTTP {got.status_code}: {message_of(body)}"
            if 300 <= got.status_code < 400 and (location := got.headers.get("location")):
                reason = f"HTTP {got.status_code}: it is at {shortened(location)}"
            is_repeated = got.status_code in _RETRIED or got.status_code >= 500
            after_s = _retry_after(got.headers.get("retry-after")) if is_repeated else 0.0
            is_final = got.status_code == 429 and is_out_of_quota(body)
            return _Fault(reason, got.status_code, is_repeated, after_s, is_final=is_final)
        try:
            return answer_of(body)
        except ValueError as error:  # a proxy's page, or an error inside an answer of 200
            return _Fault(f"not an answer in OpenAI's format ({error}): {message_of(body)}", 200, is_repeated=True)

    async def _keep(self, key: str, answer: EndpointAnswer) -> None:
        """Return once the answer is on the disk, with all that came while others were being written."""
        self._unsaved.append((key, answer))
        async with self._saving:
            if self._unsaved:
                rows, self._unsaved = self._unsaved, []
                await asyncio.to_thread(self._answers.put, rows)

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = self._sampling
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        seed = {} if request.seed is None else {"seed": request.seed}
        return {"messages": list(request.messages), **drawn, **seed, **sampling.extra}

    def _key_of(self, body: Mapping[str, Any], request: Request) -> str:
        identity = [self._config.model, self._config.model_version, request.sample, body]
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _key(self) -> str:
        name = self._config.api_key_variable
        if name is None:
            return ""
        key = os.environ.get(name, "").strip()
        if not key:
            fix = f"export {name} where the stage runs: before `stemma up` if its worker runs the pipeline"
            message = f"expected the API key in the environment variable {name}, which is not set"
            raise stage_error("no_api_key", f"{self._where}.api_key_variable", message, fix)
        if not (key.isascii() and key.isprintable()):
            message = f"expected an API key of printable ASCII characters in {name}"
            raise stage_error("no_api_key", f"{self._where}.api_key_variable", message, "export it again")
        return key

    def _count_tokens(self, answer: EndpointAnswer) -> None:
        self.counts["prompt_tokens"] += answer.prompt_tokens
        self.counts["completion_tokens"] += answer.completion_tokens

    def _error(self, code: str, message: str, fix: str) -> StageError:
        return stage_error(code, self._where, f"{self._config.url}: {message}", fix)


def _message(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}".removesuffix(": "))


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header: a number of them, or a date; 0 for none."""
    if not value:
        return 0.0
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0 < seconds < float("inf") else 0.0
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0
