"""Answers of endpoints, kept on the disk by the request that they are to: none is paid for twice."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from infra.errors import StageError, stage_error
from infra.io.json import BadJson, parse_own_json

FILE = "answers.sqlite"
_BUSY_S = 60.0


@dataclass(frozen=True)
class EndpointAnswer:
    """An endpoint's answer.

    finish: the reason for its end, in OpenAI's terms: stop, length, content_filter. model: the name that the endpoint
    gives.
    prompt_tokens, completion_tokens: as the endpoint counts them; 0 where it does not.
    """

    text: str
    finish: str = "stop"
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def fault(self) -> str:
        """Fault of the answer: failed, empty or truncated; "" for a complete one."""
        if self.finish == "content_filter":
            return "failed"
        if self.finish == "length":  # also without text: a model that thinks may reach the limit before it answers
            return "truncated"
        return "" if self.text.strip() else "empty"


class AnswerStore:
    """A file of answers that any number of processes of one machine may use at once. An answer that was put is on the
    disk when `put` returns. Raises StageError `bad_answers_file` for a file that SQLite cannot read or write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Read by the event loop and written by a thread of it: SQLite serialises the two.
            self._file = sqlite3.connect(self.path, timeout=_BUSY_S, check_same_thread=False)
            with self._file:
                self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise self._damaged(error) from error

    def get(self, key: str) -> EndpointAnswer | None:
        try:
            with closing(self._file.execute("SELECT answer FROM answers WHERE key = ?", (key,))) as rows:
                row = rows.fetchone()
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        return _answer_in(row[0]) if row else None

    def put(self, answers: Iterable[tuple[str, EndpointAnswer]]) -> None:
        rows = [(key, json.dumps(asdict(answer), ensure_ascii=False)) for key, answer in answers]
        try:
            with self._file:
                self._file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        self._file.close()

    def _damaged(self, error: sqlite3.Error | OSError) -> StageError:
        fix = "free disk space, or move the file away: its answers are then requested again"
        return stage_error("bad_answers_file", str(self.path), f"the cached answers cannot be used: {error}", fix)


def _answer_in(text: str) -> EndpointAnswer | None:
    """The answer in a row; None for one of another form, which is then asked for again."""
    try:
        values = parse_own_json(text)
        answer = EndpointAnswer(**values)
    except (TypeError, BadJson):
        return None
    kinds = {field.name: (int if field.name.endswith("_tokens") else str) for field in fields(EndpointAnswer)}
    return answer if all(type(getattr(answer, name)) is kind for name, kind in kinds.items()) else None
