"""`stemma adopt`: what was made elsewhere comes in as it is, and is used and checked from then on."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config.graph import graph
from flows.config.read import parse
from infra.errors import ConfigError
from tests.support.programs.command import Answer, write_config

Run = Callable[..., Answer]


@pytest.fixture
def corpus(built_data: Path, tmp_path: Path) -> Path:
    """Cleaned documents in a folder outside of any store."""
    (clean,) = (built_data / "store" / "clean").iterdir()
    shutil.copytree(clean / "documents", tmp_path / "corpus" / "documents")
    return tmp_path / "corpus"


def adopt(run: Run, root: Path, stage: str, folder: Path, *options: str) -> Answer:
    return run("adopt", stage, folder, "--root", root, *options)


def adopting(path: Path, adopted: Answer, **sections: Any) -> Path:
    config = {"name": "adopting", **sections, **yaml.safe_load(adopted.document["config"])}
    return write_config(path, config)


def test_an_adopted_corpus_is_used_and_its_origin_is_known(run: Run, corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    adopted = adopt(run, root, "clean", corpus, "--note", "from the archive")
    assert (adopted.code, adopted.document["new"]) == (0, True)
    config = adopting(
        tmp_path / "config.yaml",
        adopted,
        ingest={"read": [{"kind": "files", "paths": ["not-there.txt"]}]},
        validate=None,
        clean=None,
        tokenizer={"vocab_size": 400},
    )
    answer = run("run", config, "--root", root)
    assert answer.code == 0, answer.document["errors"]
    assert answer.statuses() == {"clean": "reused", "validate_clean": "built", "tokenizer": "built"}

    up = run("lineage", "tokenizer", "--root", root).document
    clean = next(node for node in up["nodes"] if node.get("stage") == "clean")
    assert (clean["adopted"]["from"], clean["adopted"]["note"]) == (str(corpus), "from the archive")
    part = next((corpus / "documents").iterdir())
    down = run("lineage", part, "--down", "--root", root).document
    assert {node.get("stage") for node in down["nodes"]} == {None, "clean", "validate_clean", "tokenizer"}
    assert run("verify", "tokenizer", "--ancestry", "--root", root).code == 0


def test_the_copy_is_independent_of_the_original(run: Run, corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    adopted = adopt(run, root, "clean", corpus)
    next((corpus / "documents").iterdir()).write_bytes(b"other")
    assert run("verify", adopted.document["path"], "--root", root).code == 0


def test_the_same_folder_twice_is_one_artifact(run: Run, corpus: Path, tmp_path: Path) -> None:
    first = adopt(run, tmp_path / "store", "clean", corpus)
    again = adopt(run, tmp_path / "store", "clean", corpus)
    assert again.document["path"] == first.document["path"]
    assert (first.document["new"], again.document["new"]) == (True, False)
    assert not list((tmp_path / "store" / ".work" / "clean").iterdir())


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_or_missing_one_is_never_rebuilt(run: Run, corpus: Path, tmp_path: Path, damage: str) -> None:
    root = tmp_path / "store"
    adopted = adopt(run, root, "clean", corpus)
    config = adopting(tmp_path / "config.yaml", adopted, tokenizer={"vocab_size": 400})
    part = next((Path(adopted.document["path"]) / "documents").iterdir())
    if damage == "flip":
        part.write_bytes(b"x" + part.read_bytes()[1:])
    else:
        shutil.rmtree(adopted.document["path"])
    for command in ("check", "run"):
        answer = run(command, config, "--root", root)
        (error, *_) = answer.document["errors"]
        assert answer.code == 1
        assert error["code"] == ("adopted_missing" if damage == "remove" else "adopted_damaged")
        assert "stemma adopt clean" in error["fix"]

    again = adopt(run, root, "clean", corpus)
    assert (again.document["new"], again.document["path"]) == (True, adopted.document["path"])
    assert run("check", config, "--root", root).statuses() == {"clean": "reuse", "tokenizer": "build"}


def safetensors(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")


def test_a_model_folder_is_adopted_and_pickles_are_refused(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    safetensors(model / "model.safetensors")
    assert adopt(run, tmp_path / "store", "base_model", model).code == 0
    (model / "training_args.bin").write_bytes(b"\x80\x04.")
    refused = adopt(run, tmp_path / "store", "base_model", model)
    assert refused.code == 2
    assert "pickle" in refused.document["errors"][0]["message"]
    assert refused.document["errors"][0]["path"].endswith("training_args.bin")


@pytest.mark.parametrize("stage", ["ingest", "clean", "tokenizer", "shard", "sft", "instructions", "preferences"])
def test_a_folder_of_another_kind_is_refused(run: Run, tmp_path: Path, stage: str) -> None:
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "readme.txt").write_text("nothing of use")
    answer = adopt(run, tmp_path / "store", stage, folder)
    assert answer.code == 2
    assert {error["code"] for error in answer.document["errors"]} == {"not_a_payload"}


def test_a_broken_line_is_named(run: Run, tmp_path: Path) -> None:
    good = json.dumps({"id": "1", "prompt": "p", "response": "r", "source": "s"})
    (tmp_path / "train.jsonl").write_text(f'{good}\n{{"id": "2"}}\n')
    (tmp_path / "heldout.jsonl").write_text(f"{good}\n")
    answer = adopt(run, tmp_path / "store", "instructions", tmp_path)
    assert [error["path"] for error in answer.document["errors"]] == [f"{tmp_path / 'train.jsonl'}:2"]


def test_weights_that_were_cut_short_are_refused(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    safetensors(model / "model.safetensors")
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-2])
    answer = adopt(run, tmp_path / "store", "sft", model)
    assert "cut short" in answer.document["errors"][0]["message"]


DATA = {"ingest": None, "validate": {"clean": None, "shards": None}, "clean": None, "tokenizer": None, "shard": None}
MODEL = {"pretrain": {"model": {"preset": "llama-4m"}, "duration": "10 batches", "global_batch_tokens": 4096}}
ADDRESS = "0123456789abcdef"


@pytest.mark.parametrize(
    ("sections", "adopted", "left"),
    [
        (DATA, [], {"ingest", "validate", "clean", "tokenizer", "shard"}),
        (DATA, ["ingest"], {"ingest", "validate", "clean", "tokenizer", "shard"}),
        (DATA, ["clean"], {"clean", "tokenizer", "shard"}),
        (DATA, ["tokenizer"], {"ingest", "validate", "clean", "tokenizer", "shard"}),
        ({**DATA, **MODEL}, ["shard", "tokenizer"], {"tokenizer", "shard", "pretrain", "measure_pretrain"}),
        (
            {**DATA, **MODEL},
            ["shard"],
            {"ingest", "validate", "clean", "tokenizer", "shard", "pretrain", "measure_pretrain"},
        ),
        (
            {**DATA, **MODEL, "benchmarks": None, "report": None},
            ["pretrain"],
            {"pretrain", "benchmarks_base", "report"},
        ),
        (MODEL, ["shard", "tokenizer"], {"shard", "tokenizer", "pretrain", "measure_pretrain"}),
        ({"benchmarks": None}, ["base_model"], {"base_model", "benchmarks_base"}),
    ],
)
def test_what_only_an_adopted_stage_needed_falls_away(sections: dict, adopted: list[str], left: set[str]) -> None:
    config = parse({"name": "adopting", **sections, "adopted": dict.fromkeys(adopted, ADDRESS)})
    nodes = graph(config)
    assert set(nodes) == left
    for name in adopted:
        assert (nodes[name].adopted, nodes[name].upstream) == (ADDRESS, ())
    seen: set[str] = set()
    for node in nodes.values():
        assert seen.issuperset(node.upstream)
        seen.add(node.id)


@pytest.mark.parametrize(
    ("adopted", "code"),
    [({"clan": ADDRESS}, "unknown_stage"), ({"clean": "12"}, "bad_value"), ({"report": ADDRESS}, "unknown_stage")],
)
def test_a_wrong_address_is_said_before_anything_runs(adopted: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"name": "adopting", "ingest": None, "adopted": adopted})
    assert [problem.code for problem in raised.value.problems] == [code]
    assert raised.value.problems[0].path == f"adopted.{next(iter(adopted))}"
