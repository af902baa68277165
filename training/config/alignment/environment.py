"""Config of an environment that RLHF learns in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, field_validator

from infra.config import Config, outside_identity
from infra.errors import Problem
from infra.io.sources import Source
from infra.project import PROJECT
from training.config.alignment.functions import file_of, missing_functions

SHIPPED: Mapping[str, str] = {
    "calculator": "training.rl.environments.calculator:Calculator",
    "code": "training.rl.environments.code:Code",
    "search": "training.rl.environments.search:Search",
    "maze": "training.rl.environments.maze:Maze",
    "verifiers": "training.rl.environments.adapters:Verifiers",
    "openenv": "training.rl.environments.adapters:OpenEnv",
}
"""Environments by short names, and their classes."""
_KEY = "rlhf.environment.use"


class EnvironmentConfig(Config):
    """An environment: tasks that the policy works on in several turns, with tools."""

    use: str
    """calculator (arithmetic with a calculator), code (programs with unit tests), search (retrieval over documents),
    maze (a text game with a known optimum), verifiers or openenv (environments of these packages, where installed), or
    a class of yours, package.module:Class or folder/file.py:Class, see training/rl/environments/protocol.py."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    tasks: int | None = Field(None, ge=2)
    """Number of tasks that the environment makes by itself, for training. null: the prompts of the instructions are the
    tasks, with their responses."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of answers of an episode; 8 or fewer are usual for tools."""
    max_tokens: int = Field(1024, ge=2)
    """Maximum number of tokens of an episode after its prompt: those of the policy and those of the environment.
    `answer_max_tokens` limits each answer."""
    weight: float = Field(1.0, gt=0)
    """Weight of the environment's reward, to which rewards of reward models and functions are added, if any."""
    show_tools: bool = True
    """Describe the tools in the prompt: by the model's chat template, or as text if it has no tools. false is for
    models that were tuned on the calls."""
    files: tuple[str, ...] = ()
    """Files and folders that the environment may read, besides its own module and Python's packages. Their contents
    count as part of the config."""
    network: bool = False
    """Allow the environment to make connections, such as to the server of an OpenEnv environment."""
    instances: int = outside_identity(2, ge=1)
    """Instances on each rank, or in each sampler of `async`, between which episodes are divided; each is a process."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds that an environment may take for a reply; its episode is dropped after that, and its process replaced."""
    memory_mb: int = Field(1024, ge=64)
    """MiB of memory of each process of the environment."""
    max_dropped: float = Field(0.2, ge=0, lt=1)
    """Share of a round's episodes that may be dropped, as the environment failed or was slow, above which the stage
    stops. Each dropped episode is counted and played again."""

    @field_validator("use")
    @classmethod
    def _names_a_class(cls, use: str) -> str:
        location, _, name = use.rpartition(":")
        if use in SHIPPED or (
            name.isidentifier() and (location.endswith(".py") or re.fullmatch(r"[A-Za-z_][\w.]*", location))
        ):
            return use
        raise ValueError(f"expected {', '.join(SHIPPED)}, package.module:Class or folder/file.py:Class, not {use!r}")

    @property
    def path(self) -> str:
        """The class, `module:Class` or `/folder/file.py:Class`."""
        location, _, name = self.use.rpartition(":")
        return SHIPPED.get(self.use) or (
            f"{os.path.abspath(location)}:{name}" if location.endswith(".py") else self.use
        )

    @property
    def module_file(self) -> Path | None:
        """The file of a class of the user, None for a shipped environment or if it is missing."""
        if self.use in SHIPPED:
            return None
        location = self.path.rpartition(":")[0]
        file = location if location.endswith(".py") else file_of(location)
        return Path(file) if file and Path(file).exists() else None

    def readable(self) -> tuple[list[str], list[Path]]:
        """Return entries of sys.path for the environment's process, and the files and folders that it can read."""
        path, readable = [str(PROJECT)], [PROJECT / "training" / "rl" / "environments"]
        module = self.path.rpartition(":")[0]
        if (file := self.module_file) is not None:
            parts = () if module.endswith(".py") else module.split(".")
            package = file.parent if file.name == "__init__.py" else file
            for _ in parts[1:]:
                package = package.parent
            path.append(str(package.parent))
            readable.append(package)
        return path, [*readable, *(Path(os.path.abspath(name)) for name in self._files)]

    @property
    def _files(self) -> tuple[str, ...]:
        """The files that the environment may read, with the documents of `search`."""
        documents = self.options.get("documents") if self.use == "search" else None
        return (*self.files, *((documents,) if isinstance(documents, str) else ()))

    def sources(self) -> list[Source]:
        """The user's module and the files that it may read: if they change, the model is another one."""
        given = [("use", self.module_file), *((f"files.{name}", Path(name)) for name in self._files)]
        return [Source(f"rlhf.environment.{key}", paths=(path,)) for key, path in given if path and path.exists()]

    def missing(self) -> Iterator[Problem]:
        """Problems of a class that cannot be found and of files that do not exist."""
        if self.use not in SHIPPED and not self.path.rpartition(":")[0].endswith(".py"):
            yield from missing_functions([self.path], _KEY)
        elif self.use not in SHIPPED and self.module_file is None:
            yield Problem("no_such_file", _KEY, f"expected a file: {self.use.rpartition(':')[0]} does not exist")
        for name in self._files:
            if not Path(name).exists():
                fix = "correct the path, or leave it out"
                yield Problem("no_such_file", "rlhf.environment.files", f"expected a file or folder: {name}", fix)

    def values(self, sandbox: str, documents: Path | None) -> dict[str, Any]:
        """Return the options with what the stage adds: the sandbox for `code`, the documents for `search`."""
        added: dict[str, Any] = {"sandbox": sandbox} if self.use == "code" else {}
        if self.use == "search" and documents is not None:
            added["documents"] = str(documents)
        if self.use == "search" and isinstance(given := self.options.get("documents"), str):
            return added | self.options | {"documents": os.path.abspath(given)}
        return added | self.options
