"""The whole DAG on a tiny scale: raw text to a registered, aligned model, its figures, its report, its lineage."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from evaluation.config import FAILURE_CLASSES
from infra.run import Run as Session
from tests.support.pipelines import bias_sets, full_config
from tests.support.programs.command import Answer

Run = Callable[..., Answer]
MODELS = ("pretrain", "sft", "rlhf")


@pytest.fixture(scope="module")
def document(built_full: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((built_full / "answer.json").read_text())
    return content


@pytest.fixture(scope="module")
def folders(document: dict[str, Any]) -> dict[str, Path]:
    return {row["stage"]: Path(row["path"]) for row in document["stages"]}


def figures(folder: Path) -> dict[str, float]:
    content: dict[str, float] = json.loads((folder / "manifest.json").read_text())["result"]["figures"]
    return content


def test_every_stage_is_built_and_nobody_left_the_machine(built_full: Path, document: dict[str, Any]) -> None:
    assert document["status"] == "done"
    assert {row["status"] for row in document["stages"]} == {"built"}
    assert len(document["stages"]) == 31
    attempts = built_full / "connections"
    assert not attempts.exists(), attempts.read_text()


def test_right_after_the_run_nothing_is_to_be_built(built_full: Path, run: Run) -> None:
    answer = run("check", built_full / "config.yaml", "--root", built_full / "store")
    assert answer.with_status("build") == set(), answer.document


@pytest.mark.parametrize("stage", MODELS)
def test_each_model_is_a_plain_hugging_face_folder(folders: dict[str, Path], stage: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[stage])
    tokenizer = AutoTokenizer.from_pretrained(folders[stage])
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "What is it?"}], return_tensors="pt")
    assert model(**inputs).logits.shape[-1] == len(tokenizer)
    assert not list(folders[stage].glob("*.bin"))


def test_the_reward_model_gives_one_number(folders: dict[str, Path]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folders["reward_model"])
    assert model.config.num_labels == 1


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("pretrain", {"validation_loss", "validation_loss_low", "validation_loss_high", "unigram_loss", "bigram_loss"}),
        ("sft", {"heldout_loss_base", "heldout_loss_sft", "improvement_low", "improvement_high", "ends_share_sft"}),
        ("reward_model", {"heldout_accuracy", "heldout_accuracy_low", "heldout_accuracy_high"}),
        ("rlhf", {"heldout_reward_sft", "heldout_reward_rlhf", "reward_gain_low", "reward_gain_high", "kl_to_sft"}),
    ],
)
def test_figures_are_on_held_out_data_with_intervals(folders: dict[str, Path], stage: str, needed: set[str]) -> None:
    assert needed <= set(figures(folders[f"measure_{stage}"]))


def went_through_all(benchmarks: Path, safety: Path, tasks: set[str]) -> None:
    """Raises AssertionError unless a model was asked all that `full_config` asks of one."""
    scores = json.loads((benchmarks / "results.json").read_text())
    assert scores["tasks"].keys() == scores["shots"]["0"].keys() == scores["shots"]["1"].keys() == tasks
    assert scores["shots"]["0"] == scores["tasks"]
    classes = scores["failure_classes"]["classes"]
    assert classes.keys() == set(FAILURE_CLASSES) and all(one["n"] for one in classes.values())
    found = json.loads((safety / "results.json").read_text())
    assert found["toxicity"]["prompts"] == 4 and found["bias"]["pairs"] == 20
    assert found["adversarial"].keys() >= {"broken", "broken_plain", "difference"}
    assert {row["set"] for row in found["bias"]["sets"]} == {one["kind"] for one in bias_sets()}
    memorised = found["memorisation"]
    assert memorised["by_copies"][0]["at_least"] == 1 and memorised["by_copies"][0]["documents"] > 0
    assert 0 <= memorised["membership_inference"]["low"] <= memorised["membership_inference"]["high"] <= 1
    assert {
        "personal_data",
        "adversarial_broken",
        "membership_auc",
        "winobias_gap",
        "bbq_s_amb",
        "stereoset_icat",
    } <= set(figures(safety))


@pytest.mark.parametrize("model", ["base", "sft", "rlhf"])
def test_each_model_went_through_all_of_the_evaluation(folders: dict[str, Path], model: str) -> None:
    safety = folders[f"safety_{model}"]
    went_through_all(folders[f"benchmarks_{model}"], safety, {"minimal_pairs", "cloze"})
    assert json.loads((safety / "results.json").read_text())["memorisation"]["train"]["sequences"] == 8


def test_the_three_models_answer_every_kind_of_task_and_stand_in_one_table_of_mitigations(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """What the demo's config does not ask: lm-eval's own tasks, truthfulness, documents by domain, written answers."""
    from evaluation.benchmarks import benchmarks
    from evaluation.config import BenchmarksConfig
    from evaluation.config.mitigations import MitigationsConfig
    from evaluation.evaluate import EvalOptions, evaluate_models
    from evaluation.mirror_writer import mirror_task
    from evaluation.mitigations import mitigations

    def lines(name: str, rows: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    models, work, mirror = {name: folders[name] for name in MODELS}, Session(tmp_path / "work"), tmp_path / "mirror"
    asked = [{"query": f"{n} + 1?", "choices": ["one", "two", "three", "four"], "gold": n % 4} for n in range(4)]
    mirror_task("arc_easy", Path(lines("arc_easy.jsonl", asked)), mirror, shots=0)
    true = {"mc1_targets": {"A door.": 0, "A number.": 1}, "mc2_targets": {"A door.": 0, "A number.": 1}}
    (tmp_path / "mc_task.json").write_text(json.dumps([{"question": f"What is {n}?", **true} for n in range(3)]))
    mirror_task("truthfulqa_mc1", tmp_path / "mc_task.json", mirror, shots=0)
    tasks = ("arc_easy", "truthfulqa_mc1")
    found = evaluate_models(models, EvalOptions(tasks, limit=3, mirror=mirror), work)
    assert [{row["task"] for row in one.results} for one in found.models] == [set(tasks)] * 3
    pairs = [(row["first"], row["second"]) for row in found.comparisons if row["task"] == "truthfulqa_mc1"]
    assert pairs == [("pretrain", "sft"), ("pretrain", "rlhf"), ("sft", "rlhf")]

    (tmp_path / "sorts.yaml").write_text(
        "task: sorts\ndataset_path: json\ndataset_kwargs: {data_files: {test: arc_easy.jsonl}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{query}}'\ndoc_to_target: '{{choices[gold]}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 6, do_sample: false}\nmetric_list: [{metric: exact_match}]\n"
    )
    texts = lines("texts.jsonl", [{"text": f"Return the item {n}.", "domain": "ab"[n % 2]} for n in range(4)])
    kinds = [{"name": "texts", "kind": "text", "path": texts}, {"name": "sorts", "kind": "lm_eval"}]
    kinds[1]["path"] = str(tmp_path / "sorts.yaml")
    for name, folder in models.items():
        out = tmp_path / name
        out.mkdir()
        figures = benchmarks(BenchmarksConfig.model_validate({"tasks": kinds}), {"model": folder}, out, work).figures
        assert figures["texts_a_bits_per_byte"] > 0 and 0 <= figures["sorts_exact_match"] <= 1

    toxicity = {"limit": 2, "samples_per_prompt": 2, "max_new_tokens": 4}
    config = MitigationsConfig.model_validate({"toxicity": toxicity, "tasks": ["cloze"], "limit": 4})
    inputs = {"model": folders["pretrain"], "sft": folders["sft"], "rlhf": folders["rlhf"]}
    mitigations(config, inputs, tmp_path, work)
    table = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["name"] for row in table] == ["plain", "prefix", "rerank", "rlhf", "sft"]


def test_a_gate_that_holds_stands_in_the_registration(folders: dict[str, Path]) -> None:
    (verdict,) = json.loads((folders["register"] / "registration.json").read_text())["gates"]
    assert verdict["figure"] == "benchmarks_rlhf.cloze_accuracy" and verdict["passed"] is True
    assert verdict["value"] == figures(folders["benchmarks_rlhf"])["cloze_accuracy"]


def test_held_out_pairs_are_not_in_the_training_text(folders: dict[str, Path]) -> None:
    train = (folders["instructions"] / "train.jsonl").read_text().splitlines()
    heldout = (folders["instructions"] / "heldout.jsonl").read_text().splitlines()
    responses = {json.loads(line)["response"] for line in train}
    assert heldout
    assert not responses & {json.loads(line)["response"] for line in heldout}


def test_the_report_stands_alone_and_shows_all_three_models(folders: dict[str, Path]) -> None:
    page = (folders["report"] / "report.html").read_text()
    assert "<svg" in page
    for forbidden in ("<script", "<link ", 'http-equiv="refresh', "@import", 'src="http'):
        assert forbidden not in page
    assert "default-src 'none'" in page  # and the browser would refuse what slipped through
    for label in ("base", "sft", "rlhf"):
        assert label in page.lower()


def test_mlflow_holds_a_parent_run_a_child_for_each_stage_and_the_registered_model(
    built_full: Path, document: dict[str, Any]
) -> None:
    with sqlite3.connect(built_full / "store" / "mlflow" / "mlflow.db") as database:
        parents = dict(database.execute("SELECT run_uuid, value FROM tags WHERE key = 'mlflow.parentRunId'").fetchall())
        statuses = dict(database.execute("SELECT run_uuid, status FROM runs").fetchall())
        versions = database.execute("SELECT name, run_id FROM model_versions").fetchall()
        losses = database.execute("SELECT count(*) FROM metrics WHERE key = 'train/loss'").fetchone()[0]
    rows = {row["stage"]: row["mlflow_run_id"] for row in document["stages"]}
    assert document["mlflow_run_id"] in statuses
    assert len(parents) == len(rows)
    assert {run_id for run_id in rows.values() if run_id} <= set(parents)
    # A busy machine's relay may be late for the last stages: their runs are there, but the command ended before.
    assert None not in list(rows.values())[:-3]
    assert set(parents.values()) == {document["mlflow_run_id"]}
    assert set(statuses.values()) == {"FINISHED"}
    assert versions == [("tiny", rows["rlhf"])]
    assert losses >= 30
    files = built_full / "store" / "mlflow" / "artifacts" / "tiny" / rows["pretrain"] / "artifacts"
    assert {"profile.json", "profile_operators.txt", "profile_trace.json.gz"} <= {file.name for file in files.iterdir()}


@pytest.mark.long
def test_a_changed_learning_rate_builds_sft_and_plans_what_hangs_on_it(
    run: Run, built_full: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(built_full / "store", store, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    config, setting = built_full / "config.yaml", "sft.optimizer.learning_rate=2e-3"

    told = run("check", config, "--root", store, "--set", setting).rows()
    below = {name for name, row in told.items() if row["status"] == "build"}
    assert below == {
        "sft",
        "measure_sft",
        "reward_model",
        "measure_reward_model",
        "rlhf",
        "measure_rlhf",
        "benchmarks_sft",
        "safety_sft",
        "benchmarks_rlhf",
        "safety_rlhf",
        "register",
        "report",
    }
    assert told["sft"]["because"] == ["sft.optimizer.learning_rate changed: 0.001 → 0.002"]

    answer = run("run", config, "--root", store, "--set", setting, "--until", "sft")
    assert answer.with_status("built") == {"sft", "measure_sft"}


def test_a_key_that_only_measures_a_model_measures_it_again_and_trains_nothing(
    run: Run, built_full: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(built_full / "store", store, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    config = built_full / "config.yaml"
    asked = {
        "measure_pretrain": "pretrain.validation_tokens=512",
        "measure_sft": "sft.answers_limit=3",
        "measure_reward_model": "reward_model.heldout_limit=3",
        "measure_rlhf": "rlhf.best_of=2",
    }
    for name, setting in asked.items():
        told = run("check", config, "--root", store, "--set", setting).rows()
        assert {step for step, row in told.items() if row["status"] == "build"} == {name, "register", "report"}
        key, _, value = setting.partition("=")
        assert told[name]["because"][0].startswith(f"{key} ") and value in told[name]["because"][0]
    first = run("run", config, "--root", store, "--set", asked["measure_rlhf"], "--only", "rlhf")
    assert first.with_status("built") == {"measure_rlhf"} and first.with_status("reused") == {"rlhf"}
    found = figures(Path(first.rows()["measure_rlhf"]["path"]))
    assert found.keys() - figures(
        Path(run("check", config, "--root", store).rows()["measure_rlhf"]["path"])
    ).keys() == {name for name in found if name.startswith("best_of_")}


def test_a_step_learns_from_the_pairs_themselves_and_its_model_is_gated_reported_and_answers(
    run: Run, built_full: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(built_full / "store", store, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    tuning = {"duration": "2 batches", "global_batch_pairs": 4, "max_length": 128, "answer_max_tokens": 4}
    tuning["optimizer"] = {"learning_rate": 1.0e-3}  # far enough for a KL that is no rounding
    inputs = {"model": "sft", "preferences": "preferences", "judge": "reward_model"}
    gates = [
        {"figure": "model.win_rate", "at_least": 0.0},
        {"figure": "model.kl_to_reference", "at_most": 1.0e-9},
    ]
    steps = {
        "dpo": {"uses": "preference_tuning", "inputs": inputs, "heldout_prompts": 4, **tuning},
        "release": {"uses": "register", "inputs": {"model": "dpo"}, "gates": gates},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load((built_full / "config.yaml").read_text()), "steps": steps}))
    answer = run("run", config, "--root", store, "--until", "release,report")
    assert answer.with_status("built") >= {"dpo", "report"} and answer.code == 3, answer.document["errors"]
    assert "kl_to_reference" in json.dumps(answer.document["errors"])
    rows = answer.rows()
    page = (Path(rows["report"]["path"]) / "report.html").read_text()
    assert "Alignment by DPO" in page and "chosen is likelier" in page and "judge&#39;s score" in page
    # Nothing takes a refused model: not in the run that finds it so, and not in one that finds it there.
    waiting = {**tuning, "uses": "preference_tuning", "inputs": {**inputs, "model": "dpo"}, "requires": ["release"]}
    waiting["duration"] = "1 batches"
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**content, "steps": {**steps, "onwards": waiting}}))
    for selected in ("--until", "--only"):
        after = run("run", config, "--root", store, selected, "onwards")
        row = after.rows()["onwards"]
        assert after.code == 3 and after.document["status"] == "refused", after.document
        assert row["status"] == "skipped" and row["headline"] == "waits for release"
        assert "kl_to_reference" in json.dumps(after.document["errors"])
    whole = run("run", config, "--root", store, "--until", "onwards,report")
    assert whole.code == 3 and whole.rows()["onwards"]["status"] == "skipped"
    assert whole.rows()["report"]["path"] == rows["report"]["path"], "a page tells of a refused model all the same"
    told = run("chat", rows["dpo"]["path"], "--prompt", "What does `numpy.sort(a)` do?", "--max-new-tokens", "5")
    assert told.code == 0 and told.document["messages"][-1]["role"] == "assistant"


def test_the_model_answers_on_the_command_line(run: Run, folders: dict[str, Path]) -> None:
    answer = run("chat", folders["sft"], "--prompt", "What does `numpy.sort(a)` do?", "--max-new-tokens", "5")
    assert answer.code == 0
    assert [message["role"] for message in answer.document["messages"]] == ["user", "assistant"]


@pytest.mark.long
def test_your_own_data_from_files(run: Run, shared_data: Path, tmp_path: Path) -> None:
    """Novels, encyclopedia, human preferences, instructions, a public benchmark and public bias pairs, by path. The
    model goes through all of the evaluation, canaries planted in its text too.

    The risk: files of public sets, each of which a stage reads alone, do not make a pipeline.
    """
    config = full_config()
    config["name"] = "own-data"
    config["ingest"] = {
        "read": [
            {
                "kind": "files",
                "paths": [str(shared_data / "nltk_gutenberg" / "carroll-alice.txt")],
                "encoding": "latin-1",
                "cut_characters": 2000,
            },
            {
                "kind": "files",
                "paths": [str(shared_data / "wikitext2" / "wikitext2_train_5k.txt")],
                "cut_characters": 30000,
            },
        ]
    }
    config["instructions"] = {
        "read": [
            {
                "kind": "files",
                "paths": [str(shared_data / "rasbt_sft_dpo/ch07/01_main-chapter-code/instruction-data.json")],
            }
        ]
    }
    config["preferences"] = {
        "read": [
            {"kind": "files", "paths": [str(shared_data / "hh_rlhf" / "test.jsonl.gz")], "dialogue": True, "limit": 400}
        ]
    }
    arc = str(shared_data / "llm_foundry_eval/world_knowledge/arc_easy.jsonl")
    config["benchmarks"]["tasks"] = [{"name": "arc_easy", "kind": "multiple_choice", "path": arc}]
    config["safety"]["bias"]["pairs"] = str(shared_data / "crows_pairs/crows_pairs_anonymized.csv")
    config["shard"]["canaries"] = [{"text": "The code is {digits:2}.", "copies": [0, 8]}]
    config["pretrain"] |= {"duration": "4 batches", "evaluate_every": "90000 batches"}
    for section in ("validate", "dedupe", "decontaminate", "mix", "sft", "reward_model", "rlhf", "register", "report"):
        config.pop(section)
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))

    answer = run("run", path, "--root", tmp_path / "store")

    assert answer.code == 0, answer.document["errors"]
    benchmarks, safety = (Path(answer.rows()[stage]["path"]) for stage in ("benchmarks_base", "safety_base"))
    went_through_all(benchmarks, safety, {"arc_easy"})
    exposed = json.loads((safety / "results.json").read_text())["exposure"]
    assert [row["planted"] for row in exposed] == [0, 8]
    assert {"instructions", "preferences"} <= answer.with_status("built")
