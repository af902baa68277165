"""The base of every config class: frozen, no unknown keys, and a word for keys outside of identity."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

OUTSIDE_IDENTITY = "outside_identity"


class Config(BaseModel):
    """A frozen, typed config section; unknown keys are errors."""

    # Attribute docstrings become the descriptions in the JSON schema and in the page's forms.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class StageConfig(Config):
    """The config of one stage. A stage that draws random numbers adds `seed: int = 17`; the pipeline's `seed`
    fills it where the section does not set its own."""


def outside_identity(default: Any = ..., **kwargs: Any) -> Any:
    """A field that says where or how something runs, and so never moves an artifact to another address."""
    return Field(default, json_schema_extra={OUTSIDE_IDENTITY: True}, **kwargs)
