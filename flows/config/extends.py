"""Configs over configs: `extends: base.yaml` takes the keys of another file, and the file itself changes some of them.

    extends: base.yaml

    extends: {config: ../base.yaml, without: [safety, steps.judge, pretrain.optimizer]}

Mappings are merged key by key, the steps by their names. Everything else is replaced as a whole: numbers, texts,
lists, empty sections (which have their defaults), and a step of the same name that uses another stage. `without` leaves
keys of the base out first. A base may extend another file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.errors import ConfigError, Problem
from infra.io.sources import LocatedText
from infra.io.yaml import BadYaml, read_plain, read_text

EXTENDS = "extends"
_KEYS = ("config", "without")

KeyPath = tuple[str, ...]


@dataclass
class WrittenConfig:
    """Plain data of a config and of the files that it extends, merged.

    files: the config first, then its base, the base of that, and so on. origins: the file that has each key; None for
    those of the command line.
    """

    data: dict[str, Any]
    files: list[Path]
    origins: dict[KeyPath, Path | None] = field(default_factory=dict)

    def note(self, path: KeyPath, file: Path | None) -> None:
        """Record the file of a key, replacing the files recorded for keys below it."""
        self.origins = {key: other for key, other in self.origins.items() if key[: len(path)] != path}
        self.origins[path] = file

    def with_file(self, problem: Problem) -> Problem:
        """Return the problem, with the file of its key if the config has several files."""
        file = self._file_of(problem.path) if len(self.files) > 1 else None
        return replace(problem, message=f"{problem.message}; the key is in {file}") if file else problem

    def _file_of(self, dotted: str) -> Path | None:
        parts = tuple(dotted.split("."))
        for path in (parts, ("steps", *parts)):
            if path in self.origins:
                return self.origins[path]
        # A key that is missing, or an item of a list: what it would be in.
        for length in range(len(parts) - 1, 0, -1):
            for path in (parts[:length], ("steps", *parts[:length])):
                if path in self.origins:
                    return self.origins[path]
        return None


def read_config(path: Path) -> WrittenConfig:
    """The data of a config over that of the files that it extends.

    Raises ConfigError like `read_yaml` for each file, and `bad_extends` for a missing base or a circular one.
    """
    layers = [_Layer.read(path, path.absolute().parent)]
    while (base := layers[-1].base) is not None:
        files = [layer.file for layer in layers]
        if any(base.resolve() == file.resolve() for file in files):
            trail = " → ".join(str(file) for file in [*files, base])
            raise _bad(files[-1], f"the files extend each other: {trail}", "remove `extends` from one of them")
        if not base.is_file():
            message = f"there is no file {base}" if not base.exists() else f"expected a file, but {base} is not a file"
            raise _bad(files[-1], message, f"correct the path: it is relative to {files[-1].parent}")
        layers.append(_Layer.read(base, path.absolute().parent))
    written = WrittenConfig({}, [layer.file for layer in layers])
    for layer, above in zip(reversed(layers), [*reversed(layers[:-1]), None], strict=True):
        _merge(written, written.data, layer.data, layer.file, ())
        if above:
            _leave_out(written, above)
    return written


@dataclass(frozen=True)
class _Layer:
    """One file. base: the file that it extends."""

    file: Path
    data: dict[str, Any]
    base: Path | None
    without: tuple[str, ...]

    @classmethod
    def read(cls, file: Path, folder: Path) -> _Layer:
        """folder: the config's. Paths of a file in another folder are relative to that one."""
        data = read_yaml(file)
        base, without = _request(file, data.pop(EXTENDS, None)) if EXTENDS in data else (None, ())
        home = file.absolute().parent
        return cls(file, data if home == folder else _located(data, home), base, without)


def _request(file: Path, value: Any) -> tuple[Path, tuple[str, ...]]:
    """Return the file that a value of `extends` names, and the keys to leave out of it."""
    expected = "expected the path of a config, or {config: PATH, without: [KEY, …]}"
    request = {"config": value} if isinstance(value, str) else value
    if not isinstance(request, Mapping) or "config" not in request or set(request) - set(_KEYS):
        raise _bad(file, expected)
    name, without = request["config"], request.get("without") or []
    if not isinstance(name, str) or not name:
        raise _bad(file, expected)
    if not isinstance(without, list) or not all(isinstance(key, str) and key for key in without):
        raise _bad(file, f"{expected}: `without` is a list of dotted keys")
    return file.parent / Path(name).expanduser(), tuple(without)


def _bad(file: Path, message: str, fix: str = "") -> ConfigError:
    return ConfigError(Problem("bad_extends", f"{file}: {EXTENDS}", message, fix))


def _located(value: Any, folder: Path) -> Any:
    """Return plain data whose strings carry the folder of their file."""
    if isinstance(value, dict):
        return {key: _located(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_located(item, folder) for item in value]
    return LocatedText.of(value, folder) if isinstance(value, str) else value


def _merge(written: WrittenConfig, below: dict[str, Any], above: Mapping[str, Any], file: Path, path: KeyPath) -> None:
    for key, value in above.items():
        at = (*path, str(key))
        before: Any = below.get(key)
        is_merged = isinstance(before, dict) and isinstance(value, dict)
        if is_merged and path == ("steps",) and value.get("uses", before.get("uses")) != before.get("uses"):
            is_merged = False
        if not is_merged:
            written.note(at, file)
            below[key] = {} if isinstance(value, dict) else value
        if isinstance(value, dict):
            written.origins[at] = file
            _merge(written, below[key], value, file, at)
        else:
            _note(written, value, file, at)


def _note(written: WrittenConfig, value: Any, file: Path, path: KeyPath) -> None:
    """Record the file of a value and, if it is a list, of its items."""
    written.origins[path] = file
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        _note(written, item, file, (*path, str(key)))


def _leave_out(written: WrittenConfig, above: _Layer) -> None:
    """Remove the keys that a file excludes from its base. Raises ConfigError for a key that the base does not have."""
    for dotted in above.without:
        *parents, last = dotted.split(".")
        parent: Any = written.data
        for part in parents:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or last not in parent:
            raise _bad(above.file, f"without {dotted}: the base has no such key", "correct the key, or remove it")
        del parent[last]
        written.note(tuple(dotted.split(".")), above.file)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError naming the file and line."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(
            Problem("missing_config", str(path), "no such file", "name a config, e.g. configs/quickstart.yaml")
        ) from None
    except (OSError, ValueError) as error:
        message = str(error) if isinstance(error, BadYaml) else f"cannot be read as UTF-8 text: {error}"
        raise ConfigError(Problem("unreadable_config", str(path), message)) from None
    try:
        data = read_plain(text)
    except BadYaml as error:
        location = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigError(Problem("bad_yaml", location, f"not valid YAML: {error}")) from None
    if not isinstance(data, dict):
        raise ConfigError(Problem("bad_yaml", str(path), "expected a mapping of sections"))
    return data
