"""Reading a config file, and setting single keys of it from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from infra.errors import ConfigError, Problem


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, which YAML would settle silently."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = True) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"the key {key!r} stands twice, first in line {seen[key]}", problem_mark=key_node.start_mark
            )
        seen[key] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError naming the file and line."""
    try:
        data = yaml.load(path.read_text(encoding="utf8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(
            Problem("missing_config", str(path), "no such file", "name a config, e.g. configs/quickstart.yaml")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("unreadable_config", str(path), f"cannot be read as UTF-8 text: {error}")) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(Problem("bad_yaml", f"{path}:{line}", f"not valid YAML: {error.problem}")) from None
    except yaml.YAMLError as error:
        raise ConfigError(Problem("bad_yaml", str(path), f"not valid YAML: {str(error).splitlines()[0]}")) from None
    if not isinstance(data, dict):
        raise ConfigError(Problem("bad_yaml", str(path), "a mapping of sections was expected"))
    return data


def set_value(data: dict[str, Any], key: str, text: str) -> list[Problem]:
    """Sets a dotted key (`sft.optimizer.learning_rate`, `ingest.read.0.limit_mb`) to a value in YAML."""
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        return [Problem("bad_setting", f"--set {key}", f"{text!r} is not valid YAML: {str(error).splitlines()[0]}")]
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
