"""Named steps: any use of any stage, with whose artifacts it reads written out.

    steps:
      chat: {uses: sft, inputs: {model: sft, instructions: dialogues}, duration: 1 epoch}

A step holds the keys of its stage's config beside `uses`, `inputs` and `requires`: there is one class for each stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, create_model

from infra.config import Config, StageConfig
from tasks.stage import Stage
from tasks.stages import STAGES


class Step(Config):
    """One use of a stage, under a name that is unique in the pipeline."""

    uses: str
    """The stage."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Whose artifact each input is: the name of a step, or of a stage that has a section."""
    requires: tuple[str, ...] = ()
    """Steps that must have succeeded first, though their bytes do not bear on this one: a validation."""

    @property
    def stage(self) -> Stage:
        return STAGES[self.uses]

    @property
    def config(self) -> StageConfig:
        """What the stage itself is told."""
        fields = self.stage.config.model_fields
        given = {fields[name].alias or name: getattr(self, name) for name in fields if name in self.model_fields_set}
        return self.stage.config.model_validate(given)


OWN_KEYS = tuple(Step.model_fields)
"""The keys of a step that are none of its stage's config."""


def _step_class(stage: Stage) -> type[Step]:
    uses: Any = (Literal[stage.name], Field(description=stage.about))
    bases: Any = (Step, stage.config)
    name = "".join(word.capitalize() for word in stage.name.split("_"))
    create: Any = create_model
    made: type[Step] = create(f"{name}Step", __base__=bases, __doc__=stage.about, uses=uses)
    return made


STEP_CLASSES = {name: _step_class(stage) for name, stage in STAGES.items()}

if TYPE_CHECKING:
    AnyStep = Step
else:
    AnyStep = Annotated[Union[tuple(STEP_CLASSES.values())], Field(discriminator="uses")]  # noqa: UP007
