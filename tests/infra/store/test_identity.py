"""What an artifact's name depends on, and what it must not depend on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from flows.config.read import parse
from infra.config import StageConfig, in_identity, outside_identity
from infra.fingerprint import NoStableForm, canonical, canonical_json, changed_settings, digest_files, fingerprint
from infra.io.sources import SourcePath
from tests.infra.store.pin import PINNED, current

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
names = st.text("abcdefghij/.", min_size=1).filter(lambda name: "//" not in name and not name.endswith("/"))


def shuffled(value: Any, draw: Any) -> Any:
    """The same value, its mappings in another order."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: shuffled(value[key], draw) for key in keys}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


def name(config: Any, **changes: Any) -> str:
    return fingerprint(**{"stage": "sft", "version": 1, "config": config, "inputs": {}, "sources": {}} | changes)


@given(st.dictionaries(st.text(), values, max_size=5), st.data())
def test_key_order_does_not_matter(config: dict[str, Any], data: st.DataObject) -> None:
    assert name(shuffled(config, data.draw)) == name(config)


@given(values)
def test_the_canonical_text_reads_back_as_the_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value
    assert canonical_json(value).isascii()


@given(values, values)
def test_different_values_have_different_texts(one: Any, other: Any) -> None:
    assert (canonical_json(one) == canonical_json(other)) == (repr_of(one) == repr_of(other))


def repr_of(value: Any) -> Any:
    """Equality that tells 1, 1.0 and True, and 0.0 and -0.0, apart."""
    if isinstance(value, dict):
        return ("map", {key: repr_of(item) for key, item in value.items()})
    if isinstance(value, list):
        return ("list", [repr_of(item) for item in value])
    return (type(value).__name__, repr(value))


unstable = st.sampled_from(
    [
        {1, 2},
        frozenset({1}),
        b"bytes",
        float("nan"),
        float("inf"),
        float("-inf"),
        object(),
        len,
        lambda: 1,
        Path("/data"),
        datetime(2026, 1, 1, tzinfo=UTC),
        1j,
        {1: "a number for a key"},
        range(3),
    ]
)


@given(unstable, st.integers(0, 3))
def test_what_has_no_stable_form_is_refused_however_deep_it_lies(value: Any, depth: int) -> None:
    for _ in range(depth):
        value = {"inner": [1, value]}
    with pytest.raises(NoStableForm, match="sft"):
        canonical(value, "sft")


class Settings(StageConfig):
    rate: float = 0.001
    layers: tuple[int, ...] = (2, 3)
    name: str = "a"
    workers: int = outside_identity(1)
    data: SourcePath = ""
    more: SourcePath | None = None


class SettingsWithANewOption(Settings):
    dropout: float = 0.0


@given(st.floats(0, 1), st.lists(st.integers(), max_size=3), st.text(max_size=5))
def test_a_new_option_at_its_default_moves_nothing(rate: float, layers: list[int], text: str) -> None:
    given = {"rate": rate, "layers": layers, "name": text}
    assert name(SettingsWithANewOption(**given)) == name(Settings(**given))


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_key_bears_on_the_name_if_and_only_if_its_value_differs(one: float, other: float) -> None:
    assert (name(Settings(rate=one)) == name(Settings(rate=other))) == (one == other)


paths = st.text(max_size=9).filter(lambda path: not path.startswith("~"))


@given(st.integers(1, 64), paths, paths)
def test_where_and_from_which_path_it_runs_does_not_matter(workers: int, path: str, more: str) -> None:
    assert name(Settings(workers=workers, data=path, more=more)) == name(Settings())


def test_the_home_of_nobody_is_an_error_of_the_config() -> None:
    with pytest.raises(ValidationError, match="there is no user '~nobody-here'"):
        Settings(data="~nobody-here/a.txt")


def test_spelling_a_default_out_moves_nothing() -> None:
    assert name(Settings(rate=1e-3, layers=[2, 3], name="a")) == name(Settings())


@given(st.dictionaries(names, hashes, min_size=1, max_size=4), st.data())
def test_a_digest_takes_files_in_any_order_and_notices_each_of_them(files: dict[str, str], data: st.DataObject) -> None:
    pairs = list(files.items())
    assert digest_files(data.draw(st.permutations(pairs))) == digest_files(pairs)
    path, sha = pairs[0]
    other = "0" * 64 if sha != "0" * 64 else "1" * 64
    assert digest_files([(path, other), *pairs[1:]]) != digest_files(pairs)
    assert digest_files([(f"{path}x", sha), *pairs[1:]]) != digest_files(pairs)
    assert digest_files(pairs[1:]) != digest_files(pairs)


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "rlhf"},
        {"version": 2},
        {"inputs": {"model": "a"}},
        {"sources": {"model": "a"}},
    ],
)
def test_stage_version_inputs_and_sources_bear_on_the_name(change: dict[str, Any]) -> None:
    assert name({}, **change) != name({})


def test_an_input_and_a_source_of_one_name_are_told_apart() -> None:
    assert name({}, inputs={"a": "1"}) != name({}, sources={"a": "1"})


def test_yesterdays_names_and_defaults_stand() -> None:
    """Defaults are left out of names, so a default that changes would give old artifacts a new meaning in silence.

    Where the change is meant: raise the version of the stages that it touches, then `python -m tests.infra.store.pin`.
    A new key is pinned the same way, and needs no version where its default means what was done before.
    """
    pinned, today = json.loads(PINNED.read_text()), current()
    assert today["names"] == pinned["names"]
    assert today["versions"] == pinned["versions"]
    assert today["defaults"] == pinned["defaults"]


def test_the_same_config_in_other_words_has_the_same_names() -> None:
    one = parse({"name": "a", "ingest": {"read": [{"kind": "docstrings", "packages": ["numpy"]}]}, "clean": None})
    other = parse(
        {
            "clean": {"min_characters": CleanConfig().min_characters},
            "launch": {},
            "ingest": IngestConfig.model_validate(
                {"read": [{"packages": ["numpy"], "kind": "docstrings"}]}
            ).model_dump(),
            "name": "b",
        }
    )
    for stage in ("ingest", "clean"):
        assert name(one.section(stage)) == name(other.section(stage))


def test_a_section_that_is_there_with_its_defaults_differs_from_none() -> None:
    """`clean.toxicity: {}` turns a rule on: `check` and `compare` told no difference."""
    with_rule, without = {"toxicity": {"threshold": 0.5}}, {"toxicity": None}
    assert list(changed_settings({}, without, {"toxicity": {}}, with_rule)) == [("toxicity", None, {})]
    assert list(changed_settings({"toxicity": {}}, with_rule, {}, without)) == [("toxicity", {}, None)]
    stricter = {"toxicity": {"threshold": 0.3}}
    assert list(changed_settings({"toxicity": {}}, with_rule, stricter, stricter)) == [("toxicity.threshold", 0.5, 0.3)]
    assert not list(changed_settings({"toxicity": {}}, with_rule, {"toxicity": {}}, with_rule))


class Adapters(StageConfig):
    rank: int = 4
    tokens: str = in_identity("untrained")


class Tuning(StageConfig):
    rate: float = 0.001
    adapters: Adapters | None = None


def test_a_key_that_is_always_named_moves_only_configs_with_its_section() -> None:
    assert canonical(Tuning()) == {}
    assert canonical(Tuning(adapters=Adapters())) == {"adapters": {"tokens": "untrained"}}
