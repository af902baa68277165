"""What `stemma init` makes of other people's files: a table of forms, each with its kind and keys. Their config passes
the look at first records that `check` takes."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from datasets import Dataset, DatasetDict

from cli.commands import stemma
from corpus.config import IngestConfig, InstructionsConfig, PreferencesConfig
from corpus.recognition.first_records import first_record_problems
from corpus.recognition.readings import Wish
from flows.planning.first_config import fit, look
from infra.errors import ConfigError

PROSE = "The ferry captain measured the mill's wheel, and wrote a short report about it for the museum. " * 3
CHINESE = "渡船的船长测量了磨坊的轮子,并为博物馆写了一份简短的报告。" * 5
ASK = {"role": "user", "content": "What does the ferry captain measure?"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
ANSWER = {"role": "assistant", "content": "The wheel of the mill."}
GPT = [{"from": "human", "value": "What is measured?"}, {"from": "gpt", "value": "The wheel."}]
HH = "\n\nHuman: What is measured?\n\nAssistant: The {}."
VECTOR = " ".join("0.12345" for _ in range(400))

DOCUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": ({"text": PROSE}, {}),
    "id and url beside": ({"id": "a" * 64, "url": "https://example.org/" + "a" * 900, "text": PROSE}, {}),
    "content": ({"url": "u", "content": PROSE}, {"text_field": "content"}),
    "nested": ({"page": {"title": "A", "body": PROSE}}, {"text_field": "page.body"}),
    "embedding as text": ({"body": PROSE[:90], "embedding": VECTOR}, {"text_field": "body"}),
    "base64": ({"blob": "QUJD" * 500, "body": PROSE[:90]}, {"text_field": "body"}),
    "an unknown field": ({"id": "a-1", "essay": PROSE}, {"text_field": "essay"}),
    "chinese": ({"正文": CHINESE, "标题": "报告"}, {"text_field": "正文"}),
    "pages": (
        {"url": "u", "html": f"<html><body><p>{PROSE}</p></body></html>"},
        {"text_field": "html", "content": "html"},
    ),
    "markdown with a tag": ({"text": f"{PROSE}<br>\n\n<p>{PROSE}</p>"}, {}),
    "code": (
        {"path": "a.py", "code": "def area(width, height):\n    return width * height\n" * 9},
        {"text_field": "code"},
    ),
    "list of numbers": ({"text": PROSE, "embedding": [0.1] * 900}, {}),
    "an interview": ({"text": f"{PROSE}\n\nUser: the mill. {PROSE}", "role": "journalist"}, {}),
    "text with its translation": ({"text": PROSE, "summary": PROSE[:60]}, {}),
    "abstract and full text": ({"abstract": PROSE, "fulltext": PROSE * 3}, {"text_field": "fulltext"}),
    "null first": ([{"text": PROSE, "note": None}, {"text": PROSE, "note": "x"}], {}),
}
INSTRUCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "alpaca": ({"instruction": "Ask", "input": "", "output": "Answer"}, {}),
    "alpaca with its text": ({"instruction": "Ask", "output": PROSE, "text": f"### Ask\n{PROSE}"}, {}),
    "dolly": ({"instruction": "Ask", "context": PROSE, "response": "A", "category": "qa"}, {"input_field": "context"}),
    "question and answer": ({"question": "Why?", "answer": "So."}, {}),
    "capital letters": (
        {"Question": "Why?", "Answer": "So."},
        {"prompt_field": "Question", "response_field": "Answer"},
    ),
    "input and output": (
        {"input": "Why?", "output": "So."},
        {"prompt_field": "input", "input_field": None},
    ),
    "problem and solution": (
        {"problem": "Why?", "solution": "So."},
        {"prompt_field": "problem", "response_field": "solution"},
    ),
    "flan": ({"inputs": "Why?", "targets": "So."}, {}),
    "prompt and completion": ({"prompt": "Why?", "completion": "So."}, {}),
    "trl conversational": ({"prompt": [ASK], "completion": [ANSWER]}, {}),
    "messages without lists": ({"prompt": ASK, "completion": ANSWER}, {}),
    "good answers": ({"prompt": "Why?", "completion": "So.", "label": True}, {}),
    "openai": ({"messages": [{"role": "system", "content": PROSE}, ASK, ANSWER], "source": PROSE}, {}),
    "sharegpt": ({"id": "a" * 900, "conversations": GPT}, {}),
    "ultrachat": ({"prompt": PROSE, "prompt_id": "a" * 64, "messages": [ASK, ANSWER, ASK, ANSWER]}, {}),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Ask"}]}, ANSWER]}, {}),
    "tools": ({"messages": [ASK, CALL, {"role": "tool", "content": "Green."}, ANSWER]}, {}),
    "joined schemas": (
        [
            {"instruction": None, "output": None, "messages": [ASK, ANSWER]},
            {"instruction": "Ask", "output": "Answer", "messages": None},
        ],
        {},
    ),
    "begins with the assistant": ({"conversations": [GPT[1], *GPT]}, {"trim_conversations": True}),
    "reasoning": ({"messages": [ASK, {**ANSWER, "reasoning_content": PROSE}]}, {}),
    "ends with the human": ({"conversations": [*GPT, GPT[0]]}, {"trim_conversations": True}),
    "gemini": (
        {"contents": [{"role": "user", "parts": [{"text": "Ask"}]}, {"role": "model", "parts": [{"text": "A"}]}]},
        {},
    ),
    "xtuner": (
        {"conversation": [{"system": "Be kind.", "input": "Ask", "output": "A"}, {"input": "B", "output": "C"}]},
        {},
    ),
    "tree": ({"prompt": {"role": "prompter", "text": "Ask", "replies": [{"role": "assistant", "text": "A"}]}}, {}),
    "openorca": (
        {"id": "a" * 32, "system_prompt": PROSE, "question": "Ask", "response": "Answer"},
        {"system_field": "system_prompt"},
    ),
    "input and output text": (
        {"input_text": "Why?", "output_text": "So."},
        {"prompt_field": "input_text", "response_field": "output_text"},
    ),
}
PREFERENCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt and two answers": ({"prompt": "Ask", "chosen": "A", "rejected": "B"}, {}),
    "alpaca": ({"instruction": "Ask", "input": "x", "chosen": "A", "rejected": "B"}, {}),
    "hh": ({"chosen": HH.format("wheel"), "rejected": HH.format("mill")}, {"dialogue": True}),
    "trl": ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}, {}),
    "ultrafeedback": (
        {
            "prompt": "Ask", "prompt_id": "a" * 99, "messages": [ASK, ANSWER], "score_chosen": 9.0,
            "chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": "No."}],
        },
        {},
    ),
    "sharegpt": ({"conversations": GPT[:1], "chosen": GPT[1], "rejected": {"from": "gpt", "value": "No."}}, {}),
    "ranking": ({"prompt": "Ask", "answers": [{"answer": "A", "rank": 2}, {"answer": "B", "rank": 1}]}, {}),
    "scores": ({"prompt": "Ask", "completions": ["A", "B"], "scores": [1, 2]}, {}),
    "openai": (
        {"input": {"messages": [ASK], "tools": []}, "preferred_output": [ANSWER],
         "non_preferred_output": [{**ANSWER, "content": "No."}]},
        {"prompt_field": "input.messages", "chosen_field": "preferred_output",
         "rejected_field": "non_preferred_output"},
    ),
    "orca": (
        {"system": "Be kind.", "question": "Ask", "chosen": "A", "rejected": "B"},
        {"system_field": "system"},
    ),
    "arena": (
        {"question_id": "a" * 32, "winner": "model_b", "conversation_a": [ASK, ANSWER],
         "conversation_b": [ASK, {**ANSWER, "content": "No."}], "turn": 1},
        {},
    ),
    "arena in lists": (
        {"prompt": '["Ask"]', "response_a": '["A"]', "response_b": '["B"]',
         "winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1},
        {},
    ),
    "ranked tree": (
        {"prompt": {"role": "prompter", "text": "Ask", "replies": [
            {"role": "assistant", "text": "A", "rank": 1}, {"role": "assistant", "text": "B", "rank": 0}]}},
        {},
    ),
    "other names": (
        {"question": "Ask", "response_j": "A", "response_k": "B"},
        {"chosen_field": "response_j", "rejected_field": "response_k"},
    ),
}  # fmt: skip
FORMS = [
    pytest.param(kind, *form, id=f"{kind}: {name}")
    for kind, forms in (("documents", DOCUMENTS), ("instructions", INSTRUCTIONS), ("preferences", PREFERENCES))
    for name, form in forms.items()
]
CONFIGS = {"documents": IngestConfig, "instructions": InstructionsConfig, "preferences": PreferencesConfig}


def rows_of(form: Any) -> list[dict[str, Any]]:
    return (form if isinstance(form, list) else [form]) * 4


def varied(form: Any, count: int = 12) -> list[dict[str, Any]]:
    """Rows of a form whose texts differ, as those of data to train on do."""
    return [{name: f"{value} Number {number}." for name, value in form.items()} for number in range(count)]


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return str(path)


def recognised(path: str | Path) -> tuple[str, dict[str, Any], list[str]]:
    """Kind, keys and notes of what lies at a path; its config is tried as `check` does."""
    [found], notes = look(str(path))
    source = {**found.source, **found.keys}
    assert first_record_problems(CONFIGS[found.kind](read=[source])) == []  # type: ignore[call-arg]
    return found.kind, dict(found.keys), notes


@pytest.mark.parametrize(("kind", "form", "keys"), FORMS)
def test_a_form_is_recognised_by_its_records(kind: str, form: Any, keys: dict[str, Any], tmp_path: Path) -> None:
    assert recognised(lines(tmp_path / "rows.jsonl", rows_of(form)))[:2] == (kind, keys)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("documents", DOCUMENTS["nested"]),
        ("instructions", INSTRUCTIONS["alpaca"]),
        ("instructions", INSTRUCTIONS["ultrachat"]),
        ("preferences", PREFERENCES["ultrafeedback"]),
    ],
)
def test_a_form_is_the_same_in_parquet(kind: str, form: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows_of(form[0])), tmp_path / "rows.parquet")
    assert recognised(tmp_path / "rows.parquet")[:2] == (kind, form[1])


def _saved(folder: Path) -> Path:
    DatasetDict({name: Dataset.from_list([{"text": PROSE}] * 3) for name in ("train", "test")}).save_to_disk(folder)
    return folder


def _from_hub(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.table({"text": [PROSE] * 3}), folder / "data" / f"{split}-00000-of-00001.parquet")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs")
    (folder / "README.md").write_text("# A card\n" + PROSE * 9)
    return folder


def _splits(folder: Path) -> Path:
    for split in ("train", "validation", "test"):
        lines(folder / f"{split}.jsonl", [{"text": PROSE}] * 3)
    return folder


def _csv(folder: Path) -> Path:
    folder.mkdir()
    with (folder / "a.csv").open("w", newline="", encoding="cp1252") as file:
        csv.writer(file, delimiter=";").writerows([["id", "text"], *([n, f"Größe: {PROSE}\nZeile"] for n in range(9))])
    return folder


def _latin_1(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(json.dumps({"text": f"Größe: {PROSE}"}, ensure_ascii=False).encode("latin-1"))
    return folder


def _unnamed_lines(folder: Path) -> Path:
    folder.mkdir()
    (folder / "dump.txt").write_text(Path(lines(folder.parent / "a", [{"text": PROSE}] * 3)).read_text())
    return folder


def _books(folder: Path) -> Path:
    (folder / "more").mkdir(parents=True)
    (folder / "one.txt").write_text(PROSE)
    (folder / "more" / "two.md").write_text(PROSE)
    (folder / ".DS_Store").write_bytes(b"\0\1")
    return folder


@pytest.mark.parametrize(
    ("made", "documents", "note"),
    [
        (_saved, 3, "a Hugging Face dataset"),
        (_from_hub, 3, "a Hugging Face dataset"),
        (_splits, 3, "2 of a validation or test split"),
        (_csv, 9, ""),
        (_latin_1, 1, ""),
        (_unnamed_lines, 3, ""),
        (_books, 2, "1 hidden"),
    ],
)
def test_a_folder_is_recognised(made: Callable[[Path], Path], documents: int, note: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "data")
    kind, _, notes = recognised(folder)
    assert kind == "documents" and note in " ".join(notes) and bool(notes) == bool(note)
    if made is not _saved:  # an Arrow file has a header that is as long as these rows
        assert look(str(folder))[0][0].documents == documents


@pytest.mark.parametrize("start", ["<3 the warden. ", "<s>", "<https://a.example> "])
def test_a_text_that_begins_with_an_angle_bracket_is_no_page(start: str, tmp_path: Path) -> None:
    [[source], _] = look(lines(tmp_path / "a.jsonl", [{"text": start + PROSE}] * 3))
    assert "content" not in source.source


def test_files_of_several_forms_become_a_source_each(tmp_path: Path) -> None:
    lines(tmp_path / "data" / "chats.jsonl", rows_of(INSTRUCTIONS["openai"][0]))
    (tmp_path / "data" / "book.txt").write_text(PROSE)
    for name in ("scan.pdf", "letter.pdf", "named_after_nothing"):
        (tmp_path / "data" / name).write_bytes(b"%PDF-1.7 \0")
    (tmp_path / "data" / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    found, notes = look(str(tmp_path / "data"))
    assert {one.kind: one.source["paths"] for one in found} == {
        "instructions": [f"{tmp_path}/data/**/*.jsonl"],
        "documents": [f"{tmp_path}/data/**/*.txt"],
    }
    assert "3 PDF files, e.g. " in notes[0] and "docling" in notes[0]
    assert f"1 binary file, e.g. {tmp_path}/data/photo.png" in notes[1]


@pytest.mark.parametrize(
    ("form", "code", "words"),
    [
        ({"query": "Why?", "choices": ["a", "b"], "gold": 1}, "benchmark_items", "choices, gold"),
        ({"question": "Why?", "option1": PROSE, "option2": PROSE, "answer": "2"}, "benchmark_items", "option1, opti"),
        ({"question": "Why?", "A": "x", "B": "y", "C": "z", "answer": "B"}, "benchmark_items", "A, B, C, answer"),
        ({"prompt": PROSE, "canonical_solution": PROSE, "test": PROSE}, "benchmark_items", "canonical_solution, test"),
        ({"prompt": "Why?", "completion": "So.", "label": False}, "judged_answers", "4 of 4 that are judged bad"),
        ({"prompt": PROSE, "response_a": PROSE, "response_b": PROSE}, "side_of_a_pair", "response_a"),
        ({"Context": PROSE, "Response": PROSE}, "side_of_a_pair", "Response is by its name"),
        ({"question": {"full_text": PROSE}, "answers": [PROSE, PROSE]}, "side_of_a_pair", "--text-field PATH=question"),
        ({"prompt": PROSE}, "side_of_a_pair", "--text-field PATH=prompt"),
        ({"history": PROSE, "human_ref_A": PROSE, "human_ref_B": PROSE}, "side_of_a_pair", "human_ref"),
        (
            [{"id": "1", "text": PROSE, "role": "prompter"}, {"id": "2", "text": PROSE, "role": "assistant"}],
            "separate_messages", "one message in each record: role",
        ),
        ({"text": f"<|im_start|>user\nWhy?<|im_start|>assistant\n{PROSE}"}, "rendered_chat", "<|im_start|> in 4"),
        ({"text": f"<s>[INST] Why? [/INST] {PROSE}</s>"}, "rendered_chat", "--text-field PATH=text"),
        ({"text": f"### Human: Why?\n### Assistant: {PROSE}"}, "rendered_chat", "### Human:"),
        ([{"text": PROSE}, {"text": None}, {"text": None}], "unreadable_source", "4 have some, under text"),
        ({"embedding": VECTOR}, "unreadable_source", "a field with prose"),
        ({"text": [PROSE, PROSE]}, "unreadable_source", "a field with prose"),
        ({"essay": PROSE, "report": PROSE[:-30]}, "two_readings", "or --text-field PATH=report"),
        ({"text": PROSE[:60], "story": PROSE * 4}, "two_readings", "--text-field PATH=story"),
        ({"question": "Why?", "answer": "So.", "text": PROSE}, "two_readings", "=instructions or --as PATH=documents"),
    ],
)  # fmt: skip
def test_what_is_no_form_or_two_is_refused_with_what_decides(
    form: dict[str, Any], code: str, words: str, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", rows_of(form))
    with pytest.raises(ConfigError) as raised:
        look(path)
    [problem] = raised.value.problems
    assert problem.code == code and words.replace("PATH", path) in str(problem)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({str(n): {"text": PROSE} for n in range(5)}, "a record under each key"),
        ({"id": {"0": 0, "1": 1}, "text": {"0": PROSE, "1": PROSE}}, 'a column under each key (write its rows as JSON'),
        ({"id": [0, 1], "text": [PROSE, PROSE]}, "a column under each key"),
        ({"columns": ["text"], "index": [0, 1], "data": [[PROSE], [PROSE]]}, "rows under `data`"),
        ({"version": "1.1", "data": [{"text": PROSE}] * 3}, "a list of 3 under `data` (write the list alone"),
        ([PROSE, PROSE], "found a string (write one JSON object per line"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 1])
def test_a_table_in_one_object_is_refused_with_how_to_write_it(
    content: Any, words: str, indent: int | None, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
    with pytest.raises(ConfigError) as raised:
        look(str(tmp_path / "a.json"))
    [problem] = raised.value.problems
    assert problem.code == "unreadable_source" and words in str(problem)


def test_one_record_with_lists_is_a_record(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": PROSE}, {"role": "assistant", "content": PROSE}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": turns}))
    [[group], _] = look(str(tmp_path / "a.json"))
    assert group.kind == "instructions"


def test_files_of_several_forms_in_a_folder_become_a_source_of_each_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "data" / "a.jsonl", varied({"text": PROSE}, 40))
    other = lines(tmp_path / "data" / "b.jsonl", [{"content": PROSE}])
    lines(tmp_path / "data" / "c.jsonl", [{"text": PROSE, "id": 1}])
    lines(tmp_path / "data" / "pairs.jsonl", varied({"instruction": "Why?", "response": "So."}))
    lines(tmp_path / "data" / "votes.jsonl", varied({"prompt": "Why?", "chosen": "So it is.", "rejected": "No."}))
    sources, _ = look(str(tmp_path / "data"))
    assert [(source.kind, source.files) for source in sources] == [
        ("documents", 2),
        ("documents", 1),
        ("instructions", 1),
        ("preferences", 1),
    ]
    done = CliRunner().invoke(stemma, ["init", "data"])
    assert done.exit_code == 0, done.output
    config = yaml.safe_load(Path("pipeline.yaml").read_text())
    assert [source["name"] for source in config["ingest"]["read"]] == ["data", "data-b"]
    assert {"instructions", "preferences", "sft", "rlhf"} <= set(config)
    with pytest.raises(ConfigError, match="expected files of one form") as raised:
        look(str(tmp_path / "data"), Wish(text_field="text"))
    assert raised.value.problems[0].path == other


def test_prose_under_other_fields_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", varied({"inst": PROSE[:95], "out": PROSE}))
    done = CliRunner().invoke(stemma, ["init", "a.jsonl"])
    assert "not read: prose under inst" in done.output


def test_the_options_decide_and_the_command_says_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "faq.jsonl", varied({"question": "Why?", "answer": "So.", "text": PROSE}))
    lines(tmp_path / "two.jsonl", varied({"report": PROSE, "essay": PROSE}))

    def typed(*words: str) -> Any:
        return CliRunner().invoke(stemma, ["init", "faq.jsonl", "two.jsonl", *words])

    refused = typed()
    assert refused.exit_code == 2 and refused.stderr.count("two interpretations are equally likely") == 2
    assert not (tmp_path / "pipeline.yaml").exists()
    done = typed("--as", "faq.jsonl=instructions", "--text-field", "two.jsonl=essay")
    assert done.exit_code == 0, done.stderr
    assert (
        "faq.jsonl: instructions; 12 of 12 sampled records: prompt and response under question and answer"
        in done.stdout
    )
    made = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())
    (source,) = made["ingest"]["read"]
    assert source == {"kind": "files", "name": "two", "paths": ["two.jsonl"], "text_field": "essay"}
    assert made["instructions"]["read"] == [{"kind": "files", "paths": ["faq.jsonl"]}]
    checked = CliRunner().invoke(stemma, ["check", "pipeline.yaml", "--root", str(tmp_path / "store")])
    assert checked.exit_code == 0, checked.stderr
    wrong = typed("--as", "prose")
    assert wrong.exit_code == 2 and "expected documents, instructions, preferences" in wrong.stderr


def test_sizes_are_of_bytes_and_a_training_has_a_batch(tmp_path: Path) -> None:
    [found], _ = look(lines(tmp_path / "zh.jsonl", [{"text": CHINESE}] * 50))
    assert found.text_bytes == pytest.approx(50 * len(CHINESE.encode()), rel=0.1)
    sizes = fit(10)
    assert sizes.trained_tokens >= sizes.batch_tokens


def test_compressed_lines_are_sampled_from_all_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, row in enumerate(({"content": "Short.", "url": "u"}, {"content": PROSE, "url": "u"})):
        (tmp_path / "data" / f"{number}.jsonl.gz").write_bytes(gzip.compress((json.dumps(row) + "\n").encode() * 3))
    assert recognised(tmp_path / "data")[:2] == ("documents", {"text_field": "content"})
