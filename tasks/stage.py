"""Definition of a stage: a name, a typed config, typed inputs, one function, and a version of its meaning."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from infra.config import StageConfig
from infra.errors import Problem
from infra.io.sources import Source
from infra.run import Result, Run
from infra.store.measurements import MEASURE

StageFunction = Callable[[Any, Mapping[str, Path], Path, Run], Result]


Kind = Literal[
    "documents",
    "test_items",
    "tokenizer",
    "shards",
    "instructions",
    "preferences",
    "model",
    "reward_model",
    "verdict",
    "scores",
    "measurement",
    "registration",
    "page",
]
"""The kind of an artifact, which decides the inputs it can be: a model is a Hugging Face folder of one that writes
text."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of artifacts that the stages of this project make. A stage of an installed package may make another."""

STEP_KEYS = frozenset({"uses", "inputs", "requires"})
"""Keys of a step that do not belong to the config of its stage."""

STATE = "state"
"""The input from whose kept training state a training goes on; `continues` in a step's config names it."""


@dataclass(frozen=True)
class Input:
    """One input of a stage: its name, and the kinds of artifacts that it can be."""

    name: str
    takes: tuple[str, ...]
    optional: bool = False


def needs(name: str, *takes: str) -> Input:
    """A required input; it takes the kind of the same name where no kind is given."""
    return Input(name, takes or _kind_called(name))


def may_have(name: str, *takes: str) -> Input:
    """An optional input. One that is left out is no part of the artifact's identity."""
    return Input(name, takes or _kind_called(name), optional=True)


def _kind_called(name: str) -> tuple[Kind, ...]:
    kinds = tuple(kind for kind in KINDS if kind == name)
    if not kinds:
        raise TypeError(f"the input {name} names the kinds that it takes, of {', '.join(KINDS)}")
    return kinds


@dataclass(frozen=True)
class InstalledPackage:
    """An installed package that declares a stage. code: the files of its code, part of the identity of what the stage
    makes, as its version is."""

    name: str
    version: str
    code: Source

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Stage:
    """The declaration of one stage, see `tasks.stages`.

    name: the name in a step's `uses`, and the stage's section in the config where it has one.
    about: one sentence for the config's schema and the page's forms.
    version: raised when the stage's meaning or a default changes, so that old artifacts are not taken for new ones.
    function: the import path of its domain function, `package.module:name`.
    inputs: its input artifacts.
    more: kinds of artifacts that may come in under any other name.
    makes: the kind of its artifact.
    shows: files of the artifact that a person wants to open from the tracking page.
    trains: True if it runs in `launch.processes` ranks on each of `launch.nodes`; other stages run in one process.
    compares: True if it also gets the pipeline's last artifact of the same step as the input `previous`, if there is
        one. Its output from that goes into aux/ only, since that input is no part of the identity.
    registers: the input whose model goes into the registry, under the config's `name`, once this stage is built.
    measured_by: the stage that measures the model that this one trains. Its function is called alone, or in the process
        of the training once the model is written, by way of `infra.run.Result.measure`.
    continues_text: True if it needs a model that continues text, which not every objective of pretraining gives.
    uses_gpu: True if it uses a GPU where there is one. A process that uses CUDA is never forked.
    imports_later: modules that its function imports when it is called and that take long. They are imported before the
        process is forked (`tasks.processes.warm_start`); the function's own module needs no entry.
    installed: the package that declares it and that is installed next to this project; None for our own stages.
    """

    name: str
    about: str
    version: int
    config: type[StageConfig]
    function: str
    makes: str
    inputs: tuple[Input, ...] = ()
    more: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    compares: bool = False
    trains: bool = False
    registers: str = ""
    measured_by: str = ""
    continues_text: bool = False
    uses_gpu: bool = False
    imports_later: tuple[str, ...] = ()
    installed: InstalledPackage | None = None

    @property
    def makes_weights(self) -> bool:
        """True if its artifact is a model of any kind."""
        return self.makes in ("model", "reward_model")

    @property
    def package(self) -> str:
        """The package of the code that builds it."""
        return self.function.partition(".")[0]

    @property
    def keeps_memory(self) -> bool:
        """True if its process keeps what it has freed: training and evaluation allocate the same at every batch.

        All stages of a package agree, since one server forks their processes.
        """
        return self.package in ("training", "evaluation") or (self.installed is not None and self.trains)

    def input(self, name: str) -> Input | None:
        """The input that may come in under this name; None if nothing may."""
        declared = next((candidate for candidate in self.inputs if candidate.name == name), None)
        return declared or (Input(name, self.more, optional=True) if self.more else None)

    def load(self) -> StageFunction:
        """Import the function, which may pull in torch."""
        module, _, name = self.function.partition(":")
        function: StageFunction = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class UsualStep:
    """One step of the usual pipeline, which a section of the config adds; see `tasks.stages.USUAL_STEPS`.

    id: unique in the pipeline (`validate_clean`).
    uses: the stage, which is also the name of the section.
    inputs: input name → steps that can be this input. The first of them that the pipeline has is taken; an input of
        which it has none is left out.
    requires: validations of what it reads, of which the first that the pipeline has must have succeeded.
    needs: optional inputs of the stage that a section must have all the same.
    only_if: input name → key of the config without which the input is not read.
    further: steps that are read too, each as an input of its own name.
    from_step: input name → stage; a named step that is called like the input and uses this stage is the input.
    adds: a section that this one's adds with its defaults.
    checks: for a validation, the kind of data whose suite it applies.
    instead_of: a step that it takes the place of; a config has a section for one of the two.
    reads_all: True for the report, which reads every other step.
    """

    id: str
    uses: str = ""
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    only_if: Mapping[str, str] = field(default_factory=dict)
    further: tuple[str, ...] = ()
    from_step: Mapping[str, str] = field(default_factory=dict)
    adds: str = ""
    checks: str = ""
    instead_of: str = ""
    reads_all: bool = False

    @property
    def section(self) -> str:
        """The stage, and the section of the config."""
        return self.uses or self.id


@dataclass(frozen=True)
class Node:
    """One step: a use of a stage in a pipeline's DAG.

    id: unique in the pipeline (`benchmarks_sft`); the name in `--only`, `why` and JSON.
    inputs: input name → id of the node whose artifact it is.
    requires: nodes that must have succeeded first, but whose bytes do not affect this one (a validation).
    adopted: the fingerprint of an artifact that is used unchanged; such a node has no inputs and is never built.
    stored_as: the name of its artifacts in the store, both of their folder and in their fingerprint; the stage's own
        name where it is empty. See docs/decisions/0006-steps-share-artifacts.md.
    path: the dotted key of its config; `id` where it is empty.
    promoted: the record of the promoted model that a registration is held against; see `tasks.building.promoted`.
    measurement: the node that measures the model that this one trains.
    precision: `launch.precision` of a training; fp8 and fp16 make another model, and are part of its identity.
    """

    id: str
    stage: Stage
    config: StageConfig
    inputs: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    adopted: str | None = None
    stored_as: str = ""
    path: str = ""
    promoted: Source | None = None
    measurement: Node | None = None
    precision: str = "auto"

    @property
    def folder(self) -> str:
        """The store's folder of its artifacts, which is also the stage that their manifests name."""
        return self.stored_as or self.stage.name

    @property
    def key(self) -> str:
        """The dotted key of its config, for messages."""
        return self.path or self.id

    @property
    def upstream(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.inputs.values(), *self.requires)))

    def relocated(self, problem: Problem) -> Problem:
        """Return a problem with a key of the stage's config under the key where this step has that config."""
        section = f"{self.stage.name.removeprefix(MEASURE)}."
        if not self.path or not problem.path.startswith(section):
            return problem
        return replace(problem, path=f"{self.path}.{problem.path.removeprefix(section)}")

    def continues_at(self) -> int | None:
        """Number of batches of the other training after which it continues; None for all of them."""
        continues = getattr(self.config, "continues", None)
        return continues.batches if continues else None

    @property
    def measures(self) -> bool:
        return self.stage.makes == "measurement"

    def sources(self) -> list[Source]:
        """Sources of this node that no node of the graph makes."""
        read = self.config.sources() if isinstance(self.config, ReadsSources) else []
        code = [self.stage.installed.code] if self.stage.installed else []
        return [*read, *code, *([self.promoted] if self.promoted else [])]


@runtime_checkable
class NeedsDisk(Protocol):
    """A config whose stage needs much more disk while it is built than its artifact takes."""

    def disk_bytes(self, inputs: Mapping[str, Path]) -> int:
        """Return the bytes that a build needs, from the folders of its inputs; 0 if they are unknown."""


@runtime_checkable
class ReadsSources(Protocol):
    """A config whose stage reads files outside the store."""

    def sources(self) -> list[Source]: ...
