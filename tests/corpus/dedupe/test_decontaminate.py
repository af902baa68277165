"""Test items of the benchmarks that a config runs do not reach training, however they are written."""

from __future__ import annotations

import html
import json
import random
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.forms import write_forms
from corpus.decontaminate.index import make_index
from corpus.decontaminate.items import Item, ItemAnswer, forms_of, with_spaces, words_of
from corpus.decontaminate.kernels import sorted_by_hash
from corpus.decontaminate.stage import decontaminate
from corpus.documents.parts import DocumentWriter, make_document, read_documents
from evaluation.benchmark_text import benchmark_text
from evaluation.config import BenchmarksConfig, BenchmarkTask, BenchmarkTextConfig, SafetyConfig
from infra.errors import StageError

PLAIN = (
    "The committee met on the first day of the month to discuss the plans that the town had made for the new bridge.",
    "Nobody in the room could say with certainty which of the two had spoken first, when the lamp went out.",
)
SUFFIXED = [{"query": "Which planet has the most moons", "choices": ["Mars", "Saturn"], "gold": 1}]
CHANGES = {
    "as it is": lambda text: text,
    "upper case": str.upper,
    "title case": str.title,
    "other white space": lambda text: text.replace(" ", " \n\t"),
    "no punctuation": lambda text: re.sub(r"[^\w\s]|_", "", text),
    "spaces for punctuation": lambda text: re.sub(r"[^\w\s]|_", " ", text),
    "more punctuation": lambda text: text.replace(" ", ", "),
    "accents": lambda text: text.replace("e", "é"),
}


def written(folder, texts):
    with DocumentWriter(folder / "documents") as writer:
        for number, text in enumerate(texts):
            writer.write(make_document(text, f"web/{number}"))
    return folder


def items_of(folder, rows):
    folder.mkdir()
    lines = [json.dumps({"task": "told", "item": str(i), "texts": [text]}) + "\n" for i, text in enumerate(rows)]
    (folder / "items.jsonl").write_text("".join(lines))
    return folder


def texts_of(out):
    return [document.text for document in read_documents(out)]


@pytest.fixture(scope="module")
def own_items(tmp_path_factory):
    """The items of the project's own benchmarks, as the stage writes them."""
    from tests.corpus.conftest import build_stage

    config = BenchmarkTextConfig(tasks=("minimal_pairs", "cloze"))
    return build_stage(benchmark_text, config, tmp_path_factory.mktemp("items") / "items")


@pytest.mark.parametrize("change", CHANGES)
def test_every_planted_item_is_found_however_it_is_written(build, tmp_path, own_items, lines_of, change):
    rows = lines_of(own_items / "items.jsonl")
    texts = [text for row in rows for text in row["texts"]]
    planted = [f"What came before.\n{CHANGES[change](text)}\nWhat came after." for text in texts]
    documents = written(tmp_path / "in", [*PLAIN, *planted])
    # With more punctuation a short item no longer stands alone as one sentence.
    least = 1 if change == "more punctuation" else 8
    config = DecontaminateConfig(min_words=least)
    out = build(decontaminate, config, documents=documents, benchmark_text=own_items)
    assert texts_of(out) == [*PLAIN]
    told = json.loads((out / "aux" / "contamination.json").read_text())["tasks"]
    assert {task: counts["items_hit"] for task, counts in told.items()} == {
        task: sum(row["task"] == task for row in rows) for task in ("cloze", "minimal_pairs")
    }


def test_items_of_real_benchmarks_are_found_and_real_text_mostly_stays(build, tmp_path, real_data, lines_of):
    gauntlet = real_data("llm_foundry_eval")
    tasks = [
        BenchmarkTask(name=name, kind="multiple_choice", path=next_file(gauntlet, name))
        for name in ("arc_easy", "openbook_qa")
    ]
    items = build(benchmark_text, BenchmarkTextConfig(tasks=tasks))
    rows = lines_of(items / "items.jsonl")
    chosen = random.Random(5).sample(rows, 300)
    web = [json.loads(line)["text"] for line in open(next_file(real_data("web_demo"), "c4_demo"))]  # noqa: SIM115
    planted = [f"{web[i % len(web)]} {row['texts'][0].upper()} {web[-1 - i % 50]}" for i, row in enumerate(chosen)]
    out = build(
        decontaminate, DecontaminateConfig(), documents=written(tmp_path / "in", [*web, *planted]), benchmark_text=items
    )
    assert len(set(texts_of(out)) & set(web)) > 0.99 * len(set(web))
    short = [row for row in chosen if len(row["texts"][0].split()) < 8]
    assert len(set(texts_of(out)) & set(planted)) <= len(short)
    found = {(row["task"], row["item"]) for row in pq.read_table(out / "aux" / "hits.parquet").to_pylist()}
    assert found >= {(row["task"], row["item"]) for row in chosen if row not in short}


def next_file(root, part=""):
    from pathlib import Path

    return str(next(path for path in sorted(Path(root).rglob("*.jsonl")) if part in path.name))


def test_a_short_item_counts_where_it_stands_alone_and_not_inside_a_sentence(build, tmp_path):
    items = items_of(tmp_path / "items", ["It rains again."])
    alone = "The day is grey. It rains again! Nobody minds."
    inside = "They say that it rains again in the hills."
    out = build(
        decontaminate, DecontaminateConfig(), documents=written(tmp_path / "in", [alone, inside]), benchmark_text=items
    )
    assert texts_of(out) == [inside]
    out = build(
        decontaminate,
        DecontaminateConfig(min_words=1),
        documents=written(tmp_path / "more", [*PLAIN, alone, inside]),
        benchmark_text=items,
    )
    assert texts_of(out) == [*PLAIN]


@pytest.mark.parametrize(
    ("text", "is_leak"),
    [
        ("Q: Who wrote it?\nA: the widow", True),
        ("Question: Who wrote it?\n\nAnswer: The widow.", True),
        ('{"query": "Who wrote it?", "choices": ["the clerk", "the judge", "the widow"], "gold": 2}', True),
        ("{'question': 'Who wrote it?', 'options': ['the clerk', 'the judge', 'the widow']}", True),
        ("Who wrote it?", False),
        ("Who wrote it, he asked, and the answer of the widow was: A friend.", False),
        ("The clerk asked who wrote it. A: the widow of the miller, who had her choices.", False),
        ("What colour is the flag of [1] the pilot boat at noon?", True),
        ("What colour is the flag of the pilot boat[12] at noon?", True),
        ("What colour is the flag [1, 2] of the pilot boat at noon?", False),
        ("return rows[0] if rows[1] is None else columns[2]", True),
    ],
)
def test_short_questions_and_footnotes(text, is_leak, build, tmp_path, write):
    quiz = [
        {"query": "Who wrote it?", "choices": ["the clerk", "the judge", "the widow"], "gold": 2},
        {"query": "What colour is the flag of the pilot boat at noon?", "choices": ["red", "green"], "gold": 0},
        {"query": "return rows[0] if rows[1] is None else columns[2]", "choices": ["a", "b"], "gold": 0},
    ]
    path = write("quiz.jsonl", "".join(json.dumps(row) + "\n" for row in quiz))
    task = {"kind": "multiple_choice", "name": "quiz", "path": str(path)}
    items = build(benchmark_text, BenchmarkTextConfig(tasks=[task]))
    context = "The harbour master measured the wheel of the mill."
    documents = written(tmp_path / "in", [f"{context}\n\n{text}\n\n{context}", "Another text that stays here."])
    out = build(decontaminate, DecontaminateConfig(), documents=documents, benchmark_text=items)
    assert len(list(read_documents(out))) == 2 - is_leak


def test_a_long_item_is_found_by_thirteen_of_its_words_and_not_by_twelve(build, tmp_path):
    words = [f"word{number}" for number in range(30)]
    items = items_of(tmp_path / "items", [" ".join(words)])
    thirteen, twelve = (f"Before it {' '.join(words[5 : 5 + count])} after it" for count in (13, 12))
    out = build(
        decontaminate,
        DecontaminateConfig(),
        documents=written(tmp_path / "in", [thirteen, twelve]),
        benchmark_text=items,
    )
    assert texts_of(out) == [twelve]


def test_cutting_takes_the_item_with_its_context_and_keeps_the_document(build, tmp_path):
    item = " ".join(f"item{number}" for number in range(15))
    items = items_of(tmp_path / "items", [item])
    before, after = (" ".join(f"{name}é{number}" for number in range(200)) for name in ("before", "after"))
    document = f"{before} {item.upper()} {after}"
    often = f" {item} ".join([before] * 12)
    config = DecontaminateConfig(action="cut", context_characters=50, min_piece_characters=100)
    out = build(
        decontaminate, config, documents=written(tmp_path / "in", [document, PLAIN[0], often]), benchmark_text=items
    )
    [cut, plain] = read_documents(out)
    assert plain.text == PLAIN[0]
    assert cut.id == make_document(document, "").id
    first, second = cut.text.split("\n\n")
    assert before.startswith(first) and len(before) - len(first) == pytest.approx(50, abs=2)
    assert after.endswith(second) and len(after) - len(second) == pytest.approx(50, abs=2)
    [gone] = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert gone["id"] == make_document(often, "").id and gone["rule"] == "test_item"
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert (counts["kept"], counts["cut"], counts["cuts"], counts["dropped"]) == (2, 1, 1, {"test_item": 1})


def test_what_shows_in_many_documents_is_no_leak_where_so_asked(build, tmp_path):
    common, leaked = (" ".join(f"{name}{number}" for number in range(13)) for name in ("common", "leaked"))
    items = items_of(tmp_path / "items", [common, leaked])
    texts = [f"{common} number {number}" for number in range(5)]
    documents = written(tmp_path / "in", [*texts, leaked])
    out = build(decontaminate, DecontaminateConfig(max_document_hits=4), documents=documents, benchmark_text=items)
    assert texts_of(out) == texts


def test_nothing_left_is_an_error_that_says_so(build, tmp_path):
    items = items_of(tmp_path / "items", [PLAIN[0]])
    with pytest.raises(StageError, match="no document is left of 1: each contains a test item"):
        build(
            decontaminate, DecontaminateConfig(), documents=written(tmp_path / "in", [PLAIN[0]]), benchmark_text=items
        )


def test_items_are_those_of_the_benchmarks_and_probes_that_the_config_runs(build, lines_of):
    filled = BenchmarkTextConfig().filled([BenchmarksConfig()], [SafetyConfig()])
    rows = lines_of(build(benchmark_text, filled) / "items.jsonl")
    assert {row["task"] for row in rows} == {"minimal_pairs", "cloze", "toxicity", "bias"}
    only_tasks = BenchmarkTextConfig().filled([BenchmarksConfig(tasks=("cloze",))], [])
    assert {row["task"] for row in lines_of(build(benchmark_text, only_tasks) / "items.jsonl")} == {"cloze"}


def test_items_are_those_of_every_file_that_a_step_of_safety_uses(build, lines_of, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "One of our own prompts"}\n')
    usual = {"toxicity": {}, "bias": None}
    steps = [SafetyConfig(**usual), SafetyConfig(toxicity={"prompts": str(tmp_path / "own.jsonl")}, bias=None)]
    one, both = (BenchmarkTextConfig().filled([], some) for some in (steps[:1] * 2, steps))
    assert isinstance(one.prompts, str) and len(both.sources()[0].paths) == 2
    packaged, all_of_them = (
        [row["texts"] for row in lines_of(build(benchmark_text, x) / "items.jsonl")] for x in (one, both)
    )
    assert all_of_them == [*packaged, ["One of our own prompts"]]


LAYOUTS = {
    "question alone": lambda question, choices, right: question,
    "with its answer": lambda question, choices, right: f"{question} {right}",
    "template": lambda question, choices, right: f"Question: {question}\nAnswer: {right}",
    "lettered": lambda question, choices, right: "\n".join(
        [question, *(f"{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))]
    ),
    "JSON": lambda question, choices, right: json.dumps(
        {"id": 3, "question": question, "choices": {"text": choices, "label": list("ABCD")}}
    ),
    "CSV": lambda question, choices, right: f'3,"{question}",{",".join(choices)},1',
    "HTML": lambda question, choices, right: (
        f"<h3>{html.escape(question)}</h3><ul><li>{'</li><li>'.join(choices)}</li></ul>"
    ),
    "HTML with hard spaces": lambda question, choices, right: (
        f"{html.escape(question).replace(' ', '&nbsp;')}&#160;{right.replace(' ', '&nbsp;')}"
    ),
}
QUIZ = [
    # Eight to twelve words, and fewer: with the template's "Question" and "Answer" these were never found.
    ("What do the people who live on Saturn's rings eat?", ["ice", "rocks", "nothing at all", "dust"], 2),
    ("Where do Mary's lions sleep?", ["on top of the hill", "in trees", "at sea", "nowhere"], 0),
    ("The quick solution of salt is", ["made of water and of salt", "dry", "an acid", "a gas"], 0),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["raw", "template", "listed"])
def test_items_are_found_in_the_layouts_that_copies_have(build, write, tmp_path, form, layout):
    rows = []
    for question, choices, gold in QUIZ:
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        query = {
            "raw": question,
            "template": f"Question: {question}\nAnswer:",
            "listed": f"Question: {question}\nChoices:\n{listed}\nAnswer:",
        }[form]
        rows.append({"query": query, "choices": list("ABCD") if form == "listed" else choices, "gold": gold})
    path = write("quiz.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    task = BenchmarkTask(name="quiz", kind="multiple_choice", path=path)
    items = build(benchmark_text, BenchmarkTextConfig(tasks=[task]))
    planted = [
        f"What came before is this.\n{LAYOUTS[layout](question, choices, choices[gold])}\nThen came the end."
        for question, choices, gold in QUIZ
    ]
    # Of a question with fewer than 8 words the answer has to be there too.
    short = planted[1:] if layout == "question alone" else []
    documents = written(tmp_path / "in", [*PLAIN, *planted])
    assert texts_of(build(decontaminate, DecontaminateConfig(), documents=documents, benchmark_text=items)) == [
        *PLAIN,
        *short,
    ]


def test_a_tasks_template_is_no_sign_of_an_item_and_a_shared_passage_is(build, write, tmp_path):
    ask = "Read the passage below and decide which of the two answers that follow it is the right one"
    passage = " ".join(f"passage{number}" for number in range(60))
    rows = [
        {"query": f"{ask}\nThe {number} of us went to {number * 7} places", "choices": ["yes", "no"], "gold": 0}
        for number in range(20)
    ]
    rows += [{"query": f"{passage}\nIs it {number}?", "choices": ["yes", "no"], "gold": 0} for number in range(20)]
    task = BenchmarkTask(
        name="quiz", kind="multiple_choice", path=write("q.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    )
    items = build(benchmark_text, BenchmarkTextConfig(tasks=[task]))
    documents = written(tmp_path / "in", [f"Teachers say: {ask}.", f"It is said that {passage} is long."])
    out = build(decontaminate, DecontaminateConfig(), documents=documents, benchmark_text=items)
    assert texts_of(out) == [f"Teachers say: {ask}."]


PIECES = (
    *"ab ,._\n\t\x01\x7f\\&<>\"'-é“…½Ⅷ한中ภाि\u0301\u200d\u2028\xa0😀𐌀𝒳𠀀".replace("", " ").split(" "),
    " ", "read", "it's", "a[1]", "&nbsp;", "word [12]",
)  # fmt: skip


def test_forms_that_are_written_together_have_the_words_of_each():
    generator = random.Random(5)
    texts = ["".join(generator.choices(PIECES, k=generator.randint(0, 15))) for _ in range(3000)]
    written_forms = write_forms(texts)
    for rows, text in zip(written_forms.rows, texts, strict=True):
        for row, form in zip(rows, forms_of(text), strict=True):
            data = written_forms.data[written_forms.ends[row] : written_forms.ends[row + 1]].tobytes().decode()
            words, expected = words_of(data), words_of(form)
            assert np.array_equal(words.hashes, expected.hashes) and words.number == expected.number, (text, form)
    assert [texts[number] for number in written_forms.changed] == [
        text for text in texts if with_spaces(text.encode()) != text.encode()
    ]
    # Most texts have no words in other forms.
    assert len(write_forms(["Plain words, without much."] * 10).ends) == 11


def test_hashes_of_many_items_are_sorted_with_their_items():
    generator = np.random.default_rng(3)
    hashes = generator.integers(0, 1 << 64, 3000, np.uint64)
    hashes[generator.random(3000) < 0.2] = hashes[0]  # two n-grams of a template, in one bucket
    hashes[generator.random(3000) < 0.2] = hashes[0] + np.uint64(1)
    order = np.argsort(hashes, kind="stable")
    for count in (0, 1, 3000):
        ascending, values = sorted_by_hash(hashes[:count], np.arange(count))
        expected = order[order < count]
        assert np.array_equal(ascending, hashes[expected]) and np.array_equal(values, expected)


@pytest.mark.slow
def test_the_index_does_not_depend_on_which_items_are_hashed_together(monkeypatch):
    text = 'read-only files & <b>tags</b> of two hosts\' names over 人人生而自由 and héllo "quoted"'
    words = text.split()
    generator = random.Random(3)
    sentences = [" ".join(generator.choices(words, k=generator.randint(1, 40))) for _ in range(60)]
    items = [
        Item(
            f"task{number % 2}",
            str(number),
            generator.sample(sentences, 2),
            generator.sample(sentences, 3),
            [ItemAnswer(words[number % 9], generator.choice(sentences), 5)],
        )
        for number in range(40)
    ]
    together = make_index(items, DecontaminateConfig())
    monkeypatch.setattr("corpus.decontaminate.index._BATCH_CHARACTERS", 1)
    alone = make_index(items, DecontaminateConfig())
    for fields, same in zip(together, alone, strict=True):
        for array, expected in zip(fields, same, strict=True):
            assert np.array_equal(array, expected)
    assert together[0].grams.size > 1000 and together[0].questions.size > 5


def test_items_of_a_task_in_lm_evals_own_yaml(build, write, lines_of):
    write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in SUFFIXED))
    task = {
        "task": "planets",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{query}}?\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    }
    path = write("planets.yaml", yaml.safe_dump(task))
    config = BenchmarkTextConfig(tasks=[BenchmarkTask(name="planets", kind="lm_eval", path=path)])
    [row] = lines_of(build(benchmark_text, config) / "items.jsonl")
    assert row["texts"][:2] == [
        "Which planet has the most moons? Saturn",
        "Question: Which planet has the most moons?\nAnswer: Saturn",
    ]
    assert row["parts"][0] == "Which planet has the most moons?"
    assert row["answers"] == [["Which planet has the most moons?", "Saturn", 26]]
