"""Reading a config file, and setting single keys of it from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.errors import ConfigError, Problem
from infra.yaml import BadYaml, read_plain, read_text


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError naming the file and line."""
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
        place = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigError(Problem("bad_yaml", place, f"not valid YAML: {error}")) from None
    if not isinstance(data, dict):
        raise ConfigError(Problem("bad_yaml", str(path), "a mapping of sections was expected"))
    return data


def set_value(data: dict[str, Any], key: str, text: str) -> list[Problem]:
    """Sets a dotted key (`sft.optimizer.learning_rate`, `ingest.read.0.limit_mb`) to a value in YAML."""
    try:
        value = read_plain(text)
    except BadYaml as error:
        return [Problem("bad_setting", f"--set {key}", f"{text!r} is not valid YAML: {error}")]
    place: Any = data
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, dict):
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        else:
            return [Problem("bad_setting", f"--set {key}", f"there is nothing at {part} to set a key of")]
    if isinstance(place, list) and last.isdigit() and int(last) < len(place):
        place[int(last)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        return [Problem("bad_setting", f"--set {key}", f"{last} is no key of what stands there")]
    return []
