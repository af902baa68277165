"""Configs: what is accepted, what is refused and how, and the files in configs/."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from corpus.config import IngestConfig
from flows.config import graph as graph_module
from flows.config.pipeline_config import Graph, PipelineConfig
from flows.config.read import dump, load, parse, set_value
from flows.config.schema import schema
from infra.errors import ConfigError
from tests.support.programs.command import REPOSITORY, Answer, write_config

LAUGHS = "a: &a [x]\n" + "".join(f"{y}: &{y} [{f'*{x},' * 20}]\n" for x, y in zip("abcdefg", "bcdefgh", strict=True))
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_every_mistake_is_reported_at_once(run: Callable[..., Answer], tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "five.yaml",
        {
            "name": "five",
            "ingest": {"read": [{"kind": "docstrings", "limt_mb": 3}]},
            "clean": {"min_characters": "many"},
            "tokenizer": {"vocab_size": 7},
            "sft": {"optimizer": {"learning_rte": 0.1, "weight_decay": -1}},
            "launch": {"device": "toaster"},
        },
    )
    answer = run("run", config, "--root", tmp_path / "store")
    errors = {error["path"]: error for error in answer.document["errors"]}

    assert (answer.code, answer.document["status"]) == (2, "invalid")
    assert set(errors) == {
        "clean.min_characters",
        "ingest.read.0.limt_mb",
        "launch.device",
        "sft.optimizer.learning_rte",
        "sft.optimizer.weight_decay",
        "tokenizer.vocab_size",
    }
    assert "limit_mb" in errors["ingest.read.0.limt_mb"]["fix"]
    assert "learning_rate" in errors["sft.optimizer.learning_rte"]["fix"]
    assert "'auto', 'cpu' or 'gpu'" in errors["launch.device"]["message"]
    assert not (tmp_path / "store").exists()


def test_a_config_is_validated_once_and_its_graph_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    build, validate = graph_module._build, PipelineConfig.model_validate

    def counted_build(config: PipelineConfig) -> Graph:
        calls.append("build")
        return build(config)

    def counted_validate(*values: Any, **options: Any) -> PipelineConfig:
        calls.append("validate")
        return validate(*values, **options)

    monkeypatch.setattr(graph_module, "_build", counted_build)
    monkeypatch.setattr(PipelineConfig, "model_validate", counted_validate)
    config = load(
        write_config(tmp_path / "pipeline.yaml", {"name": "once", "ingest": {"read": [{"kind": "docstrings"}]}})
    )
    # As the command does to choose stages, and the flow to run them.
    nodes = [*graph_module.graph(config), *graph_module.graph(config, "stemma run pipeline.yaml")]
    assert nodes == ["ingest", "ingest"] and calls == ["validate", "build"]


@pytest.mark.parametrize(
    ("text", "path", "told"),
    [
        ("name: [", ":1", "not valid YAML"),
        ("name: a\nname: b\n", ":2", "occurs twice"),
        ("name: {{ seed }}\n", ":1", "must be in quotes"),
        ("name: x\nseed: 2020-02-31\n", "seed", "expected"),
        ("name: x\nseed: !!timestamp 2020-02-31\n", ":2", "not valid YAML"),
        ("name: x\nseed: !!int 1:x\n", ":2", "not a number"),
        (f"name: x\nseed: {'9' * 5000}\n", ":2", "larger than 9,223,372,036,854,775,807"),
        (f"name: x\nseed: {2**31}\n", "seed", "less than 2147483648"),
        ("name: x\npreferences: {seed: -1}\n", "preferences.seed", "greater than or equal to 0"),
        ("name: x\ningest: " + "[" * 5000, ":2", "nested more than 100 deep"),
        ("name: &n [*n]\n", "config.yaml:1", "recursive"),
        (LAUGHS, "config.yaml", "values, aliases written out"),
        ('name: "\\ud800"\n', "config.yaml", "surrogate"),
        ("1: x\nname: x\n", "1", "should be strings"),
        ("- a list\n", "config.yaml", "expected a mapping of sections"),
        ("name: My model\n", "name", "expected lower-case letters, digits and . _ -"),
        ("name: x\ningest: {read: [{kind: nope}]}\n", "ingest.read.0.kind", "there is no such kind, got 'nope'"),
        ("name: x\nbenchmarks: {tasks: []}\n", "benchmarks.tasks", "expected at least one"),
        ("name: x\npretrain: {}\n", "pretrain", "needs the section shard"),
        ("name: x\ningest: {}\nsft: {}\n", "sft", "needs a model"),
        ("name: x\n", "", "no stage"),
        ("name: x\nlaunch: {microbatch: 0}\n", "launch.microbatch", "1 or more, or auto"),
        ("name: x\nlaunch: {cluster: hosts, hosts: [a], remote_shell: [ssh]}\n", "launch", "{host} in a word"),
        ("name: x\nlaunch: {cluster: slurm, slurm: {time_limit_h: 0.02}}\n", "launch", "beyond the 90 s"),
        (
            "name: x\nlaunch: {processes: 10, nodes: 3, tensor_parallel: 3, trainer: native, sharding: hsdp}\n",
            "launch",
            "divide 10 ranks, not 3, by default those of a node",
        ),
        (
            "name: x\ningest: {}\ntokenizer: {}\nshard: {sequence_length: 96}\npretrain: {global_batch_tokens: 1000}\n",
            "pretrain.global_batch_tokens",
            "multiple of the sequence length 96",
        ),
        (
            "name: x\ningest: {}\ntokenizer: {heldout_share: 0.1}\nshard: {}\n",
            "tokenizer.heldout_share",
            "or held-out pairs leak",
        ),
    ],
)
def test_a_wrong_file_is_told_with_its_place(tmp_path: Path, text: str, path: str, told: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    matching = [problem for problem in caught.value.problems if told in problem.message]
    assert matching, caught.value
    assert matching[0].path.endswith(path)


def test_a_list_whose_items_are_all_wrong_is_not_called_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write_config(tmp_path / "config.yaml", {"name": "x", "benchmarks": {"tasks": ["no_such_task"]}}))
    assert "benchmarks.tasks.0" in {problem.path for problem in caught.value.problems}
    assert "benchmarks.tasks" not in {problem.path for problem in caught.value.problems}


def test_a_pattern_finds_files_below_a_folder_whose_own_name_has_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "project [v2] *"
    (folder / "books").mkdir(parents=True)
    for name in ("one.txt", "two[1].txt"):
        (folder / "books" / name).write_text("text", encoding="utf8")
    read = [{"kind": "files", "paths": [pattern]} for pattern in ("books/*.txt", "books/two[1].txt", "books")]
    ingest = load(write_config(folder / "config.yaml", {"name": "found", "ingest": {"read": read}})).section("ingest")
    assert isinstance(ingest, IngestConfig)
    found = [[path.name for path in source.paths] for source in ingest.sources()]
    assert found == [["one.txt", "two[1].txt"], ["two[1].txt"], ["one.txt", "two[1].txt"]]


def test_a_setting_changes_its_own_key_and_none_that_an_alias_shares_with_it(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_text(
        "name: aliases\n"
        "ingest:\n  read:\n  - &source {kind: docstrings, packages: [numpy]}\n  - {<<: *source, packages: [scipy]}\n"
        "clean: &clean {gopher_quality: {min_words: 15}}\n"
        "steps: {strict: {uses: clean, inputs: {documents: ingest}, <<: *clean}}\n"
    )
    config = load(path, {"clean.gopher_quality.min_words": "30", "ingest.read.0.packages.0": "torch"})
    assert dump(config)["clean"]["gopher_quality"]["min_words"] == 30
    assert dump(config)["steps"]["strict"]["gopher_quality"]["min_words"] == 15
    assert [one["packages"] for one in dump(config)["ingest"]["read"]] == [["torch"], ["scipy"]]


def test_a_digit_that_numbers_nothing_is_no_place_in_a_list() -> None:
    assert [problem.code for problem in set_value({"read": [1]}, "read.²", "3")] == ["bad_setting"]


def test_samplers_next_to_several_training_processes_are_refused_where_the_step_has_its_config() -> None:
    aligned = {"uses": "rlhf", "inputs": {"model": "base_model", "prompts": "instructions"}, "async": {}}
    aligned |= {"algorithm": "grpo", "answers_per_prompt": 2, "reward_functions": {"json:dumps": 1.0}}
    pipeline = {"name": "x", "base_model": {"path": "/models/tuned"}, "instructions": {}, "steps": {"ahead": aligned}}
    with pytest.raises(ConfigError) as caught:
        parse(pipeline | {"launch": {"processes": 2}})
    (problem,) = [problem for problem in caught.value.problems if "samplers" in problem.message]
    assert problem.path == "steps.ahead.async" and "launch.samplers" in problem.fix
    with pytest.raises(ConfigError) as caught:
        parse(pipeline | {"launch": {"processes": 1}, "steps": {"ahead": aligned | {"refill_groups": 2}}})
    assert any("refill_groups: expected 0 with async" in problem.message for problem in caught.value.problems)


def test_answers_that_leave_no_room_for_prompts_are_told_for_every_stage_at_once() -> None:
    """Of SFT by its own length, of PPO by the positions of the model."""
    sections = {
        "ingest": {}, "tokenizer": {}, "shard": {}, "instructions": {}, "preferences": {}, "reward_model": {},
        "pretrain": {"model": {"preset": "llama-nano", "positions": 64}},
        "sft": {"max_length": 32, "answer_max_tokens": 32},
        "rlhf": {"max_prompt_tokens": 50, "answer_max_tokens": 61},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", **sections})
    told = {problem.path: problem for problem in caught.value.problems if problem.code == "no_room"}
    assert set(told) == {"sft.answer_max_tokens", "rlhf.answer_max_tokens"}
    assert "expected at most 28, not 32" in told["sft.answer_max_tokens"].message
    assert "expected at most 60, not 61" in told["rlhf.answer_max_tokens"].message
    assert "positions" in told["rlhf.answer_max_tokens"].fix


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_is_accepted_and_its_dag_shown(run: Callable[..., Answer], tmp_path: Path, config: Path) -> None:
    answer = run("check", config, "--root", tmp_path / "store")
    assert answer.code == 0, answer.document["errors"]
    rows = answer.rows()
    if config.stem != "corpus":
        text = ["shard"] if dump(load(config))["rlhf"].get("text_coef") else []
        judge = ["judge"] if "judge" in rows else []
        assert rows["rlhf"]["needs"] == ["sft", "reward_model", "instructions", *text, *judge]
    assert {row["status"] for row in rows.values()} == {"build"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_fits_the_committed_schema(config: Path) -> None:
    validator = Draft202012Validator(json.loads(schema()))
    data = {key: value or {} for key, value in yaml.safe_load(config.read_text()).items()}
    assert not list(validator.iter_errors(data))


def test_the_committed_schema_is_todays() -> None:
    assert (REPOSITORY / "configs" / "schema.json").read_text() == schema(), (
        "run: python -m flows.config.schema > configs/schema.json"
    )


@pytest.mark.parametrize("what", ["device", "pipe", "folder", "large file"])
def test_what_is_no_config_file_is_refused_and_never_waited_for(
    run: Callable[..., Answer], tmp_path: Path, what: str
) -> None:
    place = tmp_path / "config.yaml"
    if what == "device":
        place = Path("/dev/zero")
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    else:
        place.touch()
        os.truncate(place, 20_000_000_000)
    answer = run("check", place, "--root", tmp_path / "store")
    (error,) = answer.document["errors"]
    assert (answer.code, error["code"]) == (2, "unreadable_config")
    assert "a file" in error["message"]


LAUNCHERS = (
    "SkyPilotConfig",
    "SlurmConfig",
    "KubernetesConfig",
    "KubernetesRunsConfig",
    "SamplersConfig",
    "VllmConfig",
)
"""Parts of the launch section."""


def test_only_launch_speaks_of_machines_and_sections_are_the_quickstarts() -> None:
    classes = {name: set(found.get("properties", ())) for name, found in json.loads(schema())["$defs"].items()}
    of_launch = classes.pop("LaunchConfig")
    elsewhere = {name: keys & of_launch for name, keys in classes.items() if keys & of_launch and name not in LAUNCHERS}
    # There it says which positions see which, in `launch` by which kernel that is computed.
    assert elsewhere == {"PretrainConfig": {"attention"}, "PretrainStep": {"attention"}}
    machines = re.compile(r"(^|_)(device|gpu|cpu|core|process|node|thread|worker|host|microbatch)(e?s)?(_|$)")
    named = {key for name, keys in classes.items() if name not in LAUNCHERS for key in keys if machines.search(key)}
    # How many processes a user's reward functions bear is a matter of these functions; it is outside of identity.
    assert named == {"reward_processes"}
    sections = [set(dump(load(config))) for config in CONFIGS if config.stem not in ("alternatives", "corpus")]
    more = {"corpus_report", "steps"}
    assert all(section - more == sections[0] - more for section in sections)


def test_the_pipelines_seed_reaches_every_stage_that_draws_and_sets_none() -> None:
    config = parse({"name": "x", "seed": 5, "ingest": {}, "preferences": {}, "instructions": {}})
    assert config.preferences is not None
    assert config.preferences.seed == 5
    kept = parse({"name": "x", "seed": 5, "ingest": {}, "preferences": {"seed": 6}})
    assert kept.preferences is not None
    assert kept.preferences.seed == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "nowhere.yaml"], "no such file"),
        (["run", "CONFIG", "--only", "tokeniser"], "did you mean tokenizer?"),
        (["run", "CONFIG", "--set", "clean.min_characters"], "--set expects KEY=VALUE"),
        (["run", "CONFIG", "--set", "name.first=x"], "the value there has no key first"),
        (["run"], "Missing argument 'CONFIG'"),
        (["lineage", "nothing/0000"], "nothing"),
    ],
)
def test_bad_usage_exits_with_2(
    run: Callable[..., Answer], built_data: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    named = [str(built_data / "config.yaml") if word == "CONFIG" else word for word in arguments]
    answer = run(*named, STEMMA_ROOT=str(tmp_path / "store"))
    assert answer.code == 2
    assert any(told in f"{error['message']} {error['fix']}" for error in answer.document["errors"]), answer.document


def test_what_is_wrong_in_the_file_and_in_what_is_set_is_told_at_once(
    run: Callable[..., Answer], tmp_path: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", {"name": "x", "ingest": {}, "cleen": {}})
    answer = run("check", config, "--set", "name.first=x", "--root", tmp_path / "what?")
    assert answer.code == 2 and {error["path"] for error in answer.document["errors"]} == {"cleen", "--set name.first"}
    answer = run("check", write_config(config, {"name": "x", "ingest": {}}), "--root", tmp_path / "what?")
    assert answer.code == 2 and "end at the question mark" in answer.document["errors"][0]["message"]


def test_a_missing_source_is_named_before_anything_runs(run: Callable[..., Answer], tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "config.yaml", {"name": "x", "ingest": {"read": [{"kind": "files", "paths": ["gone.txt"]}]}}
    )
    for command in ("check", "run"):
        answer = run(command, config, "--root", tmp_path / "store")
        assert answer.code == 1
        (error,) = answer.document["errors"]
        assert (error["code"], error["path"]) == ("missing_source", "ingest.read.0")
        assert str(tmp_path / "gone.txt") in error["message"]


def test_check_names_files_that_no_reader_reads(run: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("A text of some words.\n")
    for name in ("a.pdf", "c.pdf"):
        (tmp_path / "in" / name).write_bytes(b"%PDF-1.7")
    source = {"kind": "files", "paths": ["in"]}
    answers = [
        run("check", write_config(tmp_path / f"{aside}.yaml", content), "--root", tmp_path / "store")
        for aside in ("stop", "quarantine")
        for content in [{"name": "x", "ingest": {"read": [{**source, "broken_files": aside}]}}]
    ]
    assert [(answer.code, [error["code"] for error in answer.document["errors"]]) for answer in answers] == [
        (1, ["unread_format"]),
        (0, []),
    ]
    assert "of 3 files no reader supports 2 PDF files, e.g. " in answers[0].document["errors"][0]["message"]
    assert (
        "ingest.read.0: skipped, because no reader supports these files: 2 PDF files"
        in answers[1].rows()["ingest"]["note"]
    )


def test_all_missing_files_of_an_evaluation_are_told_and_how_a_task_is_mirrored(
    run: Callable[..., Answer], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    safety = {
        "toxicity": {"prompts": "prompts.txt", "scorers": [{"kind": "lexicon", "path": "words.txt"}]},
        "bias": {"pairs": "pairs.csv"},
    }
    benchmarks = {"tasks": ["minimal_pairs", "sciq", "piqa"], "tasks_mirror": "mirror"}
    content = {"name": "x", "base_model": {"path": "model"}, "safety": safety, "benchmarks": benchmarks}
    answer = run("check", write_config(tmp_path / "config.yaml", content), "--root", tmp_path / "store")
    told = {error["path"]: error for error in answer.document["errors"]}
    assert answer.code == 2 and told.keys() == {
        "base_model.path",
        "safety.toxicity.prompts", "safety.toxicity.scorers.0.path", "safety.bias.pairs",
        "benchmarks.tasks.1", "benchmarks.tasks.2",
    }  # fmt: skip
    mirror = tmp_path / "mirror"
    assert str(mirror / "allenai/sciq") in told["benchmarks.tasks.1"]["message"]
    assert told["benchmarks.tasks.2"]["fix"].startswith(f"stemma mirror piqa FROM --mirror {mirror}, where FROM is")
