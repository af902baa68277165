"""Lengths of training that say their unit: `300 batches`, `2_000_000 tokens`, `3 epochs`, `1 %`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

Unit = Literal["batches", "tokens", "epochs", "percent"]

_UNITS: dict[str, Unit] = {
    "batches": "batches",
    "batch": "batches",
    "ba": "batches",
    "tokens": "tokens",
    "token": "tokens",
    "tok": "tokens",
    "epochs": "epochs",
    "epoch": "epochs",
    "ep": "epochs",
    "percent": "percent",
    "%": "percent",
}
# A comma parts thousands alone: 1,5 epochs are not 15.
_PATTERN = re.compile(r"(?P<number>(\d{1,3}(,\d{3})+|\d[\d_]*)(\.\d+)?(e[+-]?\d{1,3})?)\s*(?P<unit>[a-z%]+)")


@dataclass(frozen=True)
class Duration:
    """A length of training: a number of batches, tokens or epochs, or a percentage of a longer length."""

    value: float
    unit: Unit

    def __str__(self) -> str:
        """Six digits of a fraction, never an exponent; the text parses back to the same value."""
        shown = self.value if self.value.is_integer() else float(f"{self.value:g}")
        number = str(int(shown)) if shown.is_integer() else f"{Decimal(repr(shown)):f}"
        return f"{number} %" if self.unit == "percent" else f"{number} {self.unit}"

    @property
    def exact(self) -> Fraction:
        """The value as written: 7 % of 100 batches are 7, not 7.000000000000001 as in floats."""
        return Fraction(repr(self.value))

    def batches(self, *, batch_tokens: int, epoch_batches: int, whole: int = 0) -> int:
        """The same length in batches, rounded up; `whole` is what a percentage is taken of."""
        match self.unit:
            case "batches":
                return int(self.value)
            case "tokens":
                return math.ceil(self.value / batch_tokens)
            case "epochs":
                return math.ceil(self.exact * epoch_batches)
            case "percent":
                return math.ceil(self.exact / 100 * whole)


def parse_duration(text: str) -> Duration:
    """Read `300 batches`, `300ba`, `2_000_000 tokens`, `2.5e9 tokens`, `1 epoch`, `1ep`, `1 %`; raise ValueError."""
    match = _PATTERN.fullmatch(text.strip().lower())
    unit = _UNITS.get(match["unit"]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"expected a number and a unit, such as '300 batches', '2_000_000 tokens' or '1 epoch', not {text!r}"
        )
    value = float(match["number"].replace("_", "").replace(",", ""))
    if not math.isfinite(value):
        raise ValueError(f"expected a finite length, not {text!r}")
    if unit in ("batches", "tokens") and value != int(value):
        raise ValueError(f"expected a whole number of {unit}, not {text!r}")
    return Duration(value, unit)


def _length(text: str) -> str:
    duration = parse_duration(text)
    if duration.unit == "percent":
        raise ValueError("expected batches, tokens or epochs, not a percentage")
    if duration.value <= 0:
        raise ValueError("expected more than 0")
    return str(duration)


def _distance(text: str) -> str:
    duration = parse_duration(text)
    if duration.value <= 0:
        raise ValueError("expected more than 0; 100 % is once, at the end")
    return str(duration)


def _with_unit(value: Any) -> Any:
    """Refuse a number without a unit, which YAML does not give as text; 0 is the same in every unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if value == 0:
        return "0 batches"
    raise ValueError(f"expected a unit after the number, such as '{value} batches' or '{value} tokens', not {value}")


# Kept as text so that YAML, JSON schema and forms show what a person writes; two spellings have one identity.
Length = Annotated[str, BeforeValidator(_with_unit), AfterValidator(_length)]
LengthOrShare = Annotated[str, BeforeValidator(_with_unit), AfterValidator(lambda text: str(parse_duration(text)))]
Distance = Annotated[str, BeforeValidator(_with_unit), AfterValidator(_distance)]
"""An interval: a length, or a percentage of the total; never 0."""
