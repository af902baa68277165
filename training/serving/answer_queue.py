"""Answers of a server's models: a thread generates them, the event loop reads them, and those above a limit are
refused.

The thread goes from model to model, one step of each batch (`evaluation/generation/decoding.py`) at a time. It is
separate from the web server's threads, so that light requests are answered at once. An answer whose client has left, or
whose server ends, stops before its next token.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from evaluation.generation.decoding import Decoder, tokens_in_memory
from infra.errors import StemmaError
from training.generation.answer_text import AnswerRequest, Spoken, TextPiece, Writing
from training.generation.session import loaded

AT_ONCE = 16
"""Answers of a model that are generated together."""
WAITING = 64
LAST_TOKEN_S = 2.0
"""Seconds that the thread has to finish its current tokens when the process ends."""
INTERRUPTED = 130


class Unavailable(Exception):
    """Raised where an answer cannot begin, or does not finish. code: for the response."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AnswerQueue:
    """Used in one event loop.

    Args:
        at_once: Answers of a model that are generated together.
        waiting: Further answers that wait for their turn.
        cache_bytes: Of a model's keys and values; None as for `Decoder`, and at least for one answer of any length.
    """

    def __init__(self, at_once: int = AT_ONCE, waiting: int = WAITING, cache_bytes: int | None = None) -> None:
        self._at_once, self._most, self._cache_bytes = at_once, at_once + waiting, cache_bytes
        self._unfinished: set[QueuedAnswer] = set()
        self._kept_places = 0
        self._is_ending = False
        # What the thread shares with the event loop, under the condition's lock.
        self._changed = threading.Condition()
        self._begun: list[QueuedAnswer] = []
        self._stopped: list[QueuedAnswer] = []
        self._thread: threading.Thread | None = None
        atexit.register(self._end_process)

    def positions_of(self, model_dir: Path) -> int:
        """Return the most tokens of a prompt with its answer: the model's positions, or what the cache holds."""
        lm = loaded(model_dir)
        if self._cache_bytes is None:
            return lm.positions
        return min(lm.positions, tokens_in_memory(lm.model, self._cache_bytes))

    def begin(self, model_dir: Path, requests: Sequence[AnswerRequest]) -> QueuedAnswers:
        """Start the answers to one request. Raises Unavailable where too many are in progress."""
        self._check()
        answers = QueuedAnswers(model_dir, requests, self)
        self._unfinished.update(answers.all)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="stemma-answers", daemon=True)
            self._thread.start()
        with self._changed:
            self._begun += answers.all
            self._changed.notify()
        return answers

    @contextmanager
    def place(self) -> Iterator[None]:
        """Reserve a place for a request while it is read. Raises Unavailable where there is none."""
        self._check()
        self._kept_places += 1
        try:
            yield
        finally:
            self._kept_places -= 1

    def _check(self) -> None:
        if self._is_ending:
            raise _ending()
        count = len(self._unfinished) + self._kept_places
        if count >= self._most:
            raise Unavailable(f"{count} answers are in progress or waiting: try again later", "overloaded")

    def end(self) -> None:
        """Refuse new answers, and end those in progress."""
        for answer in list(self._unfinished):
            answer.stop(_ending())
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def forget(self, answer: QueuedAnswer) -> None:
        """Remove an answer that is complete or cancelled."""
        if answer in self._unfinished:
            self._unfinished.remove(answer)
            with self._changed:
                self._stopped.append(answer)
                self._changed.notify()

    def _write(self) -> None:
        """Body of the thread: one step of each model's batch after the other, until the queue ends."""
        batches: dict[Path, _Batch] = {}
        while True:
            with self._changed:
                is_idle = not any(batch.writings for batch in batches.values())
                while is_idle and not (self._begun or self._stopped or self._is_ending):
                    self._changed.wait()
                begun, stopped = self._begun, self._stopped
                self._begun, self._stopped = [], []
                if self._is_ending:
                    return
            try:
                self._advance(batches, begun, stopped)
            except BaseException as error:  # this thread is the only one: what waits for it would wait without end
                logging.getLogger("uvicorn.error").exception("answers could not be written")
                for answer in {*begun, *(answer for batch in batches.values() for answer in batch.writings)}:
                    answer.hand_over([error])
                batches.clear()

    def _advance(
        self, batches: dict[Path, _Batch], begun: Sequence[QueuedAnswer], stopped: Sequence[QueuedAnswer]
    ) -> None:
        """Add and remove answers, and generate a token of each."""
        for answer in begun:
            if answer.model_dir not in batches:
                batches[answer.model_dir] = _Batch(answer.model_dir, self._at_once, self._cache_bytes)
            batches[answer.model_dir].begin(answer)
        for answer in stopped:
            if answer.model_dir in batches:
                batches[answer.model_dir].stop(answer)
        for batch in batches.values():
            if batch.writings:
                batch.step()

    def _end_process(self) -> None:
        """End the process although the thread still computes: torch aborts if Python ends while it computes.

        Answers end before their next tokens. That takes long after a long prompt, and where a model generates the whole
        answer at once.
        """
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        deadline = time.monotonic() + LAST_TOKEN_S
        with suppress(KeyboardInterrupt):  # a second signal: at once
            while time.monotonic() < deadline and self._is_computing():
                time.sleep(0.01)
        if self._is_computing():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)

    def _is_computing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


class _Batch:
    """The answers of one model that the thread generates. writings: those in progress."""

    def __init__(self, model_dir: Path, at_once: int, cache_bytes: int | None) -> None:
        lm = loaded(model_dir)
        self._tokenizer, self._decoder = lm.tokenizer, Decoder(lm.model, at_once, cache_bytes=cache_bytes)
        self.writings: dict[QueuedAnswer, Writing] = {}

    def begin(self, answer: QueuedAnswer) -> None:
        self.writings[answer] = writing = Writing(answer.request, self._tokenizer)
        self._decoder.add(writing)

    def stop(self, answer: QueuedAnswer) -> None:
        if (writing := self.writings.pop(answer, None)) is not None:
            self._decoder.remove(writing)

    def step(self) -> None:
        """Generate a token of each answer, and hand over the final part of their texts."""
        try:
            self._decoder.step()
        except BaseException as error:
            if not isinstance(error, StemmaError):
                logging.getLogger("uvicorn.error").exception("answers could not be written")
            for answer in list(self.writings):
                answer.hand_over([error])
                self.stop(answer)
            return
        for answer, writing in list(self.writings.items()):
            pieces: list[TextPiece | Spoken | BaseException] = [*writing.pieces]
            writing.pieces.clear()
            if (end := writing.spoken or writing.error) is not None:
                pieces.append(end)
                del self.writings[answer]
            if pieces:
                answer.hand_over(pieces)


class QueuedAnswers:
    """The answers to one request, read in the event loop. spoken: the end of each finished answer, by number."""

    def __init__(self, model_dir: Path, requests: Sequence[AnswerRequest], queue: AnswerQueue) -> None:
        self.arrived: asyncio.Queue[tuple[int, TextPiece | Spoken] | BaseException] = asyncio.Queue()
        self.all = [QueuedAnswer(model_dir, request, number, self, queue) for number, request in enumerate(requests)]
        self.spoken: dict[int, Spoken] = {}

    async def pieces(self) -> AsyncIterator[tuple[int, TextPiece | Spoken]]:
        """Yield the pieces of each answer by its number, and its end. Raises Unavailable, or the model's error."""
        while len(self.spoken) < len(self.all):
            found = await self.arrived.get()
            if isinstance(found, BaseException):
                raise found
            number, piece = found
            if isinstance(piece, Spoken):
                self.spoken[number] = piece
            yield found

    def stop(self) -> None:
        """End them before their next tokens."""
        for answer in self.all:
            answer.stop()


class QueuedAnswer:
    """One answer, handed over by the thread to the event loop that asked for it."""

    def __init__(
        self, model_dir: Path, request: AnswerRequest, number: int, answers: QueuedAnswers, queue: AnswerQueue
    ) -> None:
        self.model_dir, self.request = model_dir, request
        self._number, self._arrived, self._queue = number, answers.arrived, queue
        self._loop = asyncio.get_running_loop()

    def stop(self, reason: BaseException | None = None) -> None:
        """End it before its next token. reason: raised by `pieces`, which is otherwise no longer read."""
        if reason is not None:
            self._arrived.put_nowait(reason)
        self._queue.forget(self)

    def hand_over(self, pieces: Sequence[TextPiece | Spoken | BaseException]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._receive, pieces)

    def _receive(self, pieces: Sequence[TextPiece | Spoken | BaseException]) -> None:
        for piece in pieces:
            self._arrived.put_nowait(piece if isinstance(piece, BaseException) else (self._number, piece))
            if not isinstance(piece, TextPiece):
                self._queue.forget(self)


def _ending() -> Unavailable:
    return Unavailable("the server ends", "server_ending")
