"""Reading of a pipeline's YAML file; all of its problems are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.config.carried import take_over
from flows.config.checks.contradictions import contradictions
from flows.config.extends import read_config, read_yaml
from flows.config.graph import graph
from flows.config.pipeline_config import PipelineConfig, dump, section_classes
from flows.config.problems import problems_of
from flows.config.usual import likely_stages, usual_nodes
from flows.config.wiring import Joint, joint_of, wiring_problems
from infra.errors import ConfigError, Problem
from infra.io.sources import FOLDER
from infra.io.yaml import BadYaml, read_plain
from infra.project import default_root
from tasks.stages import INSTALLED

__all__ = ["PipelineConfig", "dump", "load", "parse", "read_yaml", "section_classes"]


def load(
    path: Path, settings: Mapping[str, str] | None = None, root: Callable[[], Path] = default_root
) -> PipelineConfig:
    """The pipeline in a YAML file, with `--set` values (YAML text by dotted key) and the results of sweeps (`from sweep
    X`) in place.

    root: returns the store of these sweeps. It is called only if a sweep is named, so that problems of the file are
        reported before problems of the store.

    Raises ConfigError with everything that is wrong in all sections and steps.
    """
    written = read_config(path)
    data = written.data
    steps = data.get("steps")
    problems: list[Problem] = []
    for key, text in (settings or {}).items():
        # A step is named without its section, as everywhere on the command line.
        is_step = isinstance(steps, dict) and "." in key and key.partition(".")[0] in steps
        dotted = f"steps.{key}" if is_step else key
        problems += set_value(data, dotted, text)
        written.note(tuple(dotted.split(".")), None)
    folder = path.absolute().parent
    try:
        config = parse(take_over(data, folder, root, parse), folder)
    except ConfigError as error:
        raise ConfigError(*problems, *map(written.with_file, error.problems)) from None
    if problems:
        raise ConfigError(*problems)
    return config


def parse(data: Any, folder: Path | None = None) -> PipelineConfig:
    """The pipeline in plain data; relative paths in it are relative to `folder`. A section that is named and empty, as
    in `dedupe:`, has its defaults. Raises ConfigError."""
    if isinstance(data, Mapping):
        empty: dict[str, Any] = {name: {} for name in section_classes() if name in data and data[name] is None}
        data = {**data, **empty}
    try:
        config = PipelineConfig.model_validate(data, context={FOLDER: folder} if folder else None)
    except ValidationError as error:
        raise ConfigError(*INSTALLED.problems, *problems_of(error, PipelineConfig), *_wiring_of(data)) from None
    problems = list(INSTALLED.problems)
    try:
        nodes = graph(config)
    except ConfigError as error:
        problems += error.problems
        nodes = usual_nodes(config)
    problems += contradictions(config, nodes)
    if problems:
        raise ConfigError(*problems)
    return config


def _wiring_of(data: Any) -> list[Problem]:
    """Return the problems of named steps in plain data that also has other problems."""
    steps = data.get("steps") if isinstance(data, Mapping) else None
    if not isinstance(steps, Mapping):
        return []
    usual = {name: Joint(stage) for name, stage in likely_stages(data).items()}
    return wiring_problems({str(name): joint_of(step) for name, step in steps.items()}, usual)


def set_value(data: dict[str, Any], key: str, text: str) -> list[Problem]:
    """Set a dotted key (`sft.optimizer.learning_rate`, `ingest.read.0.limit_mb`) to a value in YAML."""
    try:
        value = read_plain(text)
    except BadYaml as error:
        return [Problem("bad_setting", f"--set {key}", f"{text!r} is not valid YAML: {error}")]
    parent: Any = data
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(parent, list) and part.isdecimal() and int(part) < len(parent):
            parent = parent[int(part)]
        elif isinstance(parent, dict):
            if parent.get(part) is None:
                parent[part] = {}
            parent = parent[part]
        else:
            return [
                Problem("bad_setting", f"--set {key}", f"{part} is not a mapping or list, so it has no keys to set")
            ]
    if isinstance(parent, list) and last.isdecimal() and int(last) < len(parent):
        parent[int(last)] = value
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        return [Problem("bad_setting", f"--set {key}", f"the value there has no key {last}")]
    return []
