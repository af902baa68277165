"""Benchmarks give lm-eval's own scores, with intervals and chance levels, the same each time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from evaluation.benchmarks import benchmarks
from evaluation.config import DATA_DIR, BenchmarksConfig
from infra.errors import Cancelled, StageError
from infra.run import Run, open_journal, read_journal
from tests.support.chat_templates import tokenizer_in
from tests.support.open_models import save_model


def config_of(*tasks: Any, **options: Any) -> BenchmarksConfig:
    return BenchmarksConfig.model_validate({"tasks": tasks, **options})


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


QUESTIONS = [
    {"query": f"What is {n} plus one?", "choices": [str(n + 1), str(n + 2), "none", "a door"], "gold": n % 4}
    for n in range(20)
]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """lm-eval's own command, which takes most of its time for reading the 12,000 files of its own tasks: it knows those
    of `--include_path` alone."""
    import lm_eval.tasks
    from lm_eval.__main__ import cli_evaluate

    named = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", named)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # it sets this for its process, which is that of the tests

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
        cli_evaluate()

    return call


def test_scores_are_those_of_lm_evals_own_command_line(
    model_dir: Path, tmp_path: Path, run: Run, command_line: Callable[..., None]
) -> None:

    from evaluation.harness.tasks import own_cache, task_spec

    rows = [
        {"text": "The function returns a string. " * repeats, "domain": domain}
        for repeats, domain in ((1, "short"), (2, "short"), (20, "long"))
    ]
    texts = {"name": "texts", "kind": "text", "path": write_rows(tmp_path / "texts.jsonl", rows)}
    config = config_of("minimal_pairs", "cloze", texts, limit=50)
    result = benchmarks(config, {"model": model_dir}, tmp_path / "out", run)
    specs = tmp_path / "specs"
    specs.mkdir()
    for task in config.tasks:
        (specs / f"{task.name}.yaml").write_text(yaml.safe_dump(task_spec(task)))
    command = [
        "--model", "hf", "--model_args", f"pretrained={model_dir},dtype=float32",
        "--tasks", "minimal_pairs,cloze,texts", "--include_path", str(specs), "--device", "cpu", "--batch_size", "8",
        "--limit", "50",
        "--output_path", str(tmp_path / "theirs"),
    ]  # fmt: skip
    with own_cache(tmp_path / "cache"):
        command_line(*command)
    theirs = json.loads(next((tmp_path / "theirs").rglob("results*.json")).read_text())["results"]
    ours = results_of(tmp_path / "out")["tasks"]
    for task, metric in (("minimal_pairs", "acc"), ("cloze", "acc"), ("cloze", "acc_norm")):
        assert ours[task][metric]["value"] == pytest.approx(theirs[task][f"{metric},none"], abs=1e-6)
        assert ours[task][metric]["stderr"] == pytest.approx(theirs[task][f"{metric}_stderr,none"], abs=1e-6)
    for metric in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        assert ours["texts"][metric]["value"] == pytest.approx(theirs["texts"][f"{metric},none"], rel=1e-5)
        assert ours["texts"][metric]["low"] < ours["texts"][metric]["value"] < ours["texts"][metric]["high"]
    domains = results_of(tmp_path / "out")["domains"]["texts"]
    bits = {name: one["value"] * one["bytes"] for name, one in domains.items()}
    assert {name: one["n"] for name, one in domains.items()} == {"short": 2, "long": 1}
    size = sum(one["bytes"] for one in domains.values())
    assert sum(bits.values()) / size == pytest.approx(ours["texts"]["bits_per_byte"]["value"], rel=1e-5)
    assert result.figures["texts_bits_per_byte_high"] == ours["texts"]["bits_per_byte"]["high"]
    assert result.figures["texts_short_bits_per_byte"] == domains["short"]["value"] != domains["long"]["value"]
    assert result.figures["cloze_accuracy"] == ours["cloze"]["acc"]["value"]


def test_questions_by_a_models_template_are_those_of_lm_evals_own_command_line(
    tmp_path: Path, run: Run, command_line: Callable[..., None]
) -> None:

    from evaluation.harness.tasks import own_cache, task_spec

    model = save_model(tmp_path / "model", tokenizer_in("llama3"), positions=1024)
    task = {
        "name": "sums", "kind": "multiple_choice",
        "path": write_rows(tmp_path / "questions.jsonl", QUESTIONS),
        "shots_path": write_rows(tmp_path / "solved.jsonl", [one | {"query": one["query"] + "!"} for one in QUESTIONS]),
    }  # fmt: skip
    config = config_of(task, "cloze", num_fewshot=2, limit=8, chat_template=True, system_instruction="Be short.")
    benchmarks(config, {"model": model}, tmp_path / "out", run)
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "sums.yaml").write_text(yaml.safe_dump(task_spec(config.tasks[0], 2)))
    command = [
        "--model", "hf", "--model_args", f"pretrained={model},dtype=float32",
        "--tasks", "sums", "--include_path", str(specs), "--device", "cpu", "--batch_size", "8", "--limit", "8",
        "--num_fewshot", "2", "--seed", f"0,1234,1234,{config.seed}", "--apply_chat_template",
        "--fewshot_as_multiturn", "True", "--system_instruction", "Be short.",
        "--output_path", str(tmp_path / "theirs"), "--log_samples",
    ]  # fmt: skip
    with own_cache(tmp_path / "cache"):
        command_line(*command)
    theirs = json.loads(next((tmp_path / "theirs").rglob("results*.json")).read_text())["results"]["sums"]
    ours = results_of(tmp_path / "out")["tasks"]
    for metric in ("acc", "acc_norm"):
        assert ours["sums"][metric]["value"] == pytest.approx(theirs[f"{metric},none"], abs=1e-6)
    samples = [
        json.loads(line) for line in next((tmp_path / "theirs").rglob("samples*.jsonl")).read_text().splitlines()
    ]
    prompts = {one["arg_0"] for sample in samples for one in sample["arguments"].values()}
    assert all(prompt.startswith("<|begin_of_text|>") for prompt in prompts)
    assert {prompt.count("<|start_header_id|>assistant") for prompt in prompts} == {3}
    assert all("Be short." in one for one in prompts)
    mine = [json.loads(line) for line in (tmp_path / "out/aux/samples_sums.jsonl").read_text().splitlines()]
    for its, own in zip(sorted(samples, key=lambda one: one["doc_id"]), mine, strict=True):
        likelihoods = [float(one[0]) for one in its["filtered_resps"]]
        assert [float(one[0]) for one in own["responses"]] == pytest.approx(likelihoods, rel=1e-4)


def test_a_model_without_a_chat_template_and_a_template_without_a_system(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError) as refused:
        benchmarks(config_of("cloze", limit=2, chat_template=True), {"model": model_dir}, tmp_path, Run(tmp_path / "w"))
    assert [one.code for one in refused.value.problems] == ["no_chat_template"]
    with pytest.raises(ValueError, match="only a chat has turns"):
        config_of("cloze", fewshot_as_multiturn=True)
    model = save_model(tmp_path / "model", tokenizer_in("gemma"), positions=1024)
    config = config_of("cloze", limit=2, chat_template=True, system_instruction="Be short.")
    with open_journal(tmp_path / "journal.jsonl") as journal:
        benchmarks(config, {"model": model}, tmp_path / "model", Run(tmp_path / "work", journal=journal))
    events = [one for one in read_journal(tmp_path / "journal.jsonl") if one.get("name") == "no_system_message"]
    assert len(events) == 1 and "refuses a system message" in events[0]["message"]


def test_results_tell_interval_chance_and_parts(model_dir: Path, tmp_path: Path, run: Run) -> None:
    benchmarks(config_of("minimal_pairs", "cloze"), {"model": model_dir}, tmp_path / "out", run)
    results = results_of(tmp_path / "out")
    pairs, cloze = results["tasks"]["minimal_pairs"]["acc"], results["tasks"]["cloze"]["acc"]
    assert pairs["chance"] == 0.5 and 0.25 < cloze["chance"] < 0.3
    assert pairs["low"] < pairs["value"] < pairs["high"]
    parts = results["parts"]["minimal_pairs"]
    assert sum(part["n"] for part in parts.values()) == pairs["n"]
    right = sum(round(part["value"] * part["n"]) for part in parts.values())
    assert right == round(pairs["value"] * pairs["n"])


def test_the_same_again_gives_the_same_bytes_at_any_batch_size(model_dir: Path, tmp_path: Path) -> None:
    for name, batch_size in (("first", 32), ("second", 7)):
        config = config_of("cloze", limit=40, batch_size=batch_size, num_fewshot=2)
        benchmarks(config, {"model": model_dir}, tmp_path / name, Run(tmp_path / f"{name}.work"))
    assert (tmp_path / "first/results.json").read_bytes() == (tmp_path / "second/results.json").read_bytes()


def test_a_file_of_questions(model_dir: Path, tmp_path: Path, run: Run) -> None:
    path = write_rows(tmp_path / "questions.jsonl", QUESTIONS)
    config = config_of({"name": "sums", "kind": "multiple_choice", "path": path}, limit=12)
    benchmarks(config, {"model": model_dir}, tmp_path / "out", run)
    accuracy = results_of(tmp_path / "out")["tasks"]["sums"]["acc"]
    assert accuracy["n"] == 12 and accuracy["chance"] == 0.25
    samples = [json.loads(line) for line in (tmp_path / "out/aux/samples_sums.jsonl").read_text().splitlines()]
    assert [sample["doc"]["query"] for sample in samples] == [row["query"] for row in QUESTIONS[:12]]
    assert sum(sample["acc"] for sample in samples) / 12 == pytest.approx(accuracy["value"], abs=1e-6)


@pytest.mark.parametrize("row", [{"text": "One two three four"}, {"context": "One two three", "continuation": "four"}])
def test_cloze_asks_for_the_last_word_or_the_continuation(
    row: dict[str, str], model_dir: Path, tmp_path: Path, run: Run
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row] * 3)
    benchmarks(config_of({"name": "last", "kind": "cloze", "path": path}), {"model": model_dir}, tmp_path / "out", run)
    sample = json.loads((tmp_path / "out/aux/samples_last.jsonl").read_text().splitlines()[0])
    assert sample["target"] == "four"
    assert "chance" not in results_of(tmp_path / "out")["tasks"]["last"]["acc"]


@pytest.mark.parametrize(
    ("kind", "row", "options"),
    [
        ("text", {"text": '["a", "b"]'}, {}),
        ("cloze", {"context": "The list is", "continuation": "[1, 2]"}, {}),
        ("multiple_choice", {"query": "12", "choices": ["13", "14"], "gold": 0}, {"query_suffix": ""}),
    ],
)
def test_text_that_looks_like_a_number_or_a_list_is_asked_as_it_is(
    kind: str, row: dict[str, Any], options: dict[str, str], model_dir: Path, tmp_path: Path, run: Run
) -> None:
    task = {"name": "raw", "kind": kind, "path": write_rows(tmp_path / "rows.jsonl", [row] * 2), **options}
    benchmarks(config_of(task), {"model": model_dir}, tmp_path / "out", run)
    samples = [json.loads(line) for line in (tmp_path / "out/aux/samples_raw.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    wanted = {"text": row.get("text"), "cloze": row.get("continuation"), "multiple_choice": row.get("gold")}
    assert samples[0]["target"] == wanted[kind]


def test_a_tie_between_good_and_bad_is_not_right(model_dir: Path, tmp_path: Path, run: Run) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"good": "The same.", "bad": "The same."}] * 4)
    config = config_of({"name": "ties", "kind": "minimal_pairs", "path": path})
    result = benchmarks(config, {"model": model_dir}, tmp_path / "out", run)
    assert result.figures["ties_accuracy"] == 0.0 and result.figures["ties_accuracy_high"] > 0.4


def test_a_task_in_lm_evals_own_yaml_with_data_beside_it(model_dir: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "my tasks"
    folder.mkdir()
    write_rows(folder / "rows.jsonl", QUESTIONS)
    (folder / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{query}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list: [{metric: acc}]\n"
    )
    for path in (folder, folder / "sums.yaml"):
        out = tmp_path / path.name.replace(" ", "")
        out.mkdir()
        config = config_of({"name": "sums", "kind": "lm_eval", "path": str(path)}, limit=8)
        result = benchmarks(config, {"model": model_dir}, out, run)
        assert result.figures["sums_accuracy_chance"] == 0.25


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("multiple_choice", "not json\n", "mine.yaml:1: expected a JSON object"),
        ("multiple_choice", '\n{"question": "?"}\n', "mine.yaml:2: expected `query` .*; it has question"),
        (
            "multiple_choice",
            '{"query": "?", "choices": ["a"], "gold": 0}\n',
            "`choices`, a list of at least two strings",
        ),
        (
            "multiple_choice",
            '{"query": "?", "choices": ["a", "b"], "gold": 2}\n',
            r"`gold`, a whole number from 0 to 1 \(found 2\)",
        ),
        ("cloze", '{"text": "One"}\n', "`text`, a string of at least two words"),
        ("cloze", '{"context": "One"}\n', "`continuation`, a string"),
        ("minimal_pairs", '{"good": "A.", "bad": 3}\n', "`bad`, a string"),
        ("minimal_pairs", "\n", "expected at least one item"),
        ("minimal_pairs", "\x00\xff", "expected UTF-8: byte 1 is 0xff"),
        ("lm_eval", "task: another\n", "benchmarks.tasks.1: .* it defines another"),
        ("lm_eval", "task: mine\ndataset_path: json\ntest_split: test\n", "lm-eval cannot read task mine"),
    ],
)
def test_a_file_that_is_no_task_is_named(
    kind: str, content: str, expected: str, model_dir: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content.encode("latin-1"))
    config = config_of("cloze", {"name": "mine", "kind": kind, "path": str(path)}, limit=2)
    with pytest.raises(StageError, match=expected):
        benchmarks(config, {"model": model_dir}, tmp_path / "out", run)


def test_a_folder_without_a_model_is_named(tmp_path: Path, run: Run) -> None:
    with pytest.raises(StageError, match="expected a Hugging Face model folder"):
        benchmarks(BenchmarksConfig(), {"model": tmp_path}, tmp_path / "out", run)


def test_cancelling_stops_between_batches(model_dir: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "work", is_cancelled=lambda: True)
    with pytest.raises(Cancelled):
        benchmarks(BenchmarksConfig(), {"model": model_dir}, tmp_path / "out", run)


def test_progress_counts_requests(model_dir: Path, tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as journal:
        run = Run(tmp_path / "work", journal=journal)
        benchmarks(config_of("cloze", limit=10), {"model": model_dir}, tmp_path / "out", run)
        journal.seek(0)
        lines = [json.loads(line) for line in journal]
    progress = [line for line in lines if line["kind"] == "progress"]
    items = [json.loads(line) for line in (DATA_DIR / "cloze.jsonl").read_text().splitlines()[:10]]
    requests = sum(len(item["choices"]) for item in items)
    assert progress[-1]["total"] == requests and 0 < progress[-1]["done"] <= requests


def test_each_number_of_shots_is_a_score_of_its_own(model_dir: Path, tmp_path: Path, run: Run) -> None:
    task = {"name": "plus", "kind": "multiple_choice", "path": write_rows(tmp_path / "q.jsonl", QUESTIONS)}
    swept, alone = tmp_path / "swept", tmp_path / "alone"
    for out, options in ((swept, {"shots": [2, 0, 1, 4]}), (alone, {"num_fewshot": 2})):
        out.mkdir()
        benchmarks(config_of(task, **options), {"model": model_dir}, out, run)
    found = results_of(swept)
    assert list(found["shots"]) == ["0", "1", "2", "4"] and found["shots"]["0"] == found["tasks"]
    assert found["shots"]["2"] == results_of(alone)["tasks"]
    assert any(one != found["tasks"] for one in found["shots"].values())
    assert "shots" not in results_of(alone)
    assert {one["plus"]["acc"]["n"] for one in found["shots"].values()} == {15}  # a fourth is put aside


def test_the_column_without_shots_is_without_those_of_a_tasks_own_yaml(
    model_dir: Path, tmp_path: Path, run: Run
) -> None:
    write_rows(tmp_path / "rows.jsonl", QUESTIONS)
    write_rows(tmp_path / "other.jsonl", [{**row, "query": "Another?"} for row in QUESTIONS[:4]])
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl, train: other.jsonl}}\n"
        "test_split: test\nfewshot_split: train\nnum_fewshot: 2\noutput_type: loglikelihood\n"
        "doc_to_text: '{{query}}'\ndoc_to_target: ' none'\n"
        "metric_list: [{metric: perplexity, aggregation: perplexity}]\n"
    )
    task = {"name": "sums", "kind": "lm_eval", "path": str(tmp_path / "sums.yaml")}
    benchmarks(config_of(task, shots=[0, 1, 2]), {"model": model_dir}, tmp_path / "out", run)
    found = results_of(tmp_path / "out")
    none, one, two = (found["shots"][str(shots)]["sums"]["perplexity"]["value"] for shots in (0, 1, 2))
    assert len({none, one, two}) == 3
    assert found["tasks"]["sums"]["perplexity"]["value"] == two, "num_fewshot: 0 leaves the task its own number"


def questions_asked(config: BenchmarksConfig) -> tuple[list[str], set[str]]:
    """(questions that are scored, those that stand solved before one of them) of a config's one task."""
    from evaluation.harness.tasks import _load, _set_fewshot, quiet

    with quiet():
        (task,) = _load(0, config.tasks[0], None, config.num_fewshot, config.rows_for_shots)
        _set_fewshot(task, config)
        prompts = [task.fewshot_context(doc, config.num_fewshot) for doc in task.eval_docs]
    *_, asked = zip(*(prompt.split("\n\n") for prompt in prompts), strict=True)
    solved = {shot.partition("\nAnswer:")[0] for prompt in prompts for shot in prompt.split("\n\n")[:-1]}
    return [question.removesuffix("\nAnswer:") for question in asked], solved


def test_what_stands_solved_before_a_question_is_never_scored(tmp_path: Path) -> None:
    task = {"name": "plus", "kind": "multiple_choice", "path": write_rows(tmp_path / "q.jsonl", QUESTIONS)}
    everything = [str(row["query"]) for row in QUESTIONS]
    assert questions_asked(config_of(task)) == (everything, set())
    asked, solved = questions_asked(config_of(task, num_fewshot=3))
    # Evenly over the file, whose parts may lie one after the other.
    assert solved == {everything[number] for number in (2, 6, 10, 14, 18)}
    assert asked == [question for question in everything if question not in solved]
    # Of a sweep the column without shots is of the same rows.
    assert questions_asked(config_of(task, shots=[0, 3])) == (asked, set())

    # A row that is there twice does not stand solved before itself.
    twice = {**task, "path": write_rows(tmp_path / "twice.jsonl", [*QUESTIONS[:19], QUESTIONS[2]])}
    assert everything[2] not in questions_asked(config_of(twice, num_fewshot=3))[1]

    others = [{**row, "query": f"Another: {row['query']}"} for row in QUESTIONS[:3]]
    named = {**task, "shots_path": write_rows(tmp_path / "shots.jsonl", [*others, QUESTIONS[0]])}
    asked, solved = questions_asked(config_of(named, num_fewshot=3))
    assert asked == everything and solved == {str(row["query"]) for row in others}
    for wrong, more, said in (
        (named, 4, "has 3 rows that plus does not score"),
        (task, 6, "only 5 of the 20 rows of"),
    ):
        with pytest.raises(StageError, match=said) as refused:
            questions_asked(config_of(wrong, num_fewshot=more))
        assert refused.value.problems[0].code == "no_shots"
    with pytest.raises(ValueError, match="shots_path is for tasks of the kinds multiple_choice"):
        config_of({"name": "cloze", "shots_path": "x.jsonl"})


def test_only_configs_that_ask_for_shots_put_rows_aside_and_have_another_identity(tmp_path: Path) -> None:
    from infra.fingerprint import canonical

    task = {"name": "plus", "kind": "multiple_choice", "path": str(tmp_path / "q.jsonl")}
    assert canonical(BenchmarksConfig()) == {}
    assert canonical(config_of("cloze", task))["tasks"][1] == {"name": "plus", "kind": "multiple_choice"}
    assert canonical(config_of("cloze", num_fewshot=1))["rows_for_shots"] == 20
    assert canonical(config_of("cloze", shots=[0, 32]))["rows_for_shots"] == 32
    named = config_of({**task, "shots_path": str(tmp_path / "shots.jsonl")}, num_fewshot=1)
    assert canonical(named).keys() == {"tasks", "num_fewshot"}
    assert [source.key for source in named.sources()] == ["benchmarks.tasks.0.path", "benchmarks.tasks.0.shots_path"]


def test_a_template_is_compiled_once_for_all_items_of_a_task() -> None:
    from lm_eval import utils

    from evaluation.harness.tasks import quiet

    template = "{{ question }} is asked"
    with quiet():
        assert [utils.apply_template(template, {"question": one}) for one in "ab"] == ["a is asked", "b is asked"]
        assert utils.env.from_string(template) is utils.env.from_string(template)
    assert utils.env.from_string(template) is not utils.env.from_string(template)


def test_a_yaml_without_other_rows_for_shots_is_refused(model_dir: Path, tmp_path: Path, run: Run) -> None:
    write_rows(tmp_path / "rows.jsonl", QUESTIONS)
    write_rows(tmp_path / "other.jsonl", [{**row, "query": "Another?"} for row in QUESTIONS[:4]])
    head = "task: sums\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
    tail = "doc_to_text: '{{query}}'\ndoc_to_choice: choices\ndoc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    config = config_of({"name": "sums", "kind": "lm_eval", "path": str(tmp_path / "sums.yaml")}, num_fewshot=2, limit=2)
    files = "dataset_kwargs: {data_files: {test: rows.jsonl}}\n"
    (tmp_path / "sums.yaml").write_text(head + files + tail)
    with pytest.raises(StageError, match="has only the scored split"):
        benchmarks(config, {"model": model_dir}, tmp_path / "out", run)
    (tmp_path / "sums.yaml").write_text(head + files.replace("}}", ", train: other.jsonl}}") + tail)
    benchmarks(config, {"model": model_dir}, tmp_path / "out", run)
    assert results_of(tmp_path / "out")["tasks"]["sums"]["acc"]["n"] == 2


def test_items_are_counted_once_however_many_filters_read_the_answers(
    model_dir: Path, tmp_path: Path, run: Run
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"q": f"{n} plus one is", "a": str(n + 1)} for n in range(6)])
    (tmp_path / "plus.yaml").write_text(
        "task: plus\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n"
        "filter_list:\n- {name: first, filter: [{function: take_first}]}\n"
        "- {name: number, filter: [{function: regex, regex_pattern: '(\\d+)'}, {function: take_first}]}\n"
    )
    config = config_of({"name": "plus", "kind": "lm_eval", "path": str(tmp_path / "plus.yaml")})
    benchmarks(config, {"model": model_dir}, tmp_path / "out", run)
    found = results_of(tmp_path / "out")["tasks"]["plus"]
    assert {name: one["n"] for name, one in found.items()} == {"exact_match_first": 6, "exact_match_number": 6}


def test_an_accuracy_that_is_a_share_of_likelihood_is_no_share_of_items(tmp_path: Path) -> None:
    """truthfulqa_mc2's `acc`: one model is 0.02 above the other on most items, and 0.01 below on the rest."""
    from evaluation.benchmarks import task_metrics
    from evaluation.results.artifacts import Artifact
    from evaluation.results.comparison import paired_accuracy
    from evaluation.statistics.calibration import calibration

    before = [0.3 + 0.005 * (n % 40) for n in range(80)]
    after = [score + (0.02 if n % 4 else -0.01) for n, score in enumerate(before)]
    samples = [
        {"doc_id": n, "acc": score, "filtered_resps": [(-1.0, True), (-2.0, False)], "target": 0}
        for n, score in enumerate(before)
    ]
    found = {
        "results": {"mc2": {"acc,none": sum(before) / 80, "acc_stderr,none": 0.01}},
        "samples": {"mc2": samples},
        "configs": {"mc2": {"output_type": "multiple_choice"}},
    }
    told = task_metrics(found, "mc2", 0.95)["acc"]
    assert told["high"] - told["low"] == pytest.approx(2 * 1.96 * 0.01, rel=1e-3) and "chance" not in told
    assert calibration(samples) is None
    artifacts = []
    for name, scores in (("first", before), ("second", after)):
        (tmp_path / name / "aux").mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps({"tasks": {"mc2": {}}}))
        write_rows(
            tmp_path / name / "aux" / "samples_mc2.jsonl",
            [{**one, "acc": s} for one, s in zip(samples, scores, strict=True)],
        )
        artifacts.append(Artifact("benchmarks", tmp_path / name, None))
    (one,) = paired_accuracy(*artifacts)
    assert one.difference.value == pytest.approx(one.second - one.first) == pytest.approx(0.0125)
    assert 0.008 < one.difference.low < one.difference.high < 0.017 and one.p_value < 0.001


def test_an_untrained_model_of_the_shape_is_the_floor_and_is_measured_once(
    model_dir: Path, new_model: Any, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice is as likely a token, so that it takes the shortest: here the right one, always."""
    from evaluation.generation import untrained

    monkeypatch.setattr(untrained, "_CACHE", tmp_path / "cache")
    made: list[int] = []
    original = untrained.untrained_like
    monkeypatch.setattr(untrained, "untrained_like", lambda lm, seed: made.append(seed) or original(lm, seed))
    rows = [{"query": f"{n}?", "choices": [f"{n}", "a much longer choice of words"], "gold": 0} for n in range(12)]
    quiz = {"name": "quiz", "kind": "multiple_choice", "path": write_rows(tmp_path / "quiz.jsonl", rows)}
    results = []
    for number, folder in enumerate((model_dir, new_model(tmp_path / "other", seed=5))):
        result = benchmarks(config_of(quiz), {"model": folder}, tmp_path / f"out{number}", run)
        results.append(results_of(tmp_path / f"out{number}"))
        assert result.figures["quiz_accuracy_untrained"] == 1.0 > result.figures["quiz_accuracy_chance"] == 0.5
        assert "untrained" in result.headline
    assert made == [17], "models of one shape share one floor"
    assert results[0]["untrained"] == results[1]["untrained"]
    assert results[0]["headlines"] == {"quiz": "acc_norm"}
