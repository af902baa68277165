"""Answers of a server's models: some are written at the same time, others wait, and more than that are refused.

A model computes in threads of its own, never in those of the web server, so that light requests are answered at once.
An answer whose client has left, or whose server ends, stops before its next token.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import suppress

from infra.errors import StemmaError
from training.chat_session import Piece, Spoken

AT_ONCE = 4
WAITING = 64
LAST_TOKEN_S = 2.0
"""Time that threads have for the token that they compute when the process ends."""
INTERRUPTED = 130

Talk = Generator[Piece, None, Spoken]


class Unavailable(Exception):
    """Raised where an answer is not begun, or does not come to its end. code: for the response."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AnswerQueue:
    """Used in one event loop.

    Args:
        at_once: Answers that are written at the same time.
        waiting: Further answers that wait for their turn.
    """

    def __init__(self, at_once: int = AT_ONCE, waiting: int = WAITING) -> None:
        self._at_once, self._most_waiting = at_once, waiting
        self._waiting: deque[Answer] = deque()
        self._written: set[Answer] = set()
        self._is_ending = False
        atexit.register(self._end_process)

    def begin(self, talks: Sequence[Talk]) -> Answers:
        """Give answers to one request their turns, or have them wait. Raises Unavailable where too many wait."""
        if self._is_ending:
            raise _ending()
        if len(self._written) >= self._at_once and len(self._waiting) >= self._most_waiting:
            message = f"{len(self._written)} answers are being written and {len(self._waiting)} wait: try again later"
            raise Unavailable(message, "overloaded")
        answers = Answers(talks, self)
        self._waiting += answers.all
        self._start_next()
        return answers

    def end(self) -> None:
        """Begin no more answers, and end those that are being written or wait."""
        self._is_ending = True
        for answer in [*self._waiting, *self._written]:
            answer.stop(_ending())
        self._waiting.clear()

    def forget(self, answer: Answer) -> None:
        """Take an answer out that has been written or is not wanted any more."""
        self._written.discard(answer)
        if answer in self._waiting:
            self._waiting.remove(answer)
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and len(self._written) < self._at_once:
            answer = self._waiting.popleft()
            self._written.add(answer)
            answer.start()

    def _end_process(self) -> None:
        """End the process although a thread still computes: torch aborts where Python ends beneath it.

        An answer ends before its next token. That takes long after a long prompt, and where a model writes all at once.
        """
        deadline = time.monotonic() + LAST_TOKEN_S
        with suppress(KeyboardInterrupt):  # a second signal: at once
            while time.monotonic() < deadline and self._is_computing():
                time.sleep(0.01)
        if self._is_computing():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)

    def _is_computing(self) -> bool:
        return any(answer.is_alive() for answer in self._written)


class Answers:
    """The answers to one request, read in the event loop. spoken: how those ended that have, by their numbers."""

    def __init__(self, talks: Sequence[Talk], queue: AnswerQueue) -> None:
        self.pieces_queue: asyncio.Queue[tuple[int, Piece | Spoken] | BaseException] = asyncio.Queue()
        self.all = [Answer(talk, number, self, queue) for number, talk in enumerate(talks)]
        self.spoken: dict[int, Spoken] = {}

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | Spoken]]:
        """Yield the pieces of each answer by its number, and how it ended. Raises Unavailable, or what a model
        raised."""
        while len(self.spoken) < len(self.all):
            found = await self.pieces_queue.get()
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


class Answer:
    """One answer, written by a thread."""

    def __init__(self, talk: Talk, number: int, answers: Answers, queue: AnswerQueue) -> None:
        self._talk, self._number, self._queue = talk, number, queue
        self._loop = asyncio.get_running_loop()
        self._pieces = answers.pieces_queue
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._write, name="stemma-answer", daemon=True)
        self._thread.start()

    def stop(self, reason: BaseException | None = None) -> None:
        """End it before its next token. reason: raised by `pieces`, which otherwise nothing reads any more."""
        self._is_stopped.set()
        if reason is not None:
            self._pieces.put_nowait(reason)
        if self._thread is None:
            self._queue.forget(self)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _write(self) -> None:
        try:
            while not self._is_stopped.is_set():
                self._hand_over(next(self._talk))
        except StopIteration as end:
            self._hand_over(end.value)
        except BaseException as error:
            if not isinstance(error, StemmaError):
                logging.getLogger("uvicorn.error").exception("an answer could not be written")
            self._hand_over(error)
        finally:
            self._talk.close()
            self._in_loop(self._queue.forget, self)

    def _hand_over(self, piece: Piece | Spoken | BaseException) -> None:
        found = piece if isinstance(piece, BaseException) else (self._number, piece)
        self._in_loop(self._pieces.put_nowait, found)

    def _in_loop(self, function: object, argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]
        except RuntimeError:
            self._is_stopped.set()  # the loop is closed: the server has ended


def _ending() -> Unavailable:
    return Unavailable("the server ends", "server_ending")
