"""Great Expectations suites from files: limits filled in, each expectation with a sentence that says what it asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import stage_error
from infra.io.yaml import read_plain, read_text

if TYPE_CHECKING:
    from great_expectations.expectations.expectation import Expectation


@dataclass(frozen=True)
class Check:
    """One expectation in the form of Great Expectations' own suite files, with its sentence."""

    type: str
    kwargs: Mapping[str, Any]
    sentence: str

    def expectation(self, number: int) -> Expectation:
        """number: by which its result is known.

        Raises StageError `bad_suite` where Great Expectations has no such expectation or refuses its arguments.
        """
        import great_expectations.expectations as gxe

        found = getattr(gxe, "".join(word.capitalize() for word in self.type.split("_")), None)
        if found is None:
            raise stage_error("bad_suite", self.type, "Great Expectations has no such expectation")
        try:
            made: Expectation = found(**self.kwargs, meta={"number": number})
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise stage_error("bad_suite", self.type, f"Great Expectations rejects its arguments: {reason}") from None
        return made


@dataclass(frozen=True)
class Suite:
    """The checks of one kind of data."""

    name: str
    checks: list[Check]


def read_suite(path: Path, limits: Mapping[str, float], key: str) -> Suite:
    """A suite in YAML or JSON: `name`, `expectations` as Great Expectations writes them, and `limits`, whose names
    stand in arguments as `$name` and in sentences (`meta.sentence`) as `{name}`.

    limits: values that take the place of the file's. key: the config key of the suite, for messages.
    Raises StageError `missing_suite`, `bad_suite`, `unknown_limit`.
    """
    try:
        content = read_plain(read_text(path))
    except OSError as error:
        raise stage_error("missing_suite", str(path), f"cannot be read: {error.strerror}", f"set {key}.suite") from None
    except ValueError as error:
        raise stage_error("bad_suite", str(path), " ".join(str(error).split())) from None
    if not isinstance(content, Mapping) or not isinstance(content.get("expectations"), list):
        raise stage_error("bad_suite", str(path), "expected a mapping with name and a list of expectations")
    known = content.get("limits") or {}
    if not isinstance(known, Mapping):
        raise stage_error("bad_suite", str(path), "expected limits: a mapping of names to numbers")
    if unknown := sorted(set(limits) - set(known)):
        there = ", ".join(known) or "none"
        raise stage_error(
            "unknown_limit", f"{key}.{unknown[0]}", f"the suite {path.name} has no such limit", f"it has: {there}"
        )
    values = {**known, **limits}
    try:
        checks = [_check(item, values) for item in content["expectations"]]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"each expectation needs type, kwargs, and names of existing limits: {error!r}"
        raise stage_error("bad_suite", str(path), message) from None
    return Suite(str(content.get("name", path.stem)), checks)


def _check(item: Mapping[str, Any], limits: Mapping[str, float]) -> Check:
    kwargs = {
        name: limits[value[1:]] if isinstance(value, str) and value.startswith("$") else value
        for name, value in item["kwargs"].items()
    }
    sentence = (item.get("meta") or {}).get("sentence")
    message = sentence.format(**limits) if sentence else f"{item['type'].replace('_', ' ')} ({_listed(kwargs)})"
    return Check(str(item["type"]), kwargs, message)


def _listed(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in kwargs.items())
