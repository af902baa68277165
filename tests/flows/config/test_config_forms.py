"""A config has one identity, whatever carried it: its file, JSON on the way to the worker, YAML written out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from annotated_types import Ge, Gt, Interval, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from flows.config.forms import form_values, with_form
from flows.config.graph import Selection, graph
from flows.config.read import PipelineConfig, dump, load, parse
from flows.config.steps import STEP_CLASSES
from flows.deployment.start import RunRequest
from flows.pipeline import pipeline
from flows.stage import FLOWS
from infra.config import Config, normal_default
from infra.fingerprint import canonical, canonical_json, same
from infra.io.yaml import read_plain
from infra.launch.config import LaunchConfig
from tests.support.programs.command import REPOSITORY
from training.config import ModelConfig, PretrainConfig, ScheduleConfig

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))

WORDS = (
    "on",
    "off",
    "yes",
    "no",
    "y",
    "n",
    "true",
    "null",
    "~",
    "12",
    "1e5",
    "1e-5",
    "0x1f",
    "010",
    "1:30",
    "2020-02-31",
)
LENGTHS = ("1 epoch", "0.25 epochs", "2_000 tokens", "3,000tok", "1.5e6 tokens", "7ba", "2.5 %", "0.000012345 %")
TEXTS = (
    *WORDS,
    *LENGTHS,
    "utf-8",
    "latin-1",
    "minimal_pairs",
    "gpt2",
    "gpt-125m",
    "llama-nano",
    "en",
    "a.b",
    "zstd:7",
    "{question}",
    "{text}",
    "http://127.0.0.1:8000/v1",
    "{premise}: {choices.0}",
    "",
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e9, 1e9)
    | st.sampled_from(TEXTS)
    | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The config classes that a type leads to."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from classes(field.annotation)
    for argument in get_args(annotation):
        yield from classes(argument)


# A step has the keys of its stage's config, which is here by itself.
STEPS = {PipelineConfig, *STEP_CLASSES.values()}
EVERY_CLASS = sorted(set(classes(PipelineConfig)) - STEPS, key=lambda cls: cls.__name__)


def whole(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


@cache
def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Plain values that a key of this type takes; most are right, the rest is left out by validation."""
    if get_origin(annotation) is Annotated:
        kind, *facts = get_args(annotation)
        return numbers(kind, facts) if kind in (int, float) else values(kind)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return plain(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0]), max_size=2)
        return st.tuples(*map(values, arguments)).map(list)
    if origin in (dict, Mapping):
        return st.dictionaries(st.text(max_size=5), values(arguments[1]), max_size=2)
    if arguments:
        return st.one_of(*map(values, arguments))
    known = {
        NoneType: st.none(),
        bool: st.booleans(),
        str: st.sampled_from(TEXTS) | st.text(max_size=8),
        int: numbers(int, []),
        float: numbers(float, []),
        Any: JSON_VALUES,
        JsonValue: JSON_VALUES,
    }
    return known[annotation]


def numbers(kind: type, facts: list[Any]) -> st.SearchStrategy[Any]:
    low, high = -1e9, 1e9
    for fact in facts:
        for bound in fact if isinstance(fact, Interval) else getattr(fact, "metadata", [fact]):
            low = bound.ge if isinstance(bound, Ge) else bound.gt if isinstance(bound, Gt) else low
            high = bound.le if isinstance(bound, Le) else bound.lt if isinstance(bound, Lt) else high
    if kind is int:
        return st.integers(int(low), min(int(high), int(low) + 10**7))
    return st.floats(low, high) | st.sampled_from([0.5, 0.95, 1, 1.0, 2, 1e-5, "1e-5"])


def is_right(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def plain(cls: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """A section as plain data: what must be given, and up to three other keys."""

    @st.composite
    def section(draw: st.DrawFn) -> dict[str, Any]:
        optional = [name for name, field in cls.model_fields.items() if not field.is_required()]
        chosen = draw(st.lists(st.sampled_from(optional), max_size=3, unique=True)) if optional else []
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        given = {}
        for name in (*required, *chosen):
            field = cls.model_fields[name]
            adapter = TypeAdapter(whole(field))
            pattern = next((fact.pattern for fact in field.metadata if getattr(fact, "pattern", None)), None)
            strategy = st.from_regex(pattern, fullmatch=True) if pattern else values(whole(field))
            if field.annotation is str and not pattern:  # few texts pass a check of the field's own
                strategy |= st.sampled_from([text for text in TEXTS if is_right(adapter, text)])
            given[field.alias or name] = draw(strategy.filter(lambda value, adapter=adapter: is_right(adapter, value)))
        return given

    return section()


def carried(data: Any) -> Any:
    """Plain data through JSON, as the worker gets it, and through YAML, as somebody would write it down."""
    return read_plain(yaml.safe_dump(json.loads(json.dumps(data))))


@pytest.mark.parametrize("cls", EVERY_CLASS, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_section_keeps_its_identity_through_json_and_yaml(cls: type[Config], data: st.DataObject) -> None:
    written = data.draw(plain(cls))
    try:
        config = cls.model_validate(written)
    except ValidationError:
        return  # right one by one, wrong together
    again = cls.model_validate(carried(config.model_dump(mode="json", by_alias=True)))
    assert again == config
    assert canonical_json(again) == canonical_json(config)
    # JavaScript, in which the page is written, knows one kind of number.
    from_page = cls.model_validate(_as_javascript(config.model_dump(mode="json", by_alias=True)))
    assert same(canonical(from_page), canonical(config))


def _as_javascript(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _as_javascript(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_as_javascript(item) for item in data]
    return int(data) if isinstance(data, float) and data.is_integer() and abs(data) < 2**53 else data


@pytest.mark.parametrize("cls", EVERY_CLASS, ids=lambda cls: cls.__name__)
def test_a_default_is_no_part_of_the_identity_however_it_is_spelled(cls: type[Config]) -> None:
    for name, field in cls.model_fields.items():
        if field.is_required():
            continue
        default = normal_default(cls, name)
        assert TypeAdapter(whole(field)).validate_python(default) == default
        try:
            left_out = cls()
        except ValidationError:
            continue  # it has required keys
        assert getattr(left_out, name) == default
        assert canonical(cls.model_validate({field.alias or name: carried(_json(default))})) == canonical(left_out)


def _json(value: Any) -> Any:
    return TypeAdapter(Any).dump_python(value, mode="json")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_shipped_config_is_the_same_on_the_worker(path: Path, tmp_path: Path) -> None:
    here = load(path)
    request = RunRequest(here, Selection(), tmp_path, False, str(path))
    sent = json.loads(json.dumps(request.parameters("a run")))
    on_worker = pipeline.validate_parameters(sent)["config"]
    for there in (on_worker, parse(carried(dump(here))), PipelineConfig.model_validate(_as_javascript(dump(here)))):
        assert there == here
        assert {name: canonical_json(node.config) for name, node in graph(there).items()} == {
            name: canonical_json(node.config) for name, node in graph(here).items()
        }


SWITCHES = {"on": (True, "on", "ON", "yes", "true"), "off": (False, "off", "Off", "no", "false")}


def literals(annotation: Any) -> set[Any]:
    found = set(get_args(annotation)) if get_origin(annotation) is Literal else set()
    return found.union(*(literals(argument) for argument in get_args(annotation)))


def test_every_key_that_may_be_on_or_off_takes_what_yaml_and_json_make_of_these_words() -> None:
    words = {"on", "off", "yes", "no", "true", "false", "y", "n"}
    found = {
        (cls, name): chosen
        for cls in EVERY_CLASS
        for name, field in cls.model_fields.items()
        if (chosen := words & {str(word).lower() for word in literals(field.annotation)})
    }
    expected = {(LaunchConfig, name): {"on", "off"} for name in ("compile", "share_prompts")}
    assert found == expected, "add the words of a new key to SWITCHES"
    for (cls, name), chosen in found.items():
        for word in chosen:
            for written in SWITCHES[word]:
                assert getattr(cls(**{name: written}), name) == word
                assert getattr(cls(**read_plain(f"{name}: {written}")), name) == word
    with pytest.raises(ValidationError, match="'auto', 'on' or 'off'"):
        LaunchConfig(device="auto", compile="maybe")  # type: ignore[arg-type]


class Traps(Config):
    """Keys that YAML 1.1 reads otherwise than people mean them."""

    country: str = ""
    at: str = ""
    batch_tokens: int = 1
    rate: float = 0.1
    enabled: bool = False
    sides: tuple[Literal["on", "off"], ...] = ()
    mixed: int | Literal["auto", "yes"] = "auto"
    either: bool | Literal["yes"] = False


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("country: no", "no"),
        ("country: 1e5", "1e5"),
        ("at: 12:30:00", "12:30:00"),
        ("at: 2020-02-31", "2020-02-31"),
        ("batch_tokens: 5e5", 500_000),
        ("batch_tokens: 1.5e3", 1500),
        ("batch_tokens: 0x10", 16),
        ("batch_tokens: 010", 10),
        ("batch_tokens: 2_000", 2000),
        ("rate: 1e-5", 1e-5),
        ("rate: 3E5", 3e5),
        ("enabled: yes", True),
        ("enabled: off", False),
        ("sides: [on, off, true]", ("on", "off", "on")),
        ("mixed: true", "yes"),
        ("mixed: 1e3", 1000),
        ("either: true", True),
        ("either: on", True),
    ],
)
def test_a_key_takes_words_and_numbers_as_they_are_meant(text: str, value: Any) -> None:
    config = Traps.model_validate(read_plain(text))
    found = getattr(config, text.partition(":")[0])
    assert found == value
    assert type(found) is type(value)


def test_a_transformers_config_has_plain_values_however_they_are_written() -> None:
    written = "{model_type: llama, rms_norm_eps: 1e-5, tie_word_embeddings: yes, id2label: {0: a}}"
    config = ModelConfig.model_validate(read_plain(f"transformers: {written}"))
    assert config.transformers == {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "id2label": {"0": "a"},
    }
    with pytest.raises(ValidationError, match="finite"):
        ModelConfig.model_validate(read_plain("transformers: {model_type: llama, rope_theta: .inf}"))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"duration": 1000}, "expected a unit after the number, such as '1000 batches' or '1000 tokens', not 1000"),
        ({"duration": 0}, "expected more than 0"),
        ({"schedule": {"warmup": 0.03}}, "expected a unit after the number"),
        ({"optimizer": {"learning_rate": float("inf")}}, "finite number"),
    ],
)
def test_a_length_without_a_unit_and_an_endless_number_are_told(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        PretrainConfig.model_validate(section)


def test_no_warm_up_needs_no_unit() -> None:
    assert ScheduleConfig.model_validate({"warmup": 0}).warmup == "0 batches"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * path.stem.startswith("gpt-")) for path in CONFIGS],
)
def test_a_form_that_is_submitted_as_it_was_filled_is_the_config(path: Path) -> None:
    here = load(path)
    values = form_values(here)
    form = parameter_schema(with_form(pipeline, here, "x")).model_dump(exclude_unset=True)
    for told in (values, dump(here)):  # what the page sends, and what a command sends
        validate({"config": told}, form, raise_on_error=True)
    assert PipelineConfig.model_validate(values) == here


def test_the_form_of_a_stage_has_what_the_file_sets_first_and_the_guard_folded() -> None:
    set_here = {"duration": "20 batches", "optimizer": {"learning_rate": 0.01}}
    config = PretrainConfig.model_validate(set_here)
    form = parameter_schema(with_form(FLOWS["pretrain"], config, "x")).properties["config"]
    order = sorted(form["properties"], key=lambda key: form["properties"][key]["position"])
    assert order[:2] == ["duration", "optimizer"]
    assert order.index("objective") < order.index("evaluate_every") < order.index("guard")
    values = form_values(config)
    assert values["guard"] is None and values["optimizer"]["learning_rate"] == 0.01
    # Opened, a folded group has the values that held while it was folded.
    opened = form["properties"]["guard"]["anyOf"][1]["properties"]
    guard = {key: one["default"] for key, one in opened.items()}
    assert PretrainConfig.model_validate({**values, "guard": guard}) == config
    watched = PretrainConfig.model_validate({"guard": {"window": 50}})
    assert form_values(watched)["guard"]["window"] == 50
