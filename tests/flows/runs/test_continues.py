"""A named step goes on with the training of another: what it takes over, what it is called, what gc leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config.graph import graph
from flows.config.read import dump, parse
from flows.planning.branches import branch_notes
from flows.planning.plan import PlannedStage
from infra.errors import ConfigError
from tests.support.programs.command import Answer, write_config

Run = Callable[..., Answer]

PRETRAIN: dict[str, Any] = {
    "model": {"preset": "llama-nano"},
    "duration": "12 batches",
    "global_batch_tokens": 512,
    "optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0},
    "schedule": {"decay": "constant"},
    "keep_state": {"every": "8 batches"},
}
SECTIONS: dict[str, Any] = {
    "ingest": {"read": [{"kind": "docstrings", "packages": ["numpy"], "limit_mb": 0.3}]},
    "tokenizer": {"vocab_size": 400},
    "shard": {"sequence_length": 64},
    "pretrain": PRETRAIN,
}
LONGER: dict[str, Any] = {"continues": {"step": "pretrain", "at": "8 batches"}, "duration": "16 batches"}


def test_a_step_takes_over_what_it_does_not_set() -> None:
    steps = {
        "longer": {**LONGER, "optimizer": {"learning_rate": 2.0e-3}},
        "longest": {"continues": {"step": "longer"}, "duration": "20 batches"},
    }
    config = parse({"name": "x", **SECTIONS, "steps": steps})
    nodes = graph(config)
    longer, longest = nodes["longer"], nodes["longest"]
    assert longer.stage is longest.stage is nodes["pretrain"].stage
    assert longer.inputs == {"shards": "shard", "tokenizer": "tokenizer", "state": "pretrain"}
    assert longest.inputs == {**longer.inputs, "state": "longer"}
    before, after, last = (nodes[name].config.model_dump() for name in ("pretrain", "longer", "longest"))
    assert {key for key in before if before[key] != after[key]} == {"optimizer", "duration", "continues"}
    assert after["optimizer"] == {**before["optimizer"], "learning_rate": 2.0e-3} == last["optimizer"]
    again = parse(dump(config))
    assert again == config and graph(again) == nodes


@pytest.mark.parametrize(
    ("first", "step", "said"),
    [
        ({}, {}, "after batch 8 of pretrain the learning rate does not jump: 0.001, then 0.001"),
        ({}, {"optimizer": {"learning_rate": 2.0e-3}}, "jumps from 0.001 to 0.002, 2 times as high"),
        # At its end a cosine is close to a tenth; one that is twice as long is at its middle there.
        (
            {"schedule": {"decay": "cosine", "warmup": "1 batches"}, "duration": "101 batches"},
            {"continues": {"step": "pretrain"}, "duration": "201 batches"},
            "after batch 101 of pretrain the learning rate jumps from 0.0001002 to 0.00055, 5.49 times as high",
        ),
        # A branch of wsd begins on the plateau, and so does a constant rate.
        ({}, {"schedule": {"decay": "wsd", "decay_length": "4 batches"}}, "does not jump: 0.001, then 0.001"),
        ({"duration": "1 epochs"}, {"continues": {"step": "pretrain"}}, "is known once pretrain is built"),
        ({"duration": "6_144 tokens"}, {"continues": {"step": "pretrain"}}, "after batch 12 of pretrain"),
    ],
)
def test_check_says_whether_the_learning_rate_jumps(
    first: dict[str, Any], step: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = parse(
        {"name": "x", **SECTIONS, "pretrain": {**PRETRAIN, **first}, "steps": {"longer": {**LONGER, **step}}}
    )
    nodes = graph(config)
    notes = branch_notes(nodes, {name: PlannedStage(node, "build") for name, node in nodes.items()})
    assert set(notes) == {"longer"} and notes["longer"].startswith("longer: ") and said in notes["longer"]
    assert "another order" not in notes["longer"]


def test_check_says_where_the_rest_of_an_epoch_comes_in_another_order() -> None:
    tuned: dict[str, Any] = {"instructions": {}, "sft": {"global_batch_examples": 8}}
    steps: dict[str, Any] = {
        "larger": {**LONGER, "global_batch_tokens": 1024, "shuffle_block": 1000, "seed": 4},
        "elsewhere": {**LONGER, "shuffle_block": 1000, "inputs": {"shards": "more"}},
        "more": {"uses": "shard", "sequence_length": 64, "inputs": {"documents": "ingest", "tokenizer": "tokenizer"}},
        "tuned": {"uses": "sft", "continues": {"step": "sft"}, "duration": "2 epochs", "seed": 4},
    }
    nodes = graph(parse({"name": "x", **SECTIONS, **tuned, "steps": steps}))
    notes = branch_notes(nodes, {name: PlannedStage(node, "build") for name, node in nodes.items()})
    told = "the rest of the epoch is read in a different order"
    assert f"larger: shuffle_block and global_batch_tokens are not as in pretrain: {told}" in notes["larger"]
    assert f"tuned: seed is not as in sft: {told}" in notes["tuned"]
    assert told not in notes["elsewhere"]


def test_what_cannot_go_on_is_said_at_once_with_the_nearest_right_name() -> None:
    steps: dict[str, Any] = {
        "lost": {"uses": "pretrain", "continues": {"step": "pretrian"}},
        "other": {"uses": "sft", "continues": {"step": "pretrain"}},
        "loop": {"uses": "pretrain", "continues": {"step": "pool"}},
        "pool": {"uses": "pretrain", "continues": {"step": "loop"}},
    }
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", **SECTIONS, "steps": steps})
    told = {problem.path: (problem.code, problem.fix) for problem in caught.value.problems}
    assert told["steps.lost.continues.step"] == ("unknown_step", "did you mean pretrain?")
    assert told["steps.other.continues.step"][0] == "other_stage"
    assert told["steps.pool.continues.step"][0] == "cycle"
    steps = {
        "wide": {**LONGER, "model": {"preset": "llama-4m"}},
        "early": {**LONGER, "continues": {"step": "pretrain", "at": "9 batches"}},
        "short": {**LONGER, "duration": "8 batches"},
        "fresh": {**LONGER, "inputs": {"tokenizer": "mine"}},
        "mine": {"uses": "tokenizer", "inputs": {"documents": "ingest"}},
        "none": {**LONGER, "continues": {"step": "short"}, "duration": "30 batches", "keep_state": "none"},
        "after": {"continues": {"step": "none"}, "duration": "40 batches"},
    }
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", **SECTIONS, "steps": steps})
    assert {problem.path: problem.code for problem in caught.value.problems} == {
        "steps.wide.model": "contradiction",
        "steps.early.continues.at": "no_state",
        "steps.short.duration": "nothing_to_train",
        "steps.fresh.inputs.tokenizer": "contradiction",
        "steps.none.keep_state": "no_state",
    }


def test_rounds_of_another_number_of_batches_cannot_go_on() -> None:
    """A training is as long as its batches: other rounds would not come to the `rollouts` that the step says."""
    config = yaml.safe_load((Path(__file__).parents[3] / "configs" / "quickstart.yaml").read_text(encoding="utf8"))
    rounds = config["rlhf"]["rollouts"]

    def told(**changes: Any) -> list[tuple[str, str]]:
        step = {"continues": {"step": "rlhf"}, "rollouts": 2 * rounds, **changes}
        try:
            parse(config | {"steps": {"more": step}})
        except ConfigError as error:
            return [(problem.path, problem.code) for problem in error.problems]
        return []

    assert not told()
    assert told(rollouts=rounds) == [("steps.more.rollouts", "nothing_to_train")]
    assert told(epochs=config["rlhf"].get("epochs", 1) + 1) == [("steps.more", "contradiction")]


@pytest.mark.long
def test_a_branch_is_built_from_a_state_and_outlives_it(run: Run, tmp_path: Path) -> None:
    def answer(command: str, *arguments: str, **steps: Any) -> Answer:
        config = write_config(tmp_path / "config.yaml", {"name": "branch", **SECTIONS, "steps": steps})
        return run(command, config, *arguments, "--root", store)

    store = tmp_path / "store"
    built = answer("run", longer=LONGER)
    assert built.code == 0 and built.with_status("built") >= {"pretrain", "longer"}
    # Where the state lies in the pipeline is no part of the branch's name; what follows it is.
    assert answer("check", other=LONGER).with_status("reuse") >= {"other"}
    hand = {**LONGER, "optimizer": {"learning_rate": 1.0e-4}}
    asked = answer("check", longer=hand)
    assert asked.with_status("build") == {"longer", "measure_longer"}
    assert asked.rows()["longer"]["because"] == ["steps.longer.optimizer.learning_rate changed: 0.001 → 0.0001"]
    assert answer("check", longer={**LONGER, "continues": {"step": "pretrain"}}).rows()["longer"]["because"] == [
        "the content of its input state changed"
    ]
    place = built.rows()["longer"]["path"]
    family = run("lineage", place, "--root", store).document
    assert "state" in {edge["name"] for edge in family["edges"]}
    branch = next(node["continues"] for node in family["nodes"] if node.get("step") == "longer")
    assert (branch["step"], branch["batch"], branch["tokens"]) == ("pretrain", 8, 8 * 512)
    assert branch["changed"] == [{"key": "duration", "before": "12 batches", "after": "16 batches"}]

    shown = run("gc", "--states", "--root", store).document
    # By artifact: which comes first depends on its fingerprint, and so on the processor that its weights come from.
    assert {row["artifact"].rpartition(" ")[2] for row in shown["garbage"]} == {"8", "12", "16"}
    assert run("gc", "--states", "--yes", "--root", store).code == 0
    assert run("verify", place, "--root", store).code == 0
    assert answer("check", longer=LONGER).with_status("reuse") >= {"pretrain", "longer"}
    for command in ("check", "run"):
        refused = answer(command, longer=hand)
        (error,) = refused.document["errors"]
        assert (refused.code, error["code"], error["path"]) == (2, "no_state", "steps.longer.continues")
        assert error["fix"].endswith("--force pretrain")
    # What the error asks for helps: the artifact stays, and gets its states back, also those that were never kept.
    again = answer("run", "--force", "pretrain", longer=hand)
    assert again.code == 0 and again.with_status("built") == {"pretrain", "longer", "measure_longer"}
    first, second = (one.rows()["pretrain"] for one in (built, again))
    assert (first["path"], first["digest"]) == (second["path"], second["digest"])


@pytest.mark.long
def test_states_that_were_not_kept_are_there_once_the_training_is_forced(run: Run, tmp_path: Path) -> None:
    """The risk: an artifact of the same bytes that is built again keeps the states that it had, and a step that goes
    on with another of them never can."""
    store = tmp_path / "store"
    built = run("run", write_config(tmp_path / "config.yaml", {"name": "branch", **SECTIONS}), "--root", store)
    assert built.code == 0, built.document["errors"]
    first = built.rows()["pretrain"]
    more = {"pretrain": {**PRETRAIN, "keep_state": {"every": "4 batches"}}}
    early = {**LONGER, "continues": {"step": "pretrain", "at": "4 batches"}}
    config = write_config(tmp_path / "more.yaml", {"name": "branch", **SECTIONS, **more, "steps": {"early": early}})
    assert run("run", config, "--root", store).document["errors"][0]["code"] == "no_state"
    assert run("run", config, "--force", "pretrain", "--root", store).code == 0
    assert run("verify", f"pretrain/{first['fingerprint']}", "--root", store).code == 0
    states = {path.name for path in (Path(first["path"]) / "aux" / "state").iterdir()}
    assert states == {"ba000000004", "ba000000008", "ba000000012"}
