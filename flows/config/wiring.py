"""Problems in the connections of named steps, reported together: unknown names, wrong artifact kinds, cycles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.config.problems import nearest
from infra.errors import Problem
from infra.store.measurements import MEASURE, is_measurement
from tasks.stage import Stage
from tasks.stages import STAGES, usable_stages

# What `--set` and the names of deployments could mistake for a step.
_RESERVED = {"report", "pipeline", "sweep", "name", "description", "seed", "steps", "adopted", "launch"}
NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
REPORT = "report"


@dataclass(frozen=True)
class Joint:
    """A step's declared place in the graph. stage: None for one that is not known. continues: the step whose training
    it continues, and whose inputs it reads where it names none itself."""

    stage: Stage | None
    inputs: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    continues: str = ""

    @property
    def upstream(self) -> Iterator[tuple[str, str]]:
        """Yield (the key that names it, the step) for every step that this one waits for."""
        yield from ((f"inputs.{key}", name) for key, name in self.inputs.items())
        yield from ((f"requires.{index}", name) for index, name in enumerate(self.requires))
        if self.continues:
            yield "continues.step", self.continues


def joint_of(step: Any) -> Joint:
    """Return the connection in plain data, as far as the data describe one."""
    if not isinstance(step, Mapping):
        return Joint(None)
    uses, inputs, requires = step.get("uses"), step.get("inputs"), step.get("requires")
    continues = step.get("continues")
    first = continues.get("step") if isinstance(continues, Mapping) else None
    return Joint(
        usable_stages().get(uses) if isinstance(uses, str) else None,
        {str(key): name for key, name in inputs.items() if isinstance(name, str)}
        if isinstance(inputs, Mapping)
        else {},
        tuple(name for name in requires if isinstance(name, str)) if isinstance(requires, list | tuple) else (),
        first if isinstance(first, str) else "",
    )


def wiring_problems(steps: Mapping[str, Joint], usual: Mapping[str, Joint]) -> list[Problem]:
    """Return the problems of named steps: unknown stages, inputs and steps, and cycles.

    Args:
        steps: the named steps.
        usual: the nodes of the sections, by their ids. Empty if the steps make a graph with them.
    """
    stages = {name: joint.stage for name, joint in {**usual, **steps}.items()}
    problems: list[Problem] = []
    for name, joint in steps.items():
        problems += _of_name(name, joint, steps, usual)
        if joint.stage is not None:
            problems += _of_inputs(name, joint, joint.stage, stages)
            problems += _of_continuing(name, joint, joint.stage, stages)
        for index, required in enumerate(joint.requires):
            if required not in stages:
                known = [other for other in stages if other != name]
                message, fix = f"there is no step {required}", nearest(required, known, "its steps:")
                problems.append(Problem("unknown_step", f"steps.{name}.requires.{index}", message, fix))
    return [*problems, *_cycles(steps, usual)]


def _of_name(name: str, joint: Joint, steps: Mapping[str, Joint], usual: Mapping[str, Joint]) -> Iterator[Problem]:
    path = f"steps.{name}"
    other = f"choose another name, such as {name}_2" if NAME.fullmatch(name) else ""
    if not NAME.fullmatch(name):
        message = f"expected at most 48 lower-case letters, digits and _, starting with a letter, not {name!r}"
        yield Problem("bad_name", path, message)
    elif name in usual or name in _RESERVED:
        yield Problem("name_taken", path, f"{name} is already a stage of a section or a key of the config", other)
    elif is_measurement(name, {*usual, *steps}):
        message = f"this is the name of the measurement of {name.removeprefix(MEASURE)}"
        yield Problem("name_taken", path, message, other)
    elif name in STAGES and joint.stage is not None and joint.stage.name != name:
        yield Problem("name_taken", path, f"{name} is a stage, and this step uses {joint.stage.name}", other)


def _of_inputs(name: str, joint: Joint, stage: Stage, stages: Mapping[str, Stage | None]) -> Iterator[Problem]:
    for key, up in joint.inputs.items():
        path = f"steps.{name}.inputs.{key}"
        declared = stage.input(key)
        if declared is None:
            inputs = [item.name for item in stage.inputs]
            fix = nearest(key, inputs, "its inputs:") if inputs else "leave it out"
            yield Problem("unknown_input", path, f"{stage.name} has no such input", fix)
            continue
        fitting = _fitting(declared.takes, stages, name)
        if up not in stages:
            fix = nearest(up, fitting, "these do:", 0.4) if fitting else f"add a step that makes {_or(declared.takes)}"
            yield Problem("unknown_step", path, f"no step {up} makes it", fix)
        elif (maker := stages[up]) is not None and maker.makes not in declared.takes:
            fix = nearest(up, fitting, "these are:", 0.4) if fitting else f"add a step that makes {_or(declared.takes)}"
            message = f"expected {_or(declared.takes)}, but {up} makes {_words(maker.makes)}"
            yield Problem("other_kind", path, message, fix)
    for declared in stage.inputs:
        if declared.name not in joint.inputs and not declared.optional and not joint.continues:
            fitting = _fitting(declared.takes, stages, name)
            fix = f"name one of {', '.join(fitting)}" if fitting else f"add a step that makes {_or(declared.takes)}"
            message = f"{stage.name} reads {_or(declared.takes)}, but no step that makes it is given"
            yield Problem("missing_input", f"steps.{name}.inputs.{declared.name}", message, fix)


def _of_continuing(name: str, joint: Joint, stage: Stage, stages: Mapping[str, Stage | None]) -> Iterator[Problem]:
    if not joint.continues:
        return
    path, first = f"steps.{name}.continues.step", joint.continues
    same = [other for other, other_stage in stages.items() if other_stage is stage and other != name]
    if first not in stages:
        fix = nearest(first, same, f"these use {stage.name}:", 0.4)
        yield Problem("unknown_step", path, f"there is no step {first}", fix)
    elif (other := stages[first]) is not None and other is not stage:
        fix = nearest(first, same, f"these use {stage.name}:", 0.4) if same else f"add a step that uses {stage.name}"
        message = f"expected a training by the same stage, but {first} uses {other.name}, not {stage.name}"
        yield Problem("other_stage", path, message, fix)


def _fitting(takes: tuple[str, ...], stages: Mapping[str, Stage | None], reader: str) -> list[str]:
    return [name for name, stage in stages.items() if stage is not None and stage.makes in takes and name != reader]


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _or(kinds: tuple[str, ...]) -> str:
    return " or ".join(map(_words, kinds))


def _cycles(steps: Mapping[str, Joint], usual: Mapping[str, Joint]) -> Iterator[Problem]:
    """Report each cycle once, at the input that closes it. The only usual node that reads a step is PPO: its judge."""
    joints = {**steps, **usual}
    done: set[str] = set()

    def follow(name: str, trail: list[str], path: str) -> Iterator[Problem]:
        for key, up in joints[name].upstream:
            here = path if name in usual else f"steps.{name}.{key}"
            if up in trail:
                round_ = " ← ".join([*trail[trail.index(up) :], up])
                fix = "a step cannot read the output of a step that depends on it"
                yield Problem("cycle", here, f"these steps wait for each other: {round_}", fix)
            elif up in joints and up not in done:
                yield from follow(up, [*trail, up], here)
        done.add(name)

    for name in (*usual, *steps):
        if name not in done:
            yield from follow(name, [name], name)
