"""What a new user types first, in this process: each answer is true, and a wrong word is met with the right one."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from rich.console import Console

from cli.commands import COMMANDS, GROUPS, stemma
from cli.pipelines.follow import _Table
from cli.pipelines.run import _unfinished
from flows.compare.compare import compare
from flows.compare.compared import find
from flows.runs.journal import JournalRow, RunJournal
from flows.runs.listing import runs
from infra.project import code_state, lock_hash
from infra.store.reference import resolve
from infra.store.store import Store
from tests.evaluation.pipeline import write_pipeline
from tests.support.artifacts import make_artifact
from tests.support.pipelines import full_config
from tests.support.programs.command import write_config

HH = "\n\nHuman: a\n\nAssistant:"


def typed(*words: str | Path) -> Result:
    """What the command prints for a person, and its exit code."""
    return CliRunner().invoke(stemma, [str(word) for word in words])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_check_of_an_empty_store_is_one_line(tmp_path: Path, root: Path) -> None:
    found = typed("check", write_config(tmp_path / "config.yaml", full_config()), "--root", root)
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert lines[:3] == [
        f"nothing is built yet: all 31 stages would be built in {root}",
        "",
        "training would take about",
    ]
    assert [line.split()[0] for line in lines[4:]] == ["pretrain", "sft", "reward_model", "rlhf"]


def test_check_of_a_pipeline_that_never_ran_does_not_compare_it_with_others(built_data: Path, tmp_path: Path) -> None:
    mine = {**yaml.safe_load((built_data / "config.yaml").read_text()), "name": "mine"}
    mine["ingest"]["max_quarantine_share"] = 0.5
    found = typed("check", write_config(tmp_path / "mine.yaml", mine), "--root", built_data / "store")
    assert found.stdout.startswith("nothing is built yet: all 4 stages would be built"), found.stdout


def test_check_shows_artifacts_as_they_are_typed_and_needs_when_asked(built_data: Path) -> None:
    config, store = built_data / "config.yaml", built_data / "store"
    found = typed("check", config, "--root", store, "--set", "tokenizer.vocab_size=420")
    rows = {line.split()[0]: line for line in found.stdout.splitlines() if line}
    clean = next((store / "clean").iterdir()).name
    assert f"clean/{clean[:8]}" in rows["clean"] and clean not in rows["clean"]
    assert "tokenizer.vocab_size changed: 400 → 420" in rows["tokenizer"]
    assert "needs" not in rows["stage"]
    assert "needs" in typed("check", config, "--root", store, "--needs").stdout.splitlines()[0]


def test_check_reads_the_first_record_of_every_source(tmp_path: Path, root: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"asked": "a", "said": "b"}))
    config = {
        "name": "x",
        "ingest": {"read": [{"kind": "files", "paths": ["books"]}, {"kind": "files", "paths": ["gone"]}]},
        "instructions": {"read": [{"kind": "files", "paths": ["pairs.jsonl"]}]},
    }
    found = typed("check", write_config(tmp_path / "config.yaml", config), "--root", root)
    assert found.exit_code == 1
    first, second, third = sorted(line for line in found.stderr.splitlines())
    assert "pairs.jsonl:1: expected the field instruction; the fields are: asked, said" in first
    assert "set instructions.read.0.prompt_field" in first
    assert second.startswith("error: ingest.read.0.paths.0: expected files, found an empty folder")
    assert "gone" in third


def test_why_answers_for_the_settings_that_are_named(built_data: Path) -> None:
    named = ("why", built_data / "config.yaml", "tokenizer", "--root", built_data / "store")
    told = typed(*named, "--set", "tokenizer.vocab_size=400").stdout
    assert "tokenizer was built in run" in told and told.endswith(": the store had none to reuse\n")
    told = typed(*named, "--set", "tokenizer.vocab_size=420").stdout
    assert told == ("tokenizer would be built; no run had these settings: tokenizer.vocab_size changed: 400 → 420\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chekc"], "No such command 'chekc': did you mean check?"),
        (["pretrain.model.preset=gpt-125"], "did you mean gpt-125m? expected one of"),
        (["pretrain.learning_rate=1"], "did you mean pretrain.optimizer.learning_rate?"),
        (["sft.optimizer.learningrate=1"], "did you mean learning_rate?"),
        (["vocab_size=600"], "did you mean tokenizer.vocab_size?"),
        (["pretrain.duration=1000"], "'1000 batches'"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(tmp_path: Path, root: Path, words: list[str], told: str) -> None:
    if "=" in words[0]:
        words = [
            "check",
            str(write_config(tmp_path / "config.yaml", full_config())),
            "--set",
            words[0],
            "--root",
            str(root),
        ]
    found = typed(*words)
    assert found.exit_code == 2 and told in found.stderr


def test_help_has_every_command_once_under_a_heading() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    text = typed("--help").stdout
    assert all(f"\n{heading}:\n" in text for heading in GROUPS)
    assert [len(re.findall(rf"^  {name} ", text, re.MULTILINE)) for name in COMMANDS] == [1] * len(COMMANDS)


def test_resume_still_works_and_is_about_schedules(tmp_path: Path) -> None:
    answer = typed("resume", tmp_path / "gone.yaml")
    assert answer.exit_code == 2 and "no such file" in answer.stderr
    assert answer.stderr.startswith(
        "resume is about schedules: its name is resume-schedule now; stemma run continues a"
    )


def test_run_says_that_it_continues(root: Path) -> None:
    runs_folder = root / "runs"
    assert _unfinished(runs_folder, "chronicle") == ""
    for number, status in enumerate(("failed", "done", "cancelled"), 1):
        journal = RunJournal(runs_folder, f"20261123-07000{number}-000000-1f2e3d")
        journal.begin(pipeline="chronicle")
        journal.end({"status": status, "stages": []})
        expected = {"failed": "which failed", "done": "", "cancelled": "which was cancelled"}[status]
        assert expected in (text := _unfinished(runs_folder, "chronicle")) and bool(text) is bool(expected)
    assert _unfinished(runs_folder, "another") == ""


def test_a_terminal_shows_one_table_of_all_stages() -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=110, height=30, color_system=None)
    table = _Table(shown, debug=False)

    def stage(name: str, status: str, at: float, **values: Any) -> None:
        row = {"headline": "", "seconds": None, **values}
        table.line({"kind": "stage", "stage": name, "status": status, "time": at, **row})

    def text() -> list[str]:
        with shown.capture() as capture:
            shown.print(table._render())
        return [line.rstrip() for line in capture.get().splitlines()]

    table.line({"kind": "begin", "time": 0.0})
    for name in ("ingest", "clean", "pretrain"):
        stage(name, "waiting", 0.0)
    stage("ingest", "built", 3.0, seconds=62.0, headline="7 documents")
    stage("clean", "running", 3.0)
    for at, done in ((4.0, 10), (14.0, 110)):
        progress = {"done": done, "total": 510, "unit": "documents", "note": "1.2 MB/s"}
        table.line({"kind": "progress", "stage": "clean", "time": at, **progress})
    heads, *rows, counts = text()
    assert heads.split() == ["stage", "state", "rate", "left"]
    assert [row.split()[:2] for row in rows] == [["ingest", "built"], ["clean", "running"], ["pretrain", "waiting"]]
    assert rows[0].split()[2:] == ["1", "min", "2", "s"]
    assert "22%" in rows[1] and "10 documents/s" in rows[1] and "40 s" in rows[1]
    assert counts == "1 running · 1 waiting · 1 built"
    # A terminal with fewer lines than stages shows those that run and come next.
    for number in range(60):
        stage(f"more{number}", "waiting", 20.0)
    rows = text()
    assert len(rows) < 30 and rows[1].startswith("clean") and rows[2].startswith("pretrain")


def test_version_names_the_code_and_what_it_is_installed_with() -> None:
    told = typed("--version")
    commit, lock = code_state()["commit"], lock_hash()
    assert told.exit_code == 0 and told.stdout.startswith("stemma ") and f"requirements.lock {lock[:10]}" in told.stdout
    assert not commit or f"commit {str(commit)[:10]}" in told.stdout


def test_init_tells_kinds_of_files_apart_and_writes_a_config_that_check_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "crawl").mkdir()
    records = "".join(json.dumps({"url": f"u{n}", "content": f"Sentence {n}. " * 50}) + "\n" for n in range(500))
    (tmp_path / "crawl" / "a.jsonl").write_text(records)
    (tmp_path / "book one.txt").write_text("".join(f"Once upon a time, on day {day}.\n\n" for day in range(3000)))
    questions = [f"Question {n}" for n in range(12)]
    rows = (json.dumps({"question": text, "answer": "b"}) + "\n" for text in questions)
    (tmp_path / "ask.jsonl").write_text("".join(rows))
    rows = (json.dumps({"prompt": text, "chosen": "b", "rejected": "c"}) + "\n" for text in questions)
    (tmp_path / "best.jsonl").write_text("".join(rows))
    found = typed("init", "crawl", "book one.txt", "ask.jsonl", "best.jsonl", "--to", "mine.yaml")
    assert found.exit_code == 0, found.stderr
    text = (tmp_path / "mine.yaml").read_text()
    assert "paths: [crawl], text_field: content}" in text and "fields: content, url" in text
    assert (
        "paths: ['book one.txt'], cut_characters: 3000}" in text
        and "prompt and response under question and answer" in text
    )
    (crawl,) = [line.split() for line in found.stdout.splitlines() if line.startswith("crawl")]
    assert crawl[1] == "documents" and 450 <= int(crawl[3]) <= 550
    checked = typed("check", "mine.yaml", "--root", tmp_path / "store")
    assert checked.exit_code == 0 and "stages would be built" in checked.stdout, checked.stderr
    again = typed("init", "crawl", "--to", "mine.yaml")
    assert again.exit_code == 2 and "the file exists already" in again.stderr
    dialogues = [HH.replace(" a", f" {text}") for text in questions]
    rows = (json.dumps({"chosen": text + " b", "rejected": text + " c"}) + "\n" for text in dialogues)
    (tmp_path / "hh.jsonl").write_text("".join(rows))
    (tmp_path / "alpaca.json").write_text(
        json.dumps([{"instruction": "Spell it", "input": "freind", "chosen": "friend", "rejected": "freind"}])
    )
    typed("init", "crawl", "ask.jsonl", "hh.jsonl", "alpaca.json", "--to", "dialogues.yaml")
    text = (tmp_path / "dialogues.yaml").read_text()
    assert "paths: [hh.jsonl], dialogue: true}" in text
    assert "paths: [alpaca.json]}" in text, "its input belongs to the prompt, as by default"


def test_init_says_all_that_it_cannot_read_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    found = typed("init", "empty", "gone.txt")
    assert found.exit_code == 2 and len(found.stderr.splitlines()) == 2
    assert "empty: expected non-empty files" in found.stderr and "gone.txt" in found.stderr
    assert not (tmp_path / "pipeline.yaml").exists()


def test_init_says_at_once_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some text.")
    found = typed("init", tmp_path / "text.txt", "--to", tmp_path / "no" / "pipeline.yaml")
    assert found.exit_code == 2
    assert f"{tmp_path / 'no'} is not a writable folder" in found.stderr


@pytest.fixture
def family(root: Path) -> Path:
    """A store with the artifacts of a whole pipeline, plausible and not built."""
    write_pipeline(root)
    (root / "format").write_text("1\n")
    return root


def test_ls_lists_models_by_the_names_that_commands_take(family: Path) -> None:
    found = typed("ls", "models", "--root", family)
    names = [line.split()[0] for line in found.stdout.splitlines()[1:5]]
    assert {name.partition("/")[0] for name in names} == {"pretrain", "sft", "reward_model", "rlhf"}
    assert all(resolve(Store(family, reading=True), name) for name in names)
    assert "held-out loss 4.84 → 3.37" in found.stdout and "4 models" in found.stdout
    assert typed("ls", "--root", family / "nowhere").stdout.startswith("no runs in")


def test_ls_counts_what_a_run_that_still_works_has_built(root: Path) -> None:
    journal = RunJournal(root / "runs", "20261123-070000-000000-1f2e3d")
    journal.begin(pipeline="chronicle")
    for stage, status in (("ingest", "reused"), ("clean", "running"), ("clean", "built"), ("shard", "running")):
        journal.row(JournalRow(stage, status, fingerprint="0" * 16, digest="0" * 64))  # type: ignore[arg-type]
    (root / "format").write_text("1\n")
    (row,) = runs(Store(root, reading=True))
    assert (row["status"], row["built"], row["reused"]) == ("running", 1, 1) and row["seconds"] < 3600


def test_open_names_a_file_that_can_be_opened_in_a_folder_with_spaces(family: Path) -> None:
    spaced = family.rename(family.with_name("a store"))
    assert Path(typed("open", "card", "--print", "--root", spaced).stdout.rstrip("\n")).parent.is_dir()


def test_open_says_where_the_page_is_or_how_to_come_by_it(family: Path, root: Path) -> None:
    card = next((family / "register").iterdir()) / "MODEL_CARD.md"
    assert typed("open", "card", "--print", "--root", family).stdout == f"{card}\n"
    missing = typed("open", "report", "--root", family)
    assert missing.exit_code == 2 and "run a pipeline with the section report:" in missing.stderr


def test_a_shell_completes_commands_and_artifacts(family: Path) -> None:
    bash = ShellComplete(stemma, {}, "stemma", "_STEMMA_COMPLETE")

    def completed(words: list[str], beginning: str) -> set[str]:
        return {item.value for item in bash.get_completions(words, beginning)}

    assert completed([], "ch") == {"check", "chat"}
    assert "--set" in completed(["run"], "--s")
    assert completed(["chat", "--root", str(family)], "s") == {"safety", "sft", "shard"}
    (whole,) = [folder.name for folder in (family / "sft").iterdir()]
    assert completed(["chat", "--root", str(family)], "sft/") == {f"sft/{whole[:8]}"}
    assert "_STEMMA_COMPLETE=bash_complete" in typed("completion", "bash").stdout


def test_compare_tells_settings_steps_figures_and_paired_differences(family: Path) -> None:
    document = compare(find(Store(family, reading=True), ["pretrain", "rlhf"]))
    steps = {row["step"] for row in document["steps"]}
    assert {"sft", "rlhf", "reward_model"} <= steps and "pretrain" not in steps
    assert not any(row["key"].startswith("step ") for row in document["differences"]), "a missing step is no setting"
    figures = {row["figure"]: row["values"] for row in document["figures"]}
    assert len(figures["cloze_accuracy"]) == 2 and "validation_loss" not in figures, "of one kind of model only"
    paired = {row["figure"]: row for row in document["paired"]}
    assert {"cloze accuracy", "expected maximum toxicity", "toxicity probability"} <= paired.keys()
    assert paired["expected maximum toxicity"]["shown"] is False
    text = typed("compare", "pretrain", "rlhf", "--root", family).stdout
    assert "no difference is shown" in text and "paired over the same items, minus pretrain/" in text
    assert typed("compare", "rlhf", "--root", family).exit_code == 2


def measured_again(family: Path, model: str, name: str, finished: str, **settings: Any) -> None:
    """Benchmarks of a model once more, by other settings, with other scores."""
    store = Store(family, reading=True)
    ((_, of),) = store.manifests(model)
    (folder,) = [at for at, one in store.manifests("benchmarks") if one.inputs["model"].digest == of.digest]
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["result"]["figures"]["cloze_accuracy"] = 0.111
    changed = {"fingerprint": name, "finished": finished, "config": settings, "identity": settings}
    (copy / "manifest.json").write_text(json.dumps({**manifest, **changed}))


def test_compare_takes_the_newest_benchmarks_that_were_measured_alike(family: Path) -> None:
    """The newest of each model was taken, and five solved examples passed for a better model."""

    def cloze() -> list[float]:
        (row,) = [row for row in document()["figures"] if row["figure"] == "cloze_accuracy"]
        return list(row["values"])

    def document() -> dict[str, Any]:
        return compare(find(Store(family, reading=True), ["pretrain", "rlhf"]))

    before = cloze()
    measured_again(family, "rlhf", "a" * 16, "2098-01-01", num_fewshot=5)
    assert cloze() == before and document()["warnings"] == []
    # Both were asked so: this pair is newer.
    measured_again(family, "pretrain", "b" * 16, "2097-01-01", num_fewshot=5)
    assert cloze() == [0.111, 0.111]


def test_compare_says_how_differently_benchmarks_were_measured(family: Path) -> None:
    shutil.rmtree(next((family / "safety").iterdir()).parent)
    measured_again(family, "rlhf", "a" * 16, "2098-01-01", num_fewshot=5, limit=100)
    ((_, model),) = Store(family, reading=True).manifests("rlhf")
    for folder, one in Store(family, reading=True).manifests("benchmarks"):
        if folder.name != "a" * 16 and one.inputs["model"].digest == model.digest:
            shutil.rmtree(folder)
    told = typed("compare", "pretrain", "rlhf", "--root", family)
    assert "warning: benchmarks: none of these were measured in the same way" in told.stderr
    assert "num_fewshot (not there | 5)" in told.stderr and "limit (not there | 100)" in told.stderr
    assert "benchmarks.num_fewshot" in told.stdout
    page = Path(told.stdout.rsplit("page: ", 1)[1].strip()).read_text()
    assert "none of these were measured in the same way" in page


def with_seed(folder: Path, fingerprint: str, seed: int, reward: float) -> Path:
    """A copy of an artifact, as another seed would have left it."""
    copy = folder.with_name(fingerprint)
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["result"]["figures"]["reward_gain"] = reward
    changed = {"fingerprint": copy.name, "config": {"seed": seed, "batch_size": 32}, "identity": {"seed": seed}}
    (copy / "manifest.json").write_text(json.dumps({**manifest, **changed}))
    lines = [json.loads(line) for line in (copy / "aux/samples.jsonl").read_text().splitlines()]
    for line in lines:
        line["rewards"]["rlhf"] += reward
    (copy / "aux/samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def test_compare_gives_mean_and_spread_over_seeds_and_a_page_with_their_curves(family: Path, tmp_path: Path) -> None:
    first = next((family / "rlhf").iterdir())
    with_seed(first, "fedcba9876543210", 18, 2.0)
    with_seed(first, "edcba9876543210f", 19, 3.0)
    page = tmp_path / "page.html"
    named = [f"rlhf/{first.name}", "rlhf/fedc", "rlhf/edcb"]
    found = typed("compare", *named, "--root", family, "--page", page, "--json")
    document = json.loads(found.stdout)
    assert [one["seeds"] for one in document["seeds"]] == [[[17], [18], [19]]]
    assert document["differences"] == [{"key": "rlhf.seed", "values": [17, 18, 19]}]
    gain = next(row for row in document["figures"] if row["figure"] == "reward_gain")
    assert gain["spread"][0]["mean"] == pytest.approx(sum(gain["values"]) / 3) and gain["spread"][0]["sd"] > 0
    rewards = {row["name"]: row for row in document["paired"] if row["unit"] == "reward"}
    assert rewards["rlhf/edcba9876543210f"]["difference"] == pytest.approx(3.0)
    text = page.read_text()
    assert document["page"] == str(page) and "mean of 3 seeds" in text and text.count('<polyline class="line') >= 8
    assert "±" in text and "3 of them have the same settings and other seeds" in text


def test_compare_takes_runs_and_configs_and_says_what_is_none_of_these(built_data: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(built_data / "store", store)
    (run,) = (folder.name for folder in (store / "runs").iterdir())
    config = built_data / "changed.yaml"
    config.write_text((built_data / "config.yaml").read_text().replace("vocab_size: 400", "vocab_size: 420"))
    try:
        document = compare(find(Store(store, reading=True), [run[:12], str(config)]))
        text = typed("compare", run[:12], config, "--root", store).stdout
    finally:
        config.unlink()
    assert document["differences"] == [{"key": "tokenizer.vocab_size", "values": [400, 420]}]
    assert [one["kind"] for one in document["compared"]] == ["run", "config"]
    assert "tokenizer.vocab_size" in text and "steps built" in text
    mixed = typed("compare", "clean", run, "--root", store)
    assert mixed.exit_code == 2 and "compare artifacts, or runs and configs" in mixed.stderr
    unknown = typed("compare", "20200101", run, "--root", store)
    assert unknown.exit_code == 2 and f"the newest are {run}" in unknown.stderr


def model_folder(folder: Path, kind: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [kind]}))
    return folder


def test_a_reward_model_is_no_partner_to_talk_to(tmp_path: Path, root: Path) -> None:
    folder = model_folder(tmp_path / "judge", "LlamaForSequenceClassification")
    found = typed("chat", folder, "--prompt", "Hello", "--root", root)
    assert found.exit_code == 2
    assert (
        "scores or labels text and does not generate any (name a model that generates text, such as sft or rlhf)"
        in found.stderr
    )


def test_what_is_no_model_is_met_with_the_models_that_there_are(root: Path) -> None:
    for stage in ("clean", "sft"):
        make_artifact(Store(root), stage, {"a": "text"})
    found = typed("chat", "nothing", "--root", root)
    assert found.exit_code == 2 and found.stderr.rstrip().endswith("(there are sft)")
    assert typed("chat", "sftt", "--root", root).stderr.rstrip().endswith("(did you mean sft?)")


def test_every_command_of_one_process_answers(tmp_path: Path, root: Path) -> None:
    config = write_config(tmp_path / "config.yaml", full_config())
    answers = [typed("check", config, "--root", root, "--json").stdout for _ in range(2)]
    assert json.loads(answers[0]) == json.loads(answers[1])
