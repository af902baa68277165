"""Configs over configs, and environment variables in paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from cli.commands import stemma
from flows.config.graph import graph
from flows.config.read import PipelineConfig, dump, load, parse
from flows.config.schema import schema
from flows.planning.plan import plan
from flows.sweeps.definition import Wishes, define
from flows.sweeps.space import read_space
from infra.errors import ConfigError
from infra.io.sources import expand
from infra.store.store import Store
from tasks.building.explain import identity_of
from tests.support.programs.command import REPOSITORY, write_config

TRAINED: dict[str, Any] = {
    "name": "base",
    "ingest": {"read": [{"kind": "files", "paths": ["text/*.txt"]}, {"kind": "files", "paths": ["more.jsonl"]}]},
    "clean": {"min_characters": 20},
    "tokenizer": {"vocab_size": 400},
    "shard": {"sequence_length": 64},
    "pretrain": {"model": {"preset": "llama-4m"}, "duration": "4 batches", "global_batch_tokens": 512},
    "steps": {
        "longer": {"continues": {"step": "pretrain"}, "duration": "9 batches"},
        "judged": {"uses": "benchmarks", "inputs": {"model": "pretrain"}, "tasks": ["cloze"], "seed": 3},
    },
}


def files(folder: Path, **contents: dict[str, Any]) -> Path:
    """Config files by name; returns that of `config`."""
    for name, content in contents.items():
        target = folder / f"{name.replace('__', '/')}.yaml"
        target.parent.mkdir(exist_ok=True)
        target.write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def refused(config: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(config)
    return [str(problem) for problem in error.value.problems]


def typed(*words: str | Path) -> Result:
    return CliRunner().invoke(stemma, [str(word) for word in words])


def test_a_config_over_another_is_the_config_written_whole(tmp_path: Path) -> None:
    """Mappings are merged, all else is replaced, and paths are relative to the file that has them."""
    for folder, content in (("shared/text", "a"), ("shared", "{}"), (".", "{}")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / ("a.txt" if folder.endswith("text") else "more.jsonl")).write_text(content)
    middle = {
        "extends": "base.yaml",
        "pretrain": {"duration": "6 batches"},
        "steps": {"judged": {"uses": "safety", "inputs": {"model": "longer"}}},
    }
    config = files(
        tmp_path,
        shared__base=TRAINED,
        shared__middle=middle,
        config={
            "extends": {"config": "shared/middle.yaml", "without": ["clean.min_characters", "pretrain.model"]},
            "name": "mine",
            "tokenizer": None,
            "pretrain": {"model": {"preset": "qwen3-4m"}, "optimizer": {"learning_rate": 0.01}},
        },
    )
    expected_data = {
        **TRAINED,
        "name": "mine",
        "clean": {},
        "tokenizer": {},
        "pretrain": {
            "model": {"preset": "qwen3-4m"},
            "duration": "6 batches",
            "global_batch_tokens": 512,
            "optimizer": {"learning_rate": 0.01},
        },
        "steps": {**TRAINED["steps"], "judged": {"uses": "safety", "inputs": {"model": "longer"}}},
    }
    written = tmp_path / "shared" / "whole.yaml"
    written.write_text(yaml.safe_dump(expected_data))
    assert dump(load(config)) == dump(load(written))
    nodes, expected = graph(load(config)), graph(load(written))
    assert {name: identity_of(node) for name, node in nodes.items()} == {
        name: identity_of(node) for name, node in expected.items()
    }
    store = Store(tmp_path / "store")
    fingerprints = [plan(some, store)["ingest"].fingerprint for some in (nodes, expected)]
    assert fingerprints[0] and fingerprints[0] == fingerprints[1]
    shown = typed("config", config)
    assert shown.exit_code == 0 and shown.stdout.startswith(f"# {config} over {tmp_path}/shared/middle.yaml over ")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shown.yaml").write_text(shown.stdout)
    assert dump(load(tmp_path / "elsewhere" / "shown.yaml")) == dump(load(written))
    sweep = define(Wishes(config, {}, read_space(["pretrain.optimizer.learning_rate=1e-3,2e-3"]), {}))
    assert [arm.settings for arm in sweep.arms] == [{"pretrain.optimizer.learning_rate": rate} for rate in (1e-3, 2e-3)]


@pytest.mark.parametrize("name", ["alternatives"])
def test_the_config_that_is_printed_reads_back_as_the_config(name: str, tmp_path: Path) -> None:
    config = REPOSITORY / "configs" / f"{name}.yaml"
    for options in ([], ["--defaults"]):
        (tmp_path / "whole.yaml").write_text(typed("config", config, *options).stdout)
        assert dump(load(tmp_path / "whole.yaml")) == dump(load(config))
    document = json.loads(typed("config", config, "--json").stdout)
    assert isinstance(parse(document["config"]), PipelineConfig) and document["files"] == [str(config)]


def test_errors_name_the_file_that_has_the_key(tmp_path: Path) -> None:
    base = {**TRAINED, "tokenizer": {"vocab_size": 7}, "clean": {"min_charcters": 3}}
    base["ingest"] = {"read": [{"kind": "files", "paths": ["a"], "limit": "some"}]}
    base["steps"] = {"judged": {"uses": "benchmarks", "inputs": {"model": "pretrain"}, "seed": -1}}
    config = files(tmp_path, base=base, config={"extends": "base.yaml", "pretrain": {"duration": "3 apples"}})
    messages = dict(line.split(": ", 1) for line in refused(config))
    assert "the key is in" in messages["pretrain.duration"] and "config.yaml" in messages["pretrain.duration"]
    others = {key: text for key, text in messages.items() if key != "pretrain.duration"}
    assert {"tokenizer.vocab_size", "clean.min_charcters"} < others.keys() and len(others) == 4
    assert all(f"the key is in {tmp_path / 'base.yaml'}" in text for text in others.values()), others
    set_here = typed("check", config, "--set", "tokenizer.vocab_size=8", "--root", tmp_path / "store").stderr
    (line,) = [line for line in set_here.splitlines() if "vocab_size" in line]
    assert "the key is in" not in line


def test_bases_that_cannot_be_read_are_refused_plainly(tmp_path: Path) -> None:
    config = files(tmp_path, config={"extends": "a.yaml"}, a={"extends": "b.yaml"}, b={"extends": "./a.yaml"})
    assert "b.yaml: extends: the files extend each other: " in refused(config)[0]
    config = files(tmp_path, config={"extends": "gone.yaml", "name": "x"})
    assert f"extends: there is no file {tmp_path / 'gone.yaml'}" in refused(config)[0]
    config = files(tmp_path, config={"extends": ["a.yaml"]})
    assert "expected the path of a config, or {config: PATH" in refused(config)[0]
    config = files(tmp_path, b={"name": "x"}, config={"extends": {"config": "b.yaml", "without": ["safety"]}})
    assert "without safety: the base has no such key" in refused(config)[0]
    (tmp_path / "b.yaml").write_text("name: [")
    assert f"{tmp_path / 'b.yaml'}:1: not valid YAML" in refused(config)[0]


def test_variables_stand_in_paths_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS", str(tmp_path / "a [b]"))
    monkeypatch.setenv("BUCKET", "texts")
    (tmp_path / "a [b]").mkdir()
    (tmp_path / "a [b]" / "x.txt").write_text("text")
    paths = ["${CORPUS}/*.txt", "${CORPUS}", "s3://${BUCKET}/x"]
    data = {"name": "x", "description": "costs ${BUCKET}", "ingest": {"read": [{"kind": "files", "paths": paths}]}}
    config = load(write_config(tmp_path / "config.yaml", data))
    pattern, *others = dump(config)["ingest"]["read"][0]["paths"]
    assert others == [str(tmp_path / "a [b]"), "s3://texts/x"] and config.description == "costs ${BUCKET}"
    assert expand([pattern]) == (tmp_path / "a [b]" / "x.txt",)
    monkeypatch.delenv("CORPUS")
    assert "ingest.read.0.paths.0: the environment variable CORPUS is not set" in refused(tmp_path / "config.yaml")[0]
    data["pretrain"] = {"duration": "${STEPS} batches"}
    del data["ingest"]
    monkeypatch.setenv("STEPS", "3")
    (problem,) = [line for line in refused(write_config(tmp_path / "config.yaml", data)) if "duration" in line]
    assert "'${STEPS} batches'" in problem


def test_editors_accept_a_config_that_extends_another() -> None:
    validator = Draft202012Validator(json.loads(schema()))
    assert validator.is_valid({"extends": "base.yaml"}) and validator.is_valid({"name": "x"})
    assert validator.is_valid({"extends": {"config": "base.yaml", "without": ["sft"]}})
    assert not validator.is_valid({"seed": 3}) and not validator.is_valid({"extends": {"without": ["sft"]}})
