"""Artifacts that a person wants kept, whatever else needs them: <root>/pins.json."""

from __future__ import annotations

import json
from pathlib import Path


class Pins:
    """The pinned artifacts of a store, by their place in it: `clean/2f20dd552d78493b`."""

    def __init__(self, root: Path) -> None:
        self._path = root / "pins.json"

    def read(self) -> list[str]:
        """Raises ValueError for a damaged file: nothing may be taken for unpinned then."""
        if not self._path.exists():
            return []
        pins = json.loads(self._path.read_text(encoding="utf8"))
        if not isinstance(pins, list) or not all(isinstance(pin, str) for pin in pins):
            raise ValueError(f"{self._path}: a list of artifacts was expected")
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
