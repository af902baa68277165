"""Promoted model of each registered name: one file of the store, `promotions.json`, replaced as a whole.

    {"demo": [{"registration": "register/0af1…", "model": "rlhf/77ab…", "digest": "…", "time": 1763700000.0}]}

The last entry of a name's list is promoted; a rollback returns to the entries before it. For a root on an object store,
the file is an object there, which is replaced only if it is still the one that was read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import StageError, stage_error
from infra.io.json import parse_own_json
from infra.io.s3 import read_object
from infra.io.s3_write import put_if
from infra.io.tables import damaged, read_state
from infra.store.roots import url_of

FILE = "promotions.json"
_LOST = "correct it, or delete it: then nothing is promoted"
KEPT = 50
"""Promotions of a name that a rollback can go back through."""


@dataclass(frozen=True)
class Promotion:
    """One promotion. registration, model: artifacts as `stage/fingerprint`; digest: of the model; time: seconds."""

    registration: str
    model: str
    digest: str
    time: float


class Promotions:
    """The promoted models of the store at `root`. Readers see the state before a change or after it, never between."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        url = url_of(root)
        self._url = f"{url}/{FILE}" if url else ""

    def history(self, name: str) -> list[Promotion]:
        """Return the promotions of a name that were not rolled back, the current one last."""
        return [Promotion(**entry) for entry in self._read().get(name, [])]

    def promoted(self, name: str) -> Promotion | None:
        history = self.history(name)
        return history[-1] if history else None

    def all(self) -> dict[str, Promotion]:
        """Return the current promotion of every name."""
        return {name: Promotion(**history[-1]) for name, history in self._read().items() if history}

    def promote(self, name: str, promotion: Promotion, instead_of: Promotion | None) -> None:
        """Make a promotion the current one. Raises StageError `promoted_meanwhile` if it would replace another than
        `instead_of`."""
        with self._locked_changes() as by_name:
            history = by_name.setdefault(name, [])
            now = Promotion(**history[-1]) if history else None
            if now != instead_of:
                raise _promoted_meanwhile(name)
            by_name[name] = [*history, asdict(promotion)][-KEPT:]

    def rollback(self, name: str) -> tuple[Promotion, Promotion]:
        """Roll back the last promotion; return the current and the former one. Raises StageError
        `nothing_to_roll_back`."""
        with self._locked_changes() as by_name:
            history = by_name.get(name, [])
            if len(history) < 2:
                raise _nothing_to_roll_back(name, list(by_name))
            by_name[name] = history[:-1]
            return Promotion(**history[-2]), Promotion(**history[-1])

    @contextmanager
    def _locked_changes(self) -> Iterator[dict[str, Any]]:
        if self._url:
            before = read_object(self._url)
            by_name = self._parsed(before[0]) if before else {}
            yield by_name
            if not put_if(_as_text(by_name).encode(), self._url, before[1] if before else None):
                raise _promoted_meanwhile(self._url)
            return
        state = self._path.parent / ".state"
        state.mkdir(parents=True, exist_ok=True)
        with open(state / "promotions.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            by_name = self._read()
            yield by_name
            hidden = self._path.with_name(f".{FILE}")
            with open(hidden, "w", encoding="utf8") as file:
                file.write(_as_text(by_name))
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self._path)

    def _read(self) -> dict[str, Any]:
        if self._url:
            stored = read_object(self._url)
            return self._parsed(stored[0]) if stored else {}
        return self._by_name(read_state(self._path, _LOST, {}))

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            return self._by_name(parse_own_json(data))
        except (ValueError, RecursionError) as error:
            raise damaged(self._url, str(error), _LOST) from error

    def _by_name(self, content: Any) -> dict[str, Any]:
        try:
            for history in content.values():
                if not isinstance(history, list):
                    raise TypeError
                [Promotion(**entry) for entry in history]
        except (AttributeError, TypeError) as error:
            message = "expected an object of lists of promotions by name"
            raise damaged(self._url or self._path, message, _LOST) from error
        return dict(content)


def _as_text(by_name: Mapping[str, Any]) -> str:
    return json.dumps(by_name, indent=1) + "\n"


def _promoted_meanwhile(location: str) -> StageError:
    message = "another model was promoted in the meantime"
    return stage_error("promoted_meanwhile", location, message, "check that model, then promote again")


def _nothing_to_roll_back(name: str, names: list[str]) -> StageError:
    fix = f"promoted names: {', '.join(names)}" if names else "no model has been promoted yet"
    return stage_error("nothing_to_roll_back", name, "no earlier promotion of this name", fix)
