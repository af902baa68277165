"""One YAML file, one pipeline: read with everything that is wrong with it said at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.contradictions import contradictions
from flows.graph import graph, step_problems, usual_nodes
from flows.pipeline_config import PipelineConfig, dump, section_classes
from flows.problems import problems_of
from flows.wiring import joint_of, wiring_problems
from flows.yaml import read_yaml, set_value
from infra.errors import ConfigError, Problem
from infra.sources import FOLDER
from tasks.stage import Stage
from tasks.stages import STAGES

__all__ = ["PipelineConfig", "dump", "load", "parse", "section_classes"]


def load(path: Path, settings: Mapping[str, str] | None = None) -> PipelineConfig:
    """The pipeline in a YAML file, with `--set` values (YAML text by dotted key) in place.

    Raises ConfigError with everything that is wrong in all sections and steps.
    """
    data = read_yaml(path)
    steps = data.get("steps")
    problems: list[Problem] = []
    for key, text in (settings or {}).items():
        # A step is named without its section, as everywhere on the command line.
        is_step = isinstance(steps, dict) and "." in key and key.partition(".")[0] in steps
        problems += set_value(data, f"steps.{key}" if is_step else key, text)
    if problems:
        raise ConfigError(*problems)
    return parse(data, path.absolute().parent)


def parse(data: Any, folder: Path | None = None) -> PipelineConfig:
    """The pipeline in plain data; relative paths in it are relative to `folder`. Raises ConfigError."""
    try:
        config = PipelineConfig.model_validate(data, context={FOLDER: folder} if folder else None)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, PipelineConfig), *_wiring_of(data)) from None
    usual = usual_nodes(config)
    problems = step_problems(config, usual)
    problems += contradictions(config, usual if problems else graph(config))
    if problems:
        raise ConfigError(*problems)
    return config


def _wiring_of(data: Any) -> list[Problem]:
    """What is wrong with the named steps of plain data in which something else is wrong too."""
    steps = data.get("steps") if isinstance(data, Mapping) else None
    if not isinstance(steps, Mapping):
        return []
    return wiring_problems({str(name): joint_of(step) for name, step in steps.items()}, _likely_nodes(data))


def _likely_nodes(data: Mapping[str, Any]) -> dict[str, Stage]:
    """What the sections would give, were they right, and more: nothing that may be there is to be called unknown."""
    present = [name for name, stage in STAGES.items() if stage.section and name in data]
    present += ["benchmark_text"] if "decontaminate" in present else []
    nodes = {name: STAGES[name] for name in present if name not in ("validate", "benchmarks", "safety", "report")}
    if "validate" in present:
        kinds = ("", "_clean", "_instructions", "_preferences", "_shards")
        nodes |= {f"validate{kind}": STAGES["validate"] for kind in kinds}
    for name in {"benchmarks", "safety"}.intersection(present):
        nodes |= {f"{name}_{label}": STAGES[name] for label in ("base", "sft", "rlhf")}
    return nodes
