"""What a stage is: a name, a typed config, typed inputs, one function, and a version of its meaning."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from infra.config import StageConfig
from infra.run import Result, Run
from infra.sources import Source

StageFunction = Callable[[Any, Mapping[str, Path], Path, Run], Result]


@dataclass(frozen=True)
class Stage:
    """The declaration of one stage, see `tasks.stages`.

    name: also its section in the config.
    version: raised when the stage's meaning or a default changes, so that old artifacts are not taken for new ones.
    function: the import path of its domain function, `package.module:name`.
    inputs: the names of its input artifacts.
    makes: what its artifact is, which is how MLflow shows it.
    shows: files of the artifact that a person wants to open from the tracking page.
    trains: whether it runs in `launch.processes` ranks on each of `launch.nodes`; other stages run in one process.
    compares: whether it also gets the pipeline's last artifact of the same node as the input `previous`, if there is
        one. What it makes of it goes into aux/ only, since that input is no part of the identity.
    registers: the input whose model goes into the registry, under the config's `name`, once this stage is built.
    """

    name: str
    version: int
    config: type[StageConfig]
    function: str
    inputs: tuple[str, ...] = ()
    makes: Literal["dataset", "model", "report"] = "dataset"
    shows: tuple[str, ...] = ()
    compares: bool = False
    trains: bool = False
    registers: str = ""

    def load(self) -> StageFunction:
        """Imports the function, which may pull in torch."""
        module, _, name = self.function.partition(":")
        function: StageFunction = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class Node:
    """One place of a stage in a pipeline's DAG.

    id: unique in the pipeline (`benchmarks_sft`); what `--only`, `why`, JSON and folders use.
    inputs: input name → id of the node whose artifact it is.
    after: nodes that must have succeeded first, but whose bytes do not bear on this one (a validation).
    adopted: the fingerprint of an artifact that is taken as it is; such a node has no inputs and is never built.
    """

    id: str
    stage: Stage
    config: StageConfig
    inputs: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    adopted: str | None = None

    @property
    def upstream(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.inputs.values(), *self.after)))

    def sources(self) -> list[Source]:
        """What this node reads from outside the store."""
        return self.config.sources() if isinstance(self.config, ReadsSources) else []


@runtime_checkable
class ReadsSources(Protocol):
    """A config whose stage reads files outside the store."""

    def sources(self) -> list[Source]: ...
