"""Content of a pipeline's YAML file: a section for each usual stage, named steps, and where to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, create_model, model_validator

from flows.config.steps import AnyStep, inherited
from infra.config import Config, Seed, StageConfig
from infra.launch.config import LaunchConfig
from infra.lineage.also.config import LineageConfig
from tasks.stage import Node
from tasks.stages import SECTIONS, USUAL_STEPS, usable_stages

C = TypeVar("C", bound=StageConfig)

Graph = dict[str, Node]
"""Nodes by id, each after everything that it needs."""

# `validate` and `register` are names of pydantic's own.
_ATTRIBUTES = {"validate": "validate_", "register": "register_"}


def section_classes() -> dict[str, type[StageConfig]]:
    """Section name → config class, for every stage that has a section."""
    return {name: stage.config for name, stage in SECTIONS.items()}


class _Heading(Config):
    """Keys before the sections."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=60)
    """Names the pipeline in the pages, its deployments, and the registered model."""
    description: str = ""
    """One sentence on what this pipeline is for."""
    seed: Seed = 17
    """The seed of every stage that does not set its own."""


if TYPE_CHECKING:

    class _Sections(_Heading):
        """An optional section for each stage that has one."""
else:
    _Sections = create_model(
        "_Sections",
        __base__=_Heading,
        **{
            _ATTRIBUTES.get(name, name): (
                config | None,
                Field(None, alias=name if name in _ATTRIBUTES else None, description=SECTIONS[name].about),
            )
            for name, config in section_classes().items()
        },
    )


class PipelineConfig(_Sections):
    """A whole pipeline. A stage without a section is not run; an empty section takes all defaults."""

    steps: dict[str, AnyStep] = Field(default_factory=dict)
    """Further uses of stages, by step name: `chat: {uses: sft, inputs: {model: sft, instructions: more}}`. `uses`
    determines the other keys. Steps may read from each other and from the sections' stages."""
    adopted: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]] = Field(default_factory=dict)
    """Stage id or step → fingerprint of an artifact to use unchanged, e.g. one imported by `stemma adopt`. Such a stage
    is never built, and stages that only it needs do not run."""
    launch: LaunchConfig = LaunchConfig()
    """Machines, ranks and launcher: the only section that describes hardware."""
    lineage: LineageConfig = LineageConfig()
    """Trackers that get metrics, settings and links to artifacts besides MLflow."""

    def nodes(self, build: Callable[[PipelineConfig], Graph]) -> Graph:
        """The nodes of this config, built when they are first asked for. A copy with other values builds its own."""
        # In __dict__, as a cached property would be: no part of what is compared or dumped.
        owner, nodes = self.__dict__.get("nodes of", (None, {}))
        if owner != id(self):
            nodes = build(self)
            self.__dict__["nodes of"] = id(self), nodes
        return nodes

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, data: Any) -> Any:
        """The pipeline's seed goes to every stage that has one. A section that is `null`, as a form gives it, is left
        out."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        adopted = filled.get("adopted")
        for step in USUAL_STEPS.values():
            is_adopted = isinstance(adopted, Mapping) and step.id in adopted
            if step.adds and filled.get(step.section) is not None and not is_adopted:
                filled[step.adds] = filled.get(step.adds) or {}
        for key, config in section_classes().items():
            if filled.get(key) is not None:
                filled[key] = _seeded(filled[key], config, filled)
        if "steps" in filled and filled["steps"] is None:
            filled["steps"] = {}
        if isinstance(steps := filled.get("steps"), Mapping):
            steps = inherited(steps, filled)
            filled["steps"] = {name: _seeded(step, _config_class_of(step), filled) for name, step in steps.items()}
        return filled

    def section(self, name: str) -> StageConfig | None:
        """The config of a stage by its section's name in the file."""
        section = getattr(self, _ATTRIBUTES.get(name, name))
        assert section is None or isinstance(section, StageConfig)
        return section

    def of(self, kind: type[C]) -> C | None:
        """The section of this config class; None where it has none, or the pipeline leaves it out."""
        name = next((name for name, config in section_classes().items() if config is kind), None)
        section = self.section(name) if name else None
        assert section is None or isinstance(section, kind)
        return section

    def all_of(self, kind: type[C]) -> list[C]:
        """The section of this config class and the configs of the named steps of it."""
        section = self.of(kind)
        steps = [step.config for step in self.steps.values() if step.stage.config is kind]
        return [*([section] if section else []), *(step for step in steps if isinstance(step, kind))]


def dump(config: PipelineConfig, defaults: bool = True) -> dict[str, Any]:
    """Plain data that reads back as the config; sections and steps that are left out stay out.

    defaults: include keys that the config does not set.
    """
    data = config.model_dump(mode="json", by_alias=True, exclude_unset=not defaults)
    if not config.steps:
        data.pop("steps", None)
    return {key: value for key, value in data.items() if value is not None}


def _seeded(section: Any, config: type[StageConfig] | None, pipeline: Mapping[str, Any]) -> Any:
    """The section with the pipeline's seed, if it takes a seed and sets none itself."""
    takes_seed = config is not None and "seed" in config.model_fields and "seed" in pipeline
    if takes_seed and isinstance(section, Mapping) and "seed" not in section:
        return {**section, "seed": pipeline["seed"]}
    return section


def _config_class_of(step: Any) -> type[StageConfig] | None:
    uses = step.get("uses") if isinstance(step, Mapping) else None
    return usable_stages()[uses].config if isinstance(uses, str) and uses in usable_stages() else None
