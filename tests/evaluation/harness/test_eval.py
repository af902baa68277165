"""`stemma eval` and `stemma mirror`: any model on lm-eval's own tasks, offline, with lm-eval's own scores."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ConfigError, StageError
from infra.run import Run
from tests.evaluation.questions import ARC, write_rows
from tests.support.chat_templates import tokenizer_in
from tests.support.open_models import save_model
from tests.support.programs.command import REPOSITORY, environment, stemma

DATA = REPOSITORY.parent / "shared" / "data"
PUBLISHED = {
    **dict.fromkeys(("arc_easy", "piqa", "boolq", "openbookqa", "copa", "wsc273", "triviaqa"), "llm_foundry_eval"),
    "hellaswag": "hellaswag",
    "lambada_openai": "lambada",
    "gsm8k": "gsm8k",
    "ifeval": "ifeval",
    "wikitext": "wikitext2/wikitext2_train_5k.txt",
    "crows_pairs_english": "crows_pairs",
    "winogender_all": "winogender",
}

LIKELIHOOD, GENERATION = ("lambada_openai", "wikitext"), ("gsm8k", "triviaqa", "ifeval")
PUBLISHED_BY_OUTPUT = {
    "choices": tuple(name for name in PUBLISHED if name not in LIKELIHOOD + GENERATION),
    "likelihood": LIKELIHOOD,
    "generation": GENERATION,
}
PUBLISHED_ITEMS = 4
"""Of each task. benchmarks/RESULTS.md tells of a run with 100, which takes ten minutes."""


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of each kind of output. ARC-Easy in the gauntlet's layout has 18 questions to score, 6 put aside."""
    from evaluation.mirror_writer import mirror_task

    folder = tmp_path_factory.mktemp("mirror")
    done = mirror_task("arc_easy", write_rows(folder / "arc_easy.jsonl", ARC), folder)
    assert done.prompt == "Question: What is 0 plus one?\nAnswer:"
    assert done.splits == {"test": 18, "train": 6} and done.put_aside == 6
    passages = [{"text": f"She opened door number {n} and walked into the room"} for n in range(8)]
    mirror_task("lambada_openai", write_rows(folder / "lambada.jsonl", passages), folder, shots=0)
    asked = [{"context": f"Question: Who is {n}?\nAnswer:", "answer": "a", "aliases": ["a", "b"]} for n in range(8)]
    mirror_task("triviaqa", write_rows(folder / "triviaqa.jsonl", asked), folder, shots=0)
    truths = [
        {
            "question": f"What is {n}?",
            "mc1_targets": {"A door.": 0, f"A number, {n}.": 1, "A clerk.": 0},
            "mc2_targets": {"A door.": 0, f"A number, {n}.": 1, "A digit.": 1},
        }
        for n in range(5)
    ]
    (folder / "mc_task.json").write_text(json.dumps(truths))
    for name in ("truthfulqa_mc1", "truthfulqa_mc2"):
        assert mirror_task(name, folder / "mc_task.json", folder, shots=0).layout == "the authors' mc_task.json"
    spoken = "de\ten\n" + "".join(f"Die Tür {n} ist offen.\tDoor {n} is open.\n" for n in range(8))
    (folder / "newstest.tsv").write_text(spoken, encoding="utf8")
    done = mirror_task("wmt16-de-en", folder / "newstest.tsv", folder)
    assert done.layout == "columns de and en" and done.splits == {"test": 6, "validation": 2}
    assert done.prompt == "German phrase: Die Tür 0 ist offen.\nEnglish phrase:"
    (folder / "wiki.txt").write_text("".join(f" = Page {n} = \n\n The file is open . \n" for n in range(5)))
    assert mirror_task("wikitext", folder / "wiki.txt", folder, shots=0).splits == {"test": 5}
    return folder


def test_scores_are_lm_evals_own_for_every_kind_of_output(
    new_model: Callable[..., Path], mirror: Path, tmp_path: Path, run: Run
) -> None:
    """Multiple choice, log likelihood, whole documents, answers and translations, to the last digit."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from evaluation.evaluate import EvalOptions, evaluate_models
    from evaluation.harness.named_tasks import load_named

    names = (
        "arc_easy", "lambada_openai", "wikitext", "triviaqa", "truthfulqa_mc1", "truthfulqa_mc2", "wmt16-de-en",
    )  # fmt: skip
    model = new_model(tmp_path / "model", seed=3)
    with pytest.raises(StageError, match="triviaqa writes up to 256 tokens, the model's context has 128"):
        evaluate_models({"m": model}, EvalOptions(names, mirror=mirror), run)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config))
    (ours,) = evaluate_models({"m": model}, EvalOptions(names, limit=4, mirror=mirror), run).models
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1),
        tasks=load_named(names, mirror),
        limit=4,
        bootstrap_iters=1000,
        task_manager=TaskManager(include_defaults=False),
    )
    assert {row["task"] for row in ours.results} == set(names)
    assert {row["metric"] for row in ours.results if row["task"] == "wmt16-de-en"} == {"bleu", "chrf", "ter"}
    # lm-eval gives whole documents no standard error; perplexity a byte is 2 to the power of bits a byte.
    whole = {row["metric"]: row for row in ours.results if row["task"] == "wikitext"}
    assert all(row["stderr"] is None and row["low"] < row["value"] < row["high"] for row in whole.values())
    for end in ("low", "high"):
        assert whole["byte_perplexity"][end] == pytest.approx(2 ** whole["bits_per_byte"][end])
    for row in ours.results:
        value = theirs["results"][row["task"]][f"{row['metric']},{row['filter']}"]
        # mc2 is no share of items but of likelihoods, which move by rounding where choices are scored together.
        assert row["value"] == (pytest.approx(value, rel=1e-4) if row["task"] == "truthfulqa_mc2" else value), row
    # mc1: the right answer is the likeliest; mc2: the right answers' share of the likelihood.
    for shown, single in zip(ours.samples["truthfulqa_mc2", 0], ours.samples["truthfulqa_mc1", 0], strict=True):
        likelihoods = [math.exp(score) for score, _ in shown["filtered_resps"]]
        assert shown["doc"]["mc2_targets"]["labels"] == [1, 1, 0]
        assert shown["acc"] == pytest.approx(sum(likelihoods[:2]) / sum(likelihoods))
        scores = [score for score, _ in single["filtered_resps"]]
        assert single["acc"] == float(scores[0] == max(scores)) and len(scores) == 3


@pytest.mark.parametrize(("system", "multiturn"), [("Be short.", None), (None, False)])
def test_questions_by_a_model_s_own_template_are_lm_evals(
    system: str | None, multiturn: bool | None, mirror: Path, tmp_path: Path, run: Run
) -> None:
    """With BOS, a system and solved examples; turns by default, as lm-eval's command line has it."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from evaluation.evaluate import EvalOptions, evaluate_models
    from evaluation.harness.named_tasks import load_named

    names, model = ("arc_easy", "wmt16-de-en"), save_model(tmp_path / "model", tokenizer_in("llama3"), positions=1024)
    options = EvalOptions(
        names, (1,), 4, mirror, chat_template=True, system_instruction=system, fewshot_as_multiturn=multiturn
    )
    (ours,) = evaluate_models({"m": model}, options, run).models
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1),
        tasks=load_named(names, mirror),
        num_fewshot=1,
        limit=4,
        bootstrap_iters=1000,
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=True,
        system_instruction=system,
        **({} if multiturn is None else {"fewshot_as_multiturn": multiturn}),
    )
    assert {row["task"] for row in ours.results} == set(names)
    for row in ours.results:
        assert row["value"] == theirs["results"][row["task"]][f"{row['metric']},{row['filter']}"], row
    for name in names:
        for mine, its in zip(ours.samples[name, 1], theirs["samples"][name], strict=True):
            assert mine["arguments"] == its["arguments"]
            (prompt, *_), *_ = mine["arguments"]
            assert prompt.startswith("<|begin_of_text|>") and ("Be short." in prompt) == bool(system)
            assert prompt.count("<|start_header_id|>assistant") == (1 if multiturn is False else 2)
        scores = [[[one for one, _ in each["filtered_resps"]] for each in side] for side in
                  (ours.samples["arc_easy", 1], theirs["samples"]["arc_easy"])]  # fmt: skip
        assert scores[0] == [pytest.approx(row, rel=1e-4) for row in scores[1]]


def test_values_of_a_template_are_asked_as_lm_eval_asks_with_them(mirror: Path, tmp_path: Path, run: Run) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from evaluation.evaluate import EvalOptions, evaluate_models
    from evaluation.harness.named_tasks import load_named

    model = save_model(tmp_path / "model", tokenizer_in("qwen3"), positions=1024)
    values = {"enable_thinking": False}
    options = EvalOptions(("arc_easy",), (1,), 2, mirror, chat_template=True, chat_template_kwargs=values)
    (ours,) = evaluate_models({"m": model}, options, run).models
    theirs = lm_eval.simple_evaluate(
        model=HFLM(
            pretrained=str(model), dtype="float32", device="cpu", batch_size=1, chat_template_args=values
        ),
        tasks=load_named(("arc_easy",), mirror), num_fewshot=1, limit=2, apply_chat_template=True,
        task_manager=TaskManager(include_defaults=False),
    )  # fmt: skip
    for mine, its in zip(ours.samples["arc_easy", 1], theirs["samples"]["arc_easy"], strict=True):
        assert mine["arguments"] == its["arguments"]
        assert all(prompt.endswith("assistant\n<think>\n\n</think>\n\n") for prompt, _ in mine["arguments"])
    wrong = EvalOptions(("arc_easy",), (1,), 2, mirror, chat_template=True, chat_template_kwargs={"thinking": False})
    with pytest.raises(StageError, match=r"--chat-template-kwargs\.thinking.*does not read"):
        evaluate_models({"m": model}, wrong, run)


def by_command_line(model: Path, names: tuple[str, ...], mirror: Path, out: Path) -> dict[str, Any]:
    """The results of lm-eval's own command line, started inside the mirror."""
    from evaluation.mirror.checker_data import nltk_data

    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32",
        "--tasks", ",".join(names), "--device", "cpu", "--batch_size", "1", "--limit", str(PUBLISHED_ITEMS),
        "--output_path", str(out),
    ]  # fmt: skip
    offline = {"HF_DATASETS_CACHE": str(out / "cache"), "HF_HUB_OFFLINE": "1", "NLTK_DATA": str(nltk_data())}
    subprocess.run(command, check=True, capture_output=True, env=os.environ | offline, cwd=mirror)
    return dict(json.loads(next(out.rglob("results*.json")).read_text())["results"])


@pytest.mark.long
def test_translations_are_scored_as_by_lm_evals_command_line(
    new_model: Callable[..., Path], mirror: Path, tmp_path: Path, run: Run
) -> None:
    """Risk: lm-eval's command line finds other data in a mirror of translations, or other few-shot examples."""
    from evaluation.evaluate import EvalOptions, evaluate_models

    model = new_model(tmp_path / "model", seed=3)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config))
    options = EvalOptions(("wmt16-de-en",), limit=PUBLISHED_ITEMS, mirror=mirror)
    (ours,) = evaluate_models({"m": model}, options, run).models
    theirs = by_command_line(model, options.tasks, mirror, tmp_path / "theirs")["wmt16-de-en"]
    assert {row["metric"]: row["value"] for row in ours.results} == {
        metric: theirs[f"{metric},none"] for metric in ("bleu", "chrf", "ter")
    }


def test_translations_over_drawn_items_get_lm_evals_own_figures() -> None:
    import random

    from lm_eval.api import metrics

    from evaluation.statistics.paired import compare_models, over_chosen

    draw = random.Random(1)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "while", "dogs", "ran", "far", "away"]

    def said(least: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, 12)))

    items = [(said(6), said(0)) for _ in range(20)]
    for aggregate in (metrics.bleu, metrics.chrf, metrics.chrfpp, metrics.ter):
        chosen = draw.choices(range(len(items)), k=len(items))
        assert over_chosen(aggregate, items)(chosen) == aggregate([items[number] for number in chosen])
    # Who translates without a fault is better than who writes other words, and that over the same items.
    row = {"task": "t", "metric": "bleu", "filter": "none", "num_fewshot": 0, "value": 0.0, "higher_is_better": True}
    models = [
        (name, [row], {("t", 0): [{"doc_id": n, "bleu": [right, text]} for n, (right, text) in enumerate(pairs)]})
        for name, pairs in (("worse", items), ("right", [(right, right) for right, _ in items]))
    ]
    (found,) = compare_models(models, {"t": {"bleu": metrics.bleu}})
    assert found["test"] == "swap permutation" and found["significant"]
    assert found["difference"] == pytest.approx(100 - metrics.bleu(items))


@pytest.mark.long
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")
@pytest.mark.parametrize("names", PUBLISHED_BY_OUTPUT.values(), ids=PUBLISHED_BY_OUTPUT)
def test_scores_on_published_sets_are_those_of_lm_evals_command_line(
    names: tuple[str, ...], new_model: Callable[..., Path], tmp_path: Path, run: Run
) -> None:
    """Risk: a layout puts a published question otherwise than the hub, or lm-eval's command line finds other data."""
    from evaluation.evaluate import EvalOptions, evaluate_models
    from evaluation.mirror_writer import mirror_task

    model = new_model(tmp_path / "model", seed=3)
    # IFEval's answers may have 1,280 tokens.
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps(config))
    for name in names:
        mirror_task(name, DATA / PUBLISHED[name], tmp_path / "mirror")
    options = EvalOptions(names, limit=PUBLISHED_ITEMS, mirror=tmp_path / "mirror")
    (ours,) = evaluate_models({"m": model}, options, run).models
    theirs = by_command_line(model, names, tmp_path / "mirror", tmp_path / "theirs")
    assert {row["task"] for row in ours.results} == set(names)
    for row in ours.results:
        assert row["value"] == theirs[row["task"]][f"{row['metric']},{row['filter']}"], row


def test_the_command_scores_models_at_each_number_of_shots_and_compares_them(
    new_model: Callable[..., Path], model_dir: Path, mirror: Path, tmp_path: Path
) -> None:
    """Truthfulness too, as before and after alignment: mc2, a share of likelihoods, differs between any two models."""
    other = new_model(tmp_path / "other", seed=3)
    answer = stemma(
        "eval", model_dir, other, "--tasks", "arc_easy,truthfulqa_mc1,truthfulqa_mc2", "--num-fewshot", "0,2",
        "--limit", "8", "--mirror", mirror, "--failure-classes", "negation", "--root", tmp_path / "store",
        env=environment(),
    )  # fmt: skip
    assert answer.code == 0 and answer.document["status"] == "done", answer.stderr
    model, second = answer.document["models"]
    values = [
        {(row["task"], row["metric"], row["num_fewshot"]): row["value"] for row in one["results"]}
        for one in (model, second)
    ]
    compared = answer.document["comparisons"]
    asked = {(row["task"], row["metric"], row["num_fewshot"]) for row in compared}
    # A task whose YAML says 0 keeps 0 shots.
    assert asked == values[0].keys() == values[1].keys() >= {("truthfulqa_mc1", "acc", 0), ("truthfulqa_mc2", "acc", 0)}
    for row in compared:
        key = (row["task"], row["metric"], row["num_fewshot"])
        assert (row["first"], row["second"]) == (str(model_dir), str(other))
        assert row["difference"] == pytest.approx(values[1][key] - values[0][key], abs=1e-6)
        assert row["low"] <= row["difference"] <= row["high"] and 0 <= row["p_value"] <= row["p_holm"] <= 1
        assert row["significant"] is (row["p_holm"] < 0.05)
    assert values[0]["truthfulqa_mc2", "acc", 0] != values[1]["truthfulqa_mc2", "acc", 0]
    assert model["model"] == str(model_dir)
    rows = {(row["metric"], row["num_fewshot"]): row for row in model["results"] if row["task"] == "arc_easy"}
    assert rows.keys() == {("acc", 0), ("acc", 2), ("acc_norm", 0), ("acc_norm", 2)}
    for row in rows.values():
        assert row["n"] == 8 and row["low"] <= row["value"] <= row["high"] and row["stderr"] >= 0
    (failures,) = [row for row in model["results"] if row["metric"] == "failure_rate"]
    assert failures["task"] == "negation" and failures["value"] == model["failure_classes"]["negation"]["value"]
    tests = model["failure_classes"]["negation"]["tests"]
    assert tests.keys() >= {"opposite", "doubly_negated"}
    assert failures["n"] == 8 == sum(test["n"] for test in tests.values()), "--limit bounds them as it bounds tasks"
    wrong = stemma("eval", model_dir, "--failure-classes", "negatoin", env=environment())
    assert wrong.code == 2 and "one of arithmetic_digits" in wrong.document["errors"][0]["message"]


@pytest.mark.long
def test_what_a_model_gave_is_kept_when_a_later_one_fails(
    new_model: Callable[..., Path], mirror: Path, tmp_path: Path
) -> None:
    """The second model's weights are cut short, and whole when the same question is asked again."""
    first, second = (new_model(tmp_path / name, seed=seed) for name, seed in (("first", 1), ("second", 2)))
    weights = (second / "model.safetensors").read_bytes()
    asked = ["--tasks", "arc_easy", "--limit", "6", "--failure-classes", "copying", "--mirror", mirror]

    def ask(*models: Path, store: str = "store") -> Any:
        return stemma("eval", *models, *asked, "--root", tmp_path / store, env=environment())

    (second / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    failed = ask(first, second)
    assert failed.code == 1 and failed.document["errors"][0]["code"] == "bad_model"
    kept = tmp_path / "store" / ".work" / "eval"
    assert f"1 of 2 models scored, kept in {kept}" in failed.stderr
    (second / "model.safetensors").write_bytes(weights)
    again, fresh = ask(first, second), ask(first, second, store="other")
    assert again.code == 0 and f"{second}: arc_easy" in again.stderr and f"{first}: arc_easy" not in again.stderr
    assert f"{first}: arc_easy" in fresh.stderr and again.document["comparisons"]
    assert again.document == fresh.document and not list(kept.iterdir())


def test_a_tokenizer_that_does_not_fit_is_named_before_a_model_is_asked(
    new_model: Callable[..., Path], mirror: Path, tmp_path: Path, run: Run
) -> None:
    """A tokenizer with ids beyond the embedding, in config.json and, where that says otherwise, in the weights."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from evaluation.generation.language_model import check_tokenizers, load_model, token_log_likelihoods

    good, small = (new_model(tmp_path / name, seed=1) for name in ("good", "small"))
    model = LlamaForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(300, mean_resizing=False)
    model.save_pretrained(small)
    rows = len(AutoTokenizer.from_pretrained(small))
    failed = stemma(
        "eval", good, small, "--tasks", "arc_easy", "--mirror", mirror, "--root", tmp_path / "store", env=environment()
    )
    (problem,) = failed.document["errors"]
    assert failed.code == 1 and problem["code"] == "tokenizer_does_not_fit" and problem["path"] == str(small)
    assert f"ids up to {rows - 1}" in problem["message"] and "has 300 rows" in problem["message"]
    assert "that the model was trained with" in problem["fix"] and "arc_easy" not in failed.stderr, "none was asked"
    for stage in (load_model, lambda folder, run: check_tokenizers([folder])):
        with pytest.raises(StageError, match="has 300 rows"):
            stage(small, run)
    # Shards of another tokenizer: ids that this model has never seen.
    with pytest.raises(StageError, match=f"memorisation: found the id 900, .* {rows} rows") as error:
        token_log_likelihoods(load_model(good, run), [[1, 2], [3, 900]], run, "memorisation")
    assert error.value.problems[0].code == "id_out_of_range"
    settings = json.loads((good / "tokenizer_config.json").read_text())
    (good / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": None, "eos_token": None}))
    with pytest.raises(StageError, match="neither a BOS nor an EOS token"):
        load_model(good, run)


@pytest.mark.long
def test_a_mirror_that_the_command_fills_serves_the_benchmarks_of_a_pipeline(
    model_dir: Path, tmp_path: Path, run: Run
) -> None:
    """With the scores of `stemma eval`, and the number of shots that the config says."""
    from evaluation.benchmarks import benchmarks
    from evaluation.config import BenchmarksConfig
    from evaluation.evaluate import EvalOptions, evaluate_models

    mirror, out = tmp_path / "mirror", tmp_path / "out"
    config = {"tasks": ["arc_easy"], "tasks_mirror": str(mirror), "limit": 6, "num_fewshot": 2, "seed": 5}
    with pytest.raises(StageError, match="arc_easy reads the dataset allenai/ai2_arc") as missing:
        benchmarks(BenchmarksConfig.model_validate(config), {"model": model_dir}, out, run)
    assert missing.value.problems[0].code == "missing_task_data"
    source = write_rows(tmp_path / "arc_easy.jsonl", ARC)
    answer = stemma("mirror", "arc_easy", source, "--mirror", mirror, "--shots", "4", env=environment())
    assert answer.code == 0, answer.stderr
    told = answer.document
    assert told["mirror"] == str(mirror) and told["scored_split"] == "test" and told["put_aside"] == 4
    assert told["splits"] == {"test": 20, "train": 4}
    benchmarks(BenchmarksConfig.model_validate(config), {"model": model_dir}, out, run)
    found = json.loads((out / "results.json").read_text())["tasks"]["arc_easy"]
    options = EvalOptions(("arc_easy",), shots=(2,), limit=6, mirror=mirror, seed=5)
    (theirs,) = evaluate_models({"m": model_dir}, options, run).models
    for row in theirs.results:
        assert found[row["metric"]]["value"] == pytest.approx(row["value"], abs=1e-6)
    assert found["acc"]["n"] == 6 and found.keys() == {"acc", "acc_norm"}
    unknown = stemma("mirror", "arc_esy", source, "--mirror", mirror, env=environment())
    assert unknown.code == 2 and unknown.document["errors"][0]["code"] == "unknown_task"


def test_what_cannot_be_asked_is_named_before_a_model_is(mirror: Path) -> None:
    from evaluation.harness.named_tasks import load_named

    with pytest.raises(ConfigError) as unknown:
        load_named(["arc_esy", "openbook_qa"], mirror)
    first, second = unknown.value.problems
    assert "arc_easy" in first.fix and "openbookqa" in second.fix and unknown.value.exit_code == 2
    with pytest.raises(StageError) as missing:
        load_named(["piqa", "arc_easy"], mirror)
    (problem,) = missing.value.problems
    assert problem.code == "missing_task_data" and str(mirror / "baber/piqa") in problem.message
    assert f"stemma mirror piqa FROM --mirror {mirror}" in problem.fix
    # A group is not mirrored, its tasks are.
    with pytest.raises(StageError) as missing:
        load_named(["mmlu"], mirror)
    (problem,) = missing.value.problems
    assert problem.fix.startswith("stemma mirror mmlu_abstract_algebra FROM") and "each task of mmlu" in problem.fix


def test_everything_that_is_wrong_with_a_command_is_told_at_once(tmp_path: Path) -> None:
    answer = stemma(
        "eval", tmp_path / "gone", "sft/1f2e", "--tasks", "arc_esy,piqa", "--num-fewshot", "0,few",
        "--failure-classes", "negations", "--root", tmp_path / "store", env=environment(),
    )  # fmt: skip
    told = {problem["code"]: problem for problem in answer.document["errors"]}
    assert answer.code == 2 and answer.document["status"] == "invalid"
    assert [problem["path"] for problem in answer.document["errors"]].count("--tasks") == 1
    assert "arc_easy" in told["unknown_task"]["fix"]
    said = str(answer.document["errors"])
    assert all(one in said for one in (str(tmp_path / "gone"), "sft/1f2e", "few", "negations")), said


def test_more_shots_than_were_put_aside_are_refused(mirror: Path) -> None:
    from evaluation.harness.named_tasks import load_named, set_shots, shots_problem

    (task,) = load_named(["arc_easy"], mirror)
    for shots, refused in ((6, False), (7, True)):
        set_shots(task, shots, seed=1)
        assert bool(shots_problem(task, shots)) is refused
    shown = {row["question"] for row in task.sampler.df}
    assert not shown & {row["question"] for row in task.eval_docs}
