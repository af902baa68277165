"""Named steps: any use of any stage, with explicit names of the steps whose artifacts it reads.

    steps:
      chat: {uses: sft, inputs: {model: sft, instructions: dialogues}, duration: 1 epoch}

      longer: {continues: {step: pretrain}, duration: 2000 batches}

A step holds the keys of its stage's config in addition to `uses`, `inputs` and `requires`: there is one class for each
stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import ConfigDict, Field, create_model

from infra.config import Config, StageConfig
from tasks.stage import Stage
from tasks.stages import usable_stages

CONTINUES = "continues"


class Step(Config):
    """One use of a stage, under a name that is unique in the pipeline."""

    uses: str
    """The stage."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Source of each input: the name of a step, or of a stage that has a section."""
    requires: tuple[str, ...] = ()
    """Steps that must have succeeded first, although their output does not affect this one: e.g. a validation."""

    @property
    def stage(self) -> Stage:
        return usable_stages()[self.uses]

    def continued(self) -> str:
        """The step whose training it goes on with; "" if it begins by itself."""
        continues = getattr(self, CONTINUES, None)
        return continues.step if continues else ""

    def upstream(self) -> tuple[str, ...]:
        """All steps that it names."""
        return (*self.inputs.values(), *self.requires, *([self.continued()] if self.continued() else []))

    @cached_property
    def config(self) -> StageConfig:
        """The config of the stage itself."""
        fields = self.stage.config.model_fields
        given = {fields[name].alias or name: getattr(self, name) for name in fields if name in self.model_fields_set}
        return self.stage.config.model_validate(given)


def inherited(steps: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Steps as plain data. A step that `continues` another inherits its stage and the settings that it does not set
    itself.

    Args:
        sections: the pipeline's, as plain data.
    """

    def filled(name: str, trail: tuple[str, ...] = ()) -> Any:
        step = steps[name]
        continues = step.get(CONTINUES) if isinstance(step, Mapping) else None
        first = continues.get("step") if isinstance(continues, Mapping) else None
        if not isinstance(first, str) or first in trail:
            return step
        before: Any
        if first in steps:
            before = filled(first, (*trail, name))
            if not isinstance(before, Mapping):
                return step
            before = {key: value for key, value in before.items() if key not in (*OWN_KEYS[1:], CONTINUES)}
        elif first in usable_stages() and first in sections:
            section = sections[first]
            before = {"uses": first, **(section if isinstance(section, Mapping) else {})}
        else:
            return step
        return _merged(before, step) if before.get("uses") == step.get("uses", before.get("uses")) else step

    return {name: filled(name) for name in steps}


def _merged(before: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in before.keys() & changed.keys() if isinstance(before[key], Mapping)}
    nested = {key: _merged(before[key], changed[key]) for key in both if isinstance(changed[key], Mapping)}
    return {**before, **changed, **nested}


OWN_KEYS = tuple(Step.model_fields)
"""The keys of a step that do not belong to its stage's config."""


class _Described(Config):
    """A base for classes made of classes whose fields have their descriptions: pydantic need not search the source."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def _step_class(stage: Stage) -> type[Step]:
    uses: Any = (Literal[stage.name], Field(description=stage.about))
    bases: Any = (Step, stage.config, _Described)
    name = "".join(word.capitalize() for word in stage.name.split("_"))
    create: Any = create_model
    made: type[Step] = create(f"{name}Step", __base__=bases, __doc__=stage.about, uses=uses)
    return made


STEP_CLASSES = {name: _step_class(stage) for name, stage in usable_stages().items()}

if TYPE_CHECKING:
    AnyStep = Step
else:
    AnyStep = Annotated[Union[tuple(STEP_CLASSES.values())], Field(discriminator="uses")]  # noqa: UP007
