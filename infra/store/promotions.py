"""Which model of each registered name is promoted: one file of the store, `promotions.json`, replaced as a whole.

    {"demo": [{"registration": "register/0af1…", "model": "rlhf/77ab…", "digest": "…", "time": 1763700000.0}]}

The last of a name's list is promoted; those before it are what a rollback goes back to.
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

FILE = "promotions.json"
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

    def history(self, name: str) -> list[Promotion]:
        """The promotions of a name that were not rolled back, the one in force last."""
        return [Promotion(**one) for one in self._read().get(name, [])]

    def promoted(self, name: str) -> Promotion | None:
        history = self.history(name)
        return history[-1] if history else None

    def all(self) -> dict[str, Promotion]:
        """The one in force of every name."""
        return {name: Promotion(**found[-1]) for name, found in self._read().items() if found}

    def promote(self, name: str, promotion: Promotion, instead_of: Promotion | None) -> None:
        """Puts one in force. Raises StageError `promoted_meanwhile` if another than `instead_of` is by now."""
        with self._changed() as found:
            history = found.setdefault(name, [])
            now = Promotion(**history[-1]) if history else None
            if now != instead_of:
                raise stage_error(
                    "promoted_meanwhile", name, "another model was promoted meanwhile", "look at it, and promote again"
                )
            found[name] = [*history, asdict(promotion)][-KEPT:]

    def rollback(self, name: str) -> tuple[Promotion, Promotion]:
        """Takes the last promotion back: (what is in force now, what was). Raises StageError `nothing_to_roll_back`."""
        with self._changed() as found:
            history = found.get(name, [])
            if len(history) < 2:
                raise _nothing(name, list(found))
            found[name] = history[:-1]
            return Promotion(**history[-2]), Promotion(**history[-1])

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        state = self._path.parent / ".state"
        state.mkdir(parents=True, exist_ok=True)
        with open(state / "promotions.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._read()
            yield found
            hidden = self._path.with_name(f".{FILE}")
            with open(hidden, "w", encoding="utf8") as file:
                file.write(json.dumps(found, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            found: Mapping[str, Any] = json.loads(self._path.read_text(encoding="utf8"))
        except FileNotFoundError:
            return {}
        return dict(found)


def _nothing(name: str, known: list[str]) -> StageError:
    there = f"promoted are {', '.join(known)}" if known else "nothing was promoted yet"
    return stage_error("nothing_to_roll_back", name, "no earlier promotion of this name", there)
