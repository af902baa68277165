"""Stages of packages that are installed next to this project, by the entry-point group `stemma.stages`.

    [project.entry-points."stemma.stages"]
    longest = "longest_documents.stages:LONGEST"

The entry point has the stage's name and leads to its declaration, a `tasks.stage.Stage`. See docs/stages.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path

from infra.config import StageConfig
from infra.errors import Problem
from infra.io.sources import Source
from tasks.stage import STEP_KEYS, InstalledPackage, Stage

GROUP = "stemma.stages"
NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class InstalledStages:
    """Stages by name, and a problem for each entry point that cannot be used."""

    stages: Mapping[str, Stage] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def installed_stages(known: Mapping[str, Stage]) -> InstalledStages:
    """Read the stages of all installed packages.

    Args:
        known: the stages of this project, whose names are taken.
    """
    stages: dict[str, Stage] = {}
    problems: list[Problem] = []
    for point in _entry_points():
        distribution = point.dist.metadata["Name"] if point.dist else "an unknown package"
        where = f"{distribution}: {GROUP}.{point.name}"
        fix = f"correct {distribution}, or uninstall it"
        try:
            stage = point.load()
        except Exception as error:  # any code of the package may run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            message = f"the stage {point.name} of the installed package {distribution} cannot be imported from"
            problems.append(Problem("bad_stage_package", where, f"{message} {point.value}: {reason}", fix))
            continue
        if point.name in known or point.name in stages:
            other = known.get(point.name) or stages[point.name]
            owner = other.installed.name if other.installed else "this project"
            message = f"the installed package {distribution} declares the stage {point.name}, which {owner} already has"
            problems.append(
                Problem("stage_name_taken", where, message, f"rename it in {distribution}, or uninstall it")
            )
        elif wrong := list(_faults(stage, point.name, {*known, *stages})):
            message = f"the stage {point.name} of the installed package {distribution}: "
            problems += [Problem("bad_stage_package", where, message + fault, fix) for fault in wrong]
        else:
            stages[point.name] = replace(stage, installed=_package_of(stage, point.dist))
    return InstalledStages(stages, tuple(problems))


def _entry_points() -> Iterable[metadata.EntryPoint]:
    """Return the group's entry points in an order that does not depend on sys.path."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda entry_point: (entry_point.name, entry_point.value))


def _faults(stage: object, name: str, known: set[str]) -> Iterator[str]:
    """Yield reasons why an object is not a valid declaration of the stage `name`."""
    if not isinstance(stage, Stage):
        yield f"expected a tasks.stage.Stage, found {type(stage).__name__}"
        return
    if stage.name != name:
        yield f"expected one name: the entry point is called {name}, but the stage {stage.name!r}"
    if not NAME.fullmatch(stage.name):
        yield f"expected a name of lowercase letters, digits and _, at most 48 of them, not {stage.name!r}"
    if not _FUNCTION.fullmatch(stage.function):
        yield f"function: expected package.module:name, not {stage.function!r}"
    if not (isinstance(stage.config, type) and issubclass(stage.config, StageConfig)):
        yield "config: expected a subclass of infra.config.StageConfig"
    elif taken := sorted(STEP_KEYS & stage.config.model_fields.keys()):
        yield f"config: the key {taken[0]} belongs to the step that uses the stage; choose another name"
    if type(stage.version) is not int or stage.version < 1:
        yield f"version: expected a whole number from 1, not {stage.version!r}"
    for kind in (stage.makes, *stage.more, *(kind for declared in stage.inputs for kind in declared.takes)):
        if not NAME.fullmatch(kind):
            yield f"expected a kind of artifact such as documents, not {kind!r}"
    if stage.makes == "measurement":
        yield "makes: measurements belong to stages of this project"
    if stage.measured_by and stage.measured_by not in known:
        yield f"measured_by: there is no stage {stage.measured_by}"


def _package_of(stage: Stage, distribution: metadata.Distribution | None) -> InstalledPackage:
    """Return the package of a stage, with all .py files of the import package that its function is in.

    What these import from elsewhere is not part of the identity: if that changes what the stage makes, its version is
    raised.
    """
    name = distribution.metadata["Name"] if distribution else stage.package
    files = tuple(sorted(_code_files(stage.package)))
    code = Source(f"code of {name}", paths=files, fix=f"install {name} again")
    return InstalledPackage(name, distribution.version if distribution else "", code)


def _code_files(package: str) -> Iterator[Path]:
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None) or util.find_spec(package)
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from Path(folder).rglob("*.py")
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin)
