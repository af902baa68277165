"""Artifacts that a person wants kept, whatever else needs them: <root>/pins.json."""

from __future__ import annotations

import json
from pathlib import Path

from infra.tables import damaged, read_state

_LOST = "correct it, or delete it: then nothing is pinned"


class Pins:
    """The pinned artifacts of a store, by their place in it: `clean/2f20dd552d78493b`."""

    def __init__(self, root: Path) -> None:
        self._path = root / "pins.json"

    def read(self) -> list[str]:
        """Raises StageError `damaged_state` for a damaged file: nothing may be taken for unpinned then."""
        pins = read_state(self._path, _LOST, [])
        if not isinstance(pins, list) or not all(isinstance(pin, str) for pin in pins):
            raise damaged(self._path, "a list of artifacts was expected", _LOST)
        return pins

    def add(self, artifact: str) -> None:
        self._write(sorted({*self.read(), artifact}))

    def remove(self, artifact: str) -> bool:
        """False if it was not pinned."""
        pins = self.read()
        if artifact not in pins:
            return False
        self._write([pin for pin in pins if pin != artifact])
        return True

    def _write(self, pins: list[str]) -> None:
        hidden = self._path.with_name(".pins.json")
        hidden.write_text(json.dumps(pins, indent=1) + "\n", encoding="utf8")
        hidden.replace(self._path)
