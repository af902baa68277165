"""Parts of a long measurement, stored when finished, so that an interrupted measurement continues from them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from infra.config import StageConfig
from infra.io.json import parse_own_json, read_own_json
from infra.io.sources import Source
from infra.run import Run


class Keep(Protocol):
    """Callable that does a part of the work, or returns its stored result if it was done before."""

    def __call__(self, name: str, make: Callable[[], Any]) -> Any: ...


def at_once(name: str, make: Callable[[], Any]) -> Any:
    """Do the part without storing it."""
    return make()


class KeptParts:
    """Values by name, one JSON file each, for a single question: values for another question are removed.

    folder: their folder. request: a text with everything that the values depend on. `found` has the names of values
    that existed before.
    """

    def __init__(self, folder: Path, request: str) -> None:
        self.folder = folder
        digest_path = folder / "asked"
        digest = hashlib.sha256(request.encode()).hexdigest()
        if not digest_path.is_file() or digest_path.read_text(encoding="utf-8") != digest:
            self.clear()
            _write(digest_path, digest)
        self.found = self.names()

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make` as read back from JSON: the same for a new and a stored result.

        A value that was cut short by a crash has another name until it is whole.
        """
        path = self.folder / f"{name}.json"
        if path.is_file():
            return read_own_json(path)
        text = json.dumps(make())
        _write(path, text)
        return parse_own_json(text)

    def names(self) -> tuple[str, ...]:
        """Return the names of the values stored so far."""
        return tuple(sorted(path.stem for path in self.folder.glob("*.json")))

    def clear(self) -> None:
        """Remove the values after the measurement is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)


def parts_of(config: StageConfig, sources: Iterable[Source], inputs: Mapping[str, Path], run: Run) -> KeptParts:
    """Return the parts that an interrupted build of the same stage has left.

    Args:
        sources: the files of its config.
    """
    files = {str(path): path for source in sources for path in source.paths}
    identity = [config.model_dump(mode="json"), state_of(inputs), state_of(files)]
    kept = KeptParts(run.work_dir / "parts", json.dumps(identity))
    if kept.found:
        run.event("resumed", f"continuing with what is done: {', '.join(kept.found)}")
    return kept


def state_of(roots: Mapping[str, Path]) -> list[tuple[str, str, int, int]]:
    """Return name, path, size and modification time (ns) of files, also of those in folders, to detect changes."""
    files = [
        (name, path)
        for name, root in sorted(roots.items())
        for path in (sorted(root.rglob("*")) if root.is_dir() else [root])
        if path.is_file()
    ]
    return [(name, str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for name, path in files]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
