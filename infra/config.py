"""The base of every config class: frozen, no unknown keys, values in one normal form regardless of their origin."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

OUTSIDE_IDENTITY = "outside_identity"
MEASURED_ONLY = "measured_only"
IN_IDENTITY = "in_identity"

# Words that YAML 1.1 reads as booleans.
_BOOLEANS = {"true": True, "yes": True, "on": True, "y": True, "false": False, "no": False, "off": False, "n": False}
_EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
_EXACT = 2**53  # above it, not every whole number has a float


Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""Seed of random numbers: within the range of every library, with a rank or a round added too. For anything else
that depends on it, see `derived_seed`."""


def derived_seed(seed: int, *keys: int) -> int:
    """Return a seed below 2**32, which every library takes, for one use of another seed.

    Args:
        seed: Any number from 0.
        keys: Numbers from 0 that name the use, such as the batch or the query. Different keys and different seeds give
            independent seeds. Products and sums, in contrast, may collide (`2 * 10_007 + 1` is `1 * 10_007 + 10_008`)
            or leave the range.
    """
    import numpy as np  # only stages draw random numbers; commands that read a config start faster without it

    return int(np.random.SeedSequence(seed, spawn_key=keys).generate_state(1)[0])


class Config(BaseModel):
    """A frozen, typed config section; unknown keys are errors.

    Defaults are validated as given values are, so that a config reads the same after it was written out as JSON.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,  # they have no JSON form
        use_attribute_docstrings=True,  # the descriptions in the JSON schema and in the page's forms
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_plain_words(cls, data: Any) -> Any:
        """Restore what a person wrote for a key if YAML or a page's form converted it.

        `on` for a key that may be on or off is not a boolean, and `1e6` for a whole number is not text.
        """
        if not isinstance(data, Mapping):
            return data
        read = dict(data)
        for name, field in cls.model_fields.items():
            for key in {name, field.alias} & read.keys():
                if read[key] is None and is_group(field.annotation):
                    del read[key]  # an empty group means its defaults
                else:
                    read[key] = as_meant(read[key], field.annotation)
        return read


def is_group(annotation: Any) -> bool:
    """Return True if a key is a nested config that is always present."""
    return isinstance(annotation, type) and issubclass(annotation, Config)


class StageConfig(Config):
    """The config of one stage. A stage that draws random numbers adds `seed: Seed = 17`; the pipeline's `seed`
    fills it where the section does not set its own."""


def outside_identity(default: Any = ..., **kwargs: Any) -> Any:
    """Return a field for where or how something runs, which never moves an artifact to another address."""
    return Field(default, json_schema_extra={OUTSIDE_IDENTITY: True}, **kwargs)


def measured_only(default: Any = ..., **kwargs: Any) -> Any:
    """Return a field that changes the measurement of a trained model, but not the model.

    It is part of the identity of the measurement only.
    """
    return Field(default, json_schema_extra={MEASURED_ONLY: True}, **kwargs)


def in_identity(default: Any = ..., **kwargs: Any) -> Any:
    """Return a field that is part of the identity even at its default.

    It is for a new key of an optional section whose default changes what the section does: only artifacts of configs
    with that section move.
    """
    return Field(default, json_schema_extra={IN_IDENTITY: True}, **kwargs)


@cache
def normal_default(config: type[BaseModel], name: str) -> Any:
    """Return the default of a key as validation leaves it: `1 epochs` if the class has `1 epoch`.

    Validators of the class itself (`@field_validator`) may check a default, but must not change it.
    """
    field = config.model_fields[name]
    default = field.get_default(call_default_factory=True, validated_data={})
    annotated_type: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return TypeAdapter[Any](annotated_type).validate_python(default)


def as_meant(value: Any, annotation: Any) -> Any:
    """Convert a value from YAML or JSON to the key's type; values that do not fit are left for validation to refuse."""
    if isinstance(value, list | tuple):
        return [as_meant(item, annotation) for item in value]
    words, kinds = _atoms(annotation)
    if bool not in kinds and isinstance(value, bool | str) and value not in words:
        boolean = value if isinstance(value, bool) else _BOOLEANS.get(value.lower())
        if boolean is not None:
            return next((word for word in sorted(words) if _BOOLEANS.get(word) is boolean), value)
    if int in kinds and not kinds & {str, float} and isinstance(value, str) and _EXPONENT.fullmatch(value):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < _EXACT else value
    return value


def as_json(value: Any) -> Any:
    """Return a value of a key that takes anything, as it would come back from JSON.

    Keys are texts. Texts that YAML 1.1 reads as a number or a boolean are converted to one. Raises ValueError for
    numbers that are not finite and for values that are not plain.
    """
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, str):
        return _BOOLEANS.get(value.lower(), value) if len(value) > 1 else value
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"expected finite numbers, texts, booleans, lists and mappings, not {value!r}")


@cache
def _atoms(annotation: Any) -> tuple[frozenset[str], frozenset[type]]:
    """Return the words and the plain types that a key accepts, without those of nested configs."""
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        types = frozenset(type(value) for value in values if not isinstance(value, str))
        return frozenset(value for value in values if isinstance(value, str)), types
    if annotation in (bool, int, float, str):
        return frozenset(), frozenset({annotation})
    words: frozenset[str] = frozenset()
    kinds: frozenset[type] = frozenset()
    if get_origin(annotation) is not dict:
        for argument in get_args(annotation):
            more_words, more_kinds = _atoms(argument)
            words, kinds = words | more_words, kinds | more_kinds
    return words, kinds
