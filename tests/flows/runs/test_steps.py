"""Named steps: any graph of stages, told apart by their names, and sharing what is one artifact."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config.graph import Selection, graph
from flows.config.read import dump, parse
from infra.errors import ConfigError
from tasks.stages import STAGES
from tests.support.programs.command import REPOSITORY, Answer, stemma, write_config
from training.config import TrainerConfig

Run = Callable[..., Answer]

MODELS: dict[str, Any] = {
    "ingest": {"read": [{"kind": "docstrings", "packages": ["numpy"]}]},
    "tokenizer": {},
    "shard": {"sequence_length": 64},
    "pretrain": {"model": {"preset": "llama-nano"}, "duration": "20 batches", "global_batch_tokens": 1024},
    "instructions": {"read": [{"kind": "docstrings", "packages": ["numpy"]}]},
}


def problems_of(steps: dict[str, Any], **sections: Any) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", **MODELS, **sections, "steps": steps})
    return {problem.path: (problem.code, problem.fix) for problem in caught.value.problems}


def test_everything_that_is_wrong_with_the_steps_is_said_at_once(run: Run, tmp_path: Path) -> None:
    """Also where another key is wrong, by which validation would have stopped."""
    steps = {
        "one": {"uses": "sft", "inputs": {"model": "other", "instructions": "instructons"}},
        "other": {"uses": "sft", "inputs": {"model": "one", "instructions": "shard"}},
        "unknown": {"uses": "sfft"},
        "lost": {"uses": "sft", "inputs": {"modl": "pretrain"}, "optimizer": {"learning_rte": 3}},
        "shard": {"uses": "shard", "inputs": {"documents": "ingest", "tokenizer": "pretrain"}},
        "pretrain_again": {"uses": "benchmarks", "inputs": {"model": "pretrain"}, "requires": ["validatte"]},
    }
    config = write_config(tmp_path / "bad.yaml", {"name": "bad", **MODELS, "steps": steps})
    answer = run("check", config, "--root", tmp_path / "store")
    told = {error["path"]: (error["code"], error["fix"]) for error in answer.document["errors"]}
    assert answer.code == 2
    assert told["steps.one.inputs.instructions"] == ("unknown_step", "did you mean instructions?")
    assert told["steps.other.inputs.instructions"][0] == "other_kind"
    assert told["steps.other.inputs.model"][0] == "cycle"
    assert told["steps.unknown.uses"] == ("unknown_stage", "did you mean sft?")
    assert told["steps.lost.inputs.modl"] == ("unknown_input", "did you mean model?")
    assert told["steps.lost.inputs.model"][0] == told["steps.lost.inputs.instructions"][0] == "missing_input"
    assert told["steps.lost.optimizer.learning_rte"] == ("unknown_key", "did you mean learning_rate?")
    assert told["steps.shard"][0] == "name_taken"
    assert told["steps.pretrain_again.requires.0"][0] == "unknown_step"
    assert len(told) == 10


def test_what_does_not_fit_between_steps_has_the_key_of_the_step() -> None:
    on = {"shards": "shard", "tokenizer": "tokenizer"}
    nano = {"preset": "llama-nano"}
    told = problems_of(
        {
            "uneven": {"uses": "pretrain", "inputs": on, "model": nano, "global_batch_tokens": 1000},
            "described": {"uses": "pretrain", "inputs": {**on, "model": "pretrain"}, "model": {"preset": "llama-4m"}},
            "long": {
                "uses": "sft",
                "inputs": {"model": "pretrain", "instructions": "instructions"},
                "max_length": 32,
                "answer_max_tokens": 32,
            },
            "more": {"uses": "tokenizer", "inputs": {"documents": "ingest"}, "heldout_share": 0.3},
            "textless": {
                "uses": "sft",
                "inputs": {"model": "pretrain", "instructions": "instructions"},
                "text_share": 0.1,
            },
            "misread": {
                "uses": "sft",
                "inputs": {"model": "pretrain", "instructions": "instructions", "shards": "shard"},
                "text_share": 0.1,
                "text_sources": ["docstring"],
            },
            "unread": {
                "uses": "sft",
                "inputs": {"model": "pretrain", "instructions": "instructions"},
                "text_sources": ["docstrings"],
            },
        }
    )
    assert told["steps.misread.text_sources"] == ("unknown_source", "did you mean docstrings?")
    assert told["steps.unread.text_sources"] == ("contradiction", "set text_share")
    assert told["steps.textless.text_share"] == (
        "contradiction",
        "add a shard section, or name a step of shards in inputs.shards",
    )
    assert told["steps.uneven.global_batch_tokens"][0] == "not_divisible"
    assert told["steps.described.model"][0] == "contradiction"
    assert told["steps.long.answer_max_tokens"][0] == "no_room"
    assert told["tokenizer.heldout_share"][0] == "contradiction"


def test_a_gate_on_a_step_that_the_registration_does_not_read_is_refused() -> None:
    """It ended the run after all was built."""
    tuned = {"uses": "sft", "inputs": {"model": "pretrain", "instructions": "instructions"}}
    quiz = {"uses": "benchmarks", "inputs": {"model": "chat"}}
    inputs = {"model": "chat", "quiz": "quiz"}

    def gated(*figures: str) -> dict[str, Any]:
        gates = [{"figure": figure, "at_least": 0} for figure in figures]
        return {"chat": tuned, "quiz": quiz, "release": {"uses": "register", "inputs": inputs, "gates": gates}}

    assert problems_of(gated("chat.a", "quizz.a", "shard.a")) == {
        "steps.release.gates.1.figure": ("unknown_figure", "did you mean quiz?"),
        "steps.release.gates.2.figure": ("unknown_figure", "it reads chat, model, quiz, sft"),
    }
    gates = [{"figure": "benchmark_base.cloze_accuracy", "at_least": 0}]
    told = problems_of({}, benchmarks={}, register={"gates": gates})
    assert told == {"register.gates.0.figure": ("unknown_figure", "did you mean benchmarks_base?")}
    nodes = graph(parse({"name": "x", **MODELS, "steps": gated("chat.a", "sft.a", "model.a", "quiz.a")}))
    assert nodes["release"].config.gates[3].figure == "quiz.a"  # type: ignore[attr-defined]


def test_a_gate_on_the_registered_step_holds_whichever_step_built_its_artifact() -> None:
    """The artifact of a step that shares it with others names the one that built it: the figure was called unknown."""
    for name in ("chat", "talk"):
        tuned = {"uses": "sft", "inputs": {"model": "pretrain", "instructions": "instructions"}}
        gates = [{"figure": f"{name}.heldout_loss_sft", "at_most": 5}]
        release = {"uses": "register", "inputs": {"model": name}, "gates": gates}
        nodes = graph(parse({"name": "x", **MODELS, "steps": {name: tuned, "release": release}}))
        assert nodes["release"].config.gates[0].figure == "model.heldout_loss_sft"  # type: ignore[attr-defined]
    nodes = graph(parse({"name": "x", **MODELS, "register": {"gates": [{"figure": "pretrain.a", "at_most": 5}]}}))
    assert nodes["register"].config.gates[0].figure == "pretrain.a"  # type: ignore[attr-defined]


def test_what_would_end_an_alignment_at_its_beginning_is_said_before_anything_runs() -> None:
    asked = {"model": "pretrain", "prompts": "instructions"}
    paired = {"model": "pretrain", "preferences": "preferences"}
    tuned = {"uses": "sft", "inputs": {"model": "pretrain", "instructions": "instructions"}}
    several = {"uses": "rlhf", "answers_per_prompt": 2}
    told = problems_of(
        {
            "scorer": {"uses": "reward_model", "inputs": paired},
            "valueless": {"uses": "rlhf", "inputs": asked, "reward_functions": {"math:fsum": 1.0}},
            "alone": {**several, "inputs": {**asked, "reward_model": "scorer"}, "stop_on_divergence": 3},
            "weighed": {**several, "inputs": {**asked, "reward_model": "scorer"}, "reward_weights": {"second": 2.0}},
            "fine": {**several, "inputs": {**asked, "reward_model": "scorer"}, "reward_weights": {"reward_model": 2.0}},
            "adapted": {**tuned, "lora": {}},
            "shared": {**tuned, "lora": {"quantize": "nf4"}, "start_share": 0.5},
        },
        preferences={"read": [{"kind": "files", "paths": ["pairs.jsonl"], "prompt_field": "prompt"}]},
        pretrain={**MODELS["pretrain"], "model": {"family": "gpt2", "layers": 2, "width": 32, "heads": 2}},
    )
    assert {path: code for path, (code, _) in told.items()} == {
        "steps.valueless.algorithm": "no_reward_model",
        "steps.alone.stop_on_divergence": "no_judge",
        "steps.weighed.reward_weights.second": "unknown_reward_model",
        "steps.adapted.lora": "no_such_layer",
        "steps.shared.lora": "no_such_layer",
        "steps.shared.start_share": "contradiction",
    }


def test_a_family_that_is_not_proven_is_refused_for_packing() -> None:
    tuned = {"uses": "sft", "inputs": {"model": "pretrain", "instructions": "instructions"}, "packing": True}
    model = {**MODELS["pretrain"], "model": {"transformers": {"model_type": "mamba"}}, "attention": "sequence"}
    assert problems_of({"packed": tuned}, pretrain=model)["steps.packed.packing"][0] == "unproven_family"


def test_text_of_another_tokenizer_than_the_model_s_is_refused() -> None:
    """Its ids would be learnt as other text, without a word."""
    sections = {name: one for name, one in MODELS.items() if name != "pretrain"}
    own = {"uses": "shard", "inputs": {"documents": "ingest", "tokenizer": "base_model"}, "sequence_length": 64}
    tuned = {"uses": "sft", "inputs": {"model": "base_model", "instructions": "instructions"}, "text_share": 0.1}
    steps = {
        "own": own,
        "wrong": {**tuned, "inputs": {**tuned["inputs"], "shards": "shard"}},
        "right": {**tuned, "inputs": {**tuned["inputs"], "shards": "own"}},
        "aligned": {
            "uses": "rlhf",
            "inputs": {"model": "right", "prompts": "instructions", "shards": "shard"},
            "text_coef": 1.0,
            "answers_per_prompt": 2,
        },
    }
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", **sections, "base_model": {"path": "model"}, "steps": steps})
    assert {problem.path: (problem.code, problem.fix) for problem in caught.value.problems} == {
        f"steps.{path}": ("other_tokenizer", f"take shards whose input tokenizer is {of}, or leave text out")
        for path, of in (("wrong.text_share", "base_model"), ("aligned.text_coef", "right"))
    }


def test_models_that_do_not_continue_text_are_found_through_steps() -> None:
    on = {"shards": "shard", "tokenizer": "tokenizer"}
    bert = {"uses": "pretrain", "inputs": on, "objective": "masked", "model": {"preset": "bert-nano"}}
    chat = {"uses": "sft", "inputs": {"model": "bert", "instructions": "instructions"}}
    scores = {"uses": "benchmarks", "inputs": {"model": "chat"}}
    told = problems_of({"scores": scores, "chat": chat, "bert": {**bert, "global_batch_tokens": 1024}})
    assert {path for path, (code, _) in told.items() if code == "not_causal"} == {"steps.chat", "steps.scores"}


def test_a_step_goes_by_way_of_the_worker_unchanged() -> None:
    """The seed of the pipeline, and keys at their defaults, with it."""
    steps = {"chat": {"uses": "sft", "inputs": {"model": "pretrain", "instructions": "instructions"}, "max_length": 99}}
    config = parse({"name": "x", "seed": 5, **MODELS, "steps": steps})
    assert config.steps["chat"].config.model_dump()["seed"] == 5
    again = parse(dump(config))
    assert again == config
    assert graph(again) == graph(config)


def test_what_the_page_changes_in_a_steps_form_is_changed_in_that_step_alone() -> None:
    from flows.stage import form_of, with_form

    on = {"model": "pretrain", "instructions": "instructions"}
    steps = {name: {"uses": "sft", "inputs": on, "max_length": 99} for name in ("chat", "other")}
    config = parse({"name": "x", **MODELS, "steps": steps})
    shown = form_of(config, "chat", "sft")
    assert type(shown) is STAGES["sft"].config
    changed = parse(with_form(config, "chat", "sft", shown.model_copy(update={"max_length": 90})))
    assert [graph(changed)[name].config.model_dump()["max_length"] for name in steps] == [90, 99]
    assert graph(changed)["chat"].inputs == on
    assert parse(with_form(config, "chat", "sft", shown)) == config


def test_a_step_is_adopted_by_its_name() -> None:
    """Its artifact is looked for under its stage, and what only it needed does not run."""
    more = {"uses": "instructions", "read": [{"kind": "docstrings", "packages": ["scipy"]}]}
    chat = {"uses": "sft", "inputs": {"model": "pretrain", "instructions": "more"}}
    adopted = {"chat": "0" * 16}
    nodes = graph(parse({"name": "x", **MODELS, "steps": {"more": more, "chat": chat}, "adopted": adopted}))
    assert (nodes["chat"].adopted, nodes["chat"].folder, nodes["chat"].upstream) == ("0" * 16, "sft", ())
    assert set(nodes) == {"instructions", "chat"}
    assert problems_of({"more": more, "chat": chat}, adopted={"chatt": "0" * 16})["adopted.chatt"][1].startswith("did")


ALIGNED: dict[str, Any] = {
    **MODELS,
    "sft": {},
    "preferences": {"read": [{"kind": "docstrings", "packages": ["numpy"]}]},
    "reward_model": {},
    "rlhf": {},
    "benchmarks": {},
    "register": {},
}
JUDGE: dict[str, Any] = {"uses": "reward_model", "seed": 18, "inputs": {"model": "sft", "preferences": "preferences"}}


def test_a_reward_model_called_judge_judges_the_usual_ppo() -> None:
    """It comes before what reads the aligned model; every other node is as without it."""
    plain = graph(parse({"name": "x", **ALIGNED}))
    nodes = graph(parse({"name": "x", **ALIGNED, "steps": {"judge": JUDGE}}))
    order = list(nodes)
    assert order.index("judge") < order.index("rlhf") < order.index("benchmarks_rlhf") < order.index("register")
    assert nodes["rlhf"].inputs == {**plain["rlhf"].inputs, "judge": "judge"}
    judged = {"judge", "measure_judge", "rlhf", "measure_rlhf"}
    assert nodes["measure_rlhf"].inputs == {**plain["measure_rlhf"].inputs, "judge": "judge"}
    assert {name: node for name, node in nodes.items() if name not in judged} == {
        name: node for name, node in plain.items() if name not in judged
    }
    named = {"second": JUDGE, "again": {"uses": "rlhf", "inputs": {**plain["rlhf"].inputs, "judge": "second"}}}
    nodes = graph(parse({"name": "x", **ALIGNED, "steps": named}))
    assert nodes["again"].inputs["judge"] == "second" and nodes["rlhf"] == plain["rlhf"]
    adopted = {"rlhf": "0" * 16}
    assert "judge" not in graph(parse({"name": "x", **ALIGNED, "steps": {}, "adopted": adopted}))


def test_a_reward_function_that_cannot_be_imported_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a usual section and of a step, all at once; one that is there is no problem, whatever its module prints."""
    (tmp_path / "rewards_of_mine.py").write_text('print("[1]")\ndef short(*given): ...\nLONG = 3\n')
    (tmp_path / "rewards_that_fail.py").write_text('raise RuntimeError("no data set")\n')
    (tmp_path / "rewards_that_end.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("rewards_of_mine:short", "rewards_of_mine:shrot", "rewards_of_mine:LONG", "rewards_that_fail:f")
    inputs = {"model": "sft", "prompts": "instructions"}
    several = {"answers_per_prompt": 2}
    step = {"uses": "rlhf", "inputs": inputs, "reward_functions": {"no_such_module:f": 1.0}, **several}
    with pytest.raises(ConfigError) as caught:
        sections = {**MODELS, **ALIGNED, "rlhf": {"reward_functions": dict.fromkeys(names, 1.0), **several}}
        sections |= {"steps": {"checked": step, "last": {**step, "reward_functions": {"rewards_that_end:f": 1.0}}}}
        parse({"name": "x", **sections})
    told = {problem.path: problem.message for problem in caught.value.problems if problem.code == "no_such_function"}
    key = "rlhf.reward_functions"
    assert told.pop(f"{key}.{names[1]}").startswith("expected a function: AttributeError")
    assert told.pop("steps.last.reward_functions.rewards_that_end:f").endswith("ended the process with code 3")
    assert told == {
        f"{key}.{names[2]}": "expected a function: not int",
        f"{key}.{names[3]}": "expected a function: RuntimeError: no data set",
        "steps.checked.reward_functions.no_such_module:f": (
            "expected a function: ModuleNotFoundError: No module named 'no_such_module'"
        ),
    }


def test_what_vllm_cannot_do_is_named_before_anything_runs(tmp_path: Path) -> None:
    """A program that is not there or cannot be executed, and a family whose weights were not seen to arrive."""
    program = tmp_path / "vllm"
    pretrain = {"model": {"transformers": {"model_type": "cohere2"}}}
    sections = {**MODELS, **ALIGNED, "pretrain": pretrain, "launch": {"vllm": {"program": str(program)}}}

    def told(**changed: Any) -> dict[str, str]:
        with pytest.raises(ConfigError) as caught:
            parse({"name": "x", **sections, **changed})
        return {problem.path: problem.message for problem in caught.value.problems if "vllm" in problem.code}

    found = told(rlhf={"sampler": "vllm"})
    assert "an existing program" in found["launch.vllm.program"]
    assert "llama" in found["rlhf.sampler"] and found["rlhf.sampler"].endswith("not cohere2")
    program.touch()
    assert "can be executed" in told(benchmarks={"engine": "vllm"})["launch.vllm.program"]
    program.chmod(0o755)
    parse({"name": "x", **{**sections, "pretrain": MODELS["pretrain"], "rlhf": {"sampler": "vllm"}}})


def test_a_judge_that_is_no_second_opinion_is_refused() -> None:
    def told(**steps: Any) -> dict[str, tuple[str, str]]:
        return problems_of(steps, **{name: section for name, section in ALIGNED.items() if name not in MODELS})

    assert told(judge={**JUDGE, "seed": 17})["steps.judge"][0] == "same_judge"
    assert told(judge={**JUDGE, "seed": 17, "evaluate_pairs": 9})["steps.judge"][0] == "same_judge"
    own = {"model": "sft", "reward_model": "reward_model", "prompts": "instructions", "judge": "reward_model"}
    assert told(again={"uses": "rlhf", "inputs": own})["steps.again.inputs.judge"][0] == "same_judge"
    several = {"uses": "rlhf", "inputs": {**own, "judge": "judge", "second": "reward_model"}}
    assert told(judge=JUDGE, again=several)["steps.again.inputs.second"][0] == "same_reward_model"
    third = {**JUDGE, "seed": 99}
    fine = {"uses": "rlhf", "inputs": {**own, "judge": "judge", "second": "third"}}
    parse({"name": "x", **ALIGNED, "steps": {"judge": JUDGE, "third": third, "again": fine}})
    same = {"uses": "rlhf", "inputs": {**own, "judge": "third", "second": "judge"}}
    assert told(judge=JUDGE, third=JUDGE, again=same)["steps.third"][0] == "same_judge"
    alone = {"uses": "rlhf", "inputs": {"model": "sft", "prompts": "instructions", "second": "judge"}}
    assert told(judge=JUDGE, again=alone)["steps.again.inputs.second"][0] == "missing_input"
    after = {**JUDGE, "inputs": {"model": "rlhf", "preferences": "preferences"}}
    assert told(judge=after)["steps.judge.inputs.model"][0] == "cycle"


def test_items_of_the_benchmarks_of_steps_are_cleared_of_too() -> None:
    scores = {"uses": "benchmarks", "inputs": {"model": "pretrain"}, "tasks": ["cloze"]}
    config = parse({"name": "x", **MODELS, "decontaminate": None, "steps": {"scores": scores}})
    assert [task["name"] for task in graph(config)["benchmark_text"].config.model_dump()["tasks"]] == ["cloze"]


def test_all_that_is_wrong_with_a_selection_is_said_and_none_is_empty(data_pipeline: Path, run: Run) -> None:
    nodes = graph(parse({"name": "x", **MODELS}))
    with pytest.raises(ConfigError) as caught:
        Selection(only=("shrd",), until=("tokeniser",), force=("ingest", "none")).choose(nodes)
    assert [one.path for one in caught.value.problems] == ["--only shrd", "--until tokeniser", "--force none"]
    with pytest.raises(ConfigError, match="--only shard --until tokenizer: the options together select no stage"):
        Selection(only=("shard",), until=("tokenizer",)).choose(nodes)
    answer = run("run", data_pipeline / "config.yaml", "--only", ",", "--root", data_pipeline / "store")
    assert answer.code == 2 and "expected one or more stages" in answer.document["errors"][0]["message"]


def test_steps_run_under_their_names_and_share_what_is_one_artifact(data_pipeline: Path, run: Run) -> None:
    steps = {
        "words": {"uses": "tokenizer", "inputs": {"documents": "strict"}, "vocab_size": 380},
        "strict": {"uses": "clean", "inputs": {"documents": "ingest"}, "min_characters": 300},
        "again": {"uses": "clean", "inputs": {"documents": "ingest"}, "requires": ["validate"]},
    }
    config = data_pipeline / "config.yaml"
    write_config(config, {**yaml.safe_load(config.read_text()), "steps": steps})
    root = ("--root", data_pipeline / "store")
    built = run("run", config, *root)
    assert built.code == 0, built.document["errors"]
    assert built.with_status("built") == {"strict", "words"}
    rows = built.rows()
    assert rows["again"]["path"] == rows["clean"]["path"], "the same config and inputs"
    assert Path(rows["strict"]["path"]).parent == Path(rows["clean"]["path"]).parent
    # Every command knows them by name.
    moved = run("check", config, "--set", "strict.min_characters=350", "--from", "strict", *root).rows()
    assert set(moved) == {"strict", "words"}
    assert moved["strict"]["because"] == ["steps.strict.min_characters changed: 300 → 350"]
    assert moved["strict"]["uses"] == "clean"
    assert run("why", config, "strict", *root).document["did"] == "built"
    assert run("logs", "strict", *root).document["path"] == str(Path(rows["strict"]["path"]) / "aux")
    assert run("logs", "clean", *root).document["path"] == str(Path(rows["clean"]["path"]) / "aux")
    whole = run("lineage", "words", *root).document
    assert {node.get("step") for node in whole["nodes"]} >= {"words", "strict", "ingest"}
    assert run("check", config, "--only", "strct", *root).document["errors"][0]["fix"] == "did you mean strict?"
    assert run("gc", *root).document["garbage"] == []


SHOUT = '''
"""Documents in capital letters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infra.config import StageConfig
from infra.run import Result, Run


class ShoutConfig(StageConfig):
    mark: str = "!"
    """What every text ends with."""


def shout(config: ShoutConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes documents/ with every text in capital letters."""
    (out_dir / "documents").mkdir()
    rows = 0
    for part in sorted((inputs["documents"] / "documents").glob("*.parquet")):
        table = pq.read_table(part)
        loud = pc.binary_join_element_wise(pc.utf8_upper(table["text"]), pa.scalar(config.mark), "")
        table = table.set_column(table.column_names.index("text"), "text", loud)
        pq.write_table(table, out_dir / "documents" / part.name)
        rows += table.num_rows
    return Result({"documents": float(rows)}, f"{rows} documents, all loud")
'''
DECLARED = """
from corpus.shout import ShoutConfig

STAGES["shout"] = Stage(
    "shout",
    about="Documents in capital letters.",
    version=1,
    config=ShoutConfig,
    function="corpus.shout:shout",
    inputs=(needs("documents"),),
    makes="documents",
)
"""


@pytest.mark.long
def test_a_new_stage_is_one_file_and_its_declaration(data_pipeline: Path, tmp_path: Path, env: dict[str, str]) -> None:
    """Config check, command line, separate process, store and page's schema: no other file knows of it. The risk: a
    stage of this repository is listed in a second place. One of an installed package is in `make test`."""
    copy = tmp_path / "stemma"
    for name in ("cli", "flows", "tasks", "training", "evaluation", "corpus", "infra", "configs"):
        shutil.copytree(REPOSITORY / name, copy / name)
    (copy / "corpus" / "shout.py").write_text(SHOUT)
    with (copy / "tasks" / "stages.py").open("a") as declarations:
        declarations.write(DECLARED)
    ingest = yaml.safe_load((data_pipeline / "config.yaml").read_text())["ingest"]
    steps = {
        "loud": {"uses": "shout", "inputs": {"documents": "ingest"}, "mark": "?"},
        "kept": {"uses": "clean", "inputs": {"documents": "loud"}, "gopher_quality": None},
    }
    config = write_config(tmp_path / "c.yaml", {"name": "loud", "ingest": ingest, "steps": steps})
    there = {"env": {**env, "PYTHONPATH": str(copy)}, "cwd": copy}
    answer = stemma("run", config, "--root", data_pipeline / "store", **there)
    assert answer.code == 0, answer.document["errors"]
    (text,) = {row["headline"].split(" ", 1)[1] for name, row in answer.rows().items() if name == "loud"}
    assert text == "documents, all loud"
    wrong = stemma("check", config, "--set", "loud.mrk=x", "--root", data_pipeline / "store", **there)
    assert wrong.document["errors"][0]["fix"] == "did you mean mark?"


def test_every_stage_that_learns_runs_in_ranks() -> None:
    """RLHF's declaration said nothing of it: on a machine with eight GPUs it took one."""
    assert {name for name, stage in STAGES.items() if issubclass(stage.config, TrainerConfig) != stage.trains} == set()
