"""Content of README and guides that must match the code: the picture of the DAG, configs, output, messages."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from cli.commands import COMMANDS, stemma
from corpus.documents.parts import DocumentWriter, make_document, read_documents
from flows.config.graph import graph
from flows.config.read import load, parse
from flows.config.steps import OWN_KEYS
from flows.planning.picture import pipeline_picture
from infra.launch.config import LaunchConfig
from infra.run import Run
from tasks.stage import Stage, needs
from tasks.stages import STAGES
from tests.support.guides import DOCS, guides
from tests.support.open_models import SHAPES
from tests.support.programs.command import REPOSITORY, environment, write_config

PACKAGES = ("cli", "flows", "tasks", "training", "evaluation", "corpus", "infra")
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf8")


def part(name: str, label: str) -> str:
    """Text between `<!-- label:begin -->` and `<!-- label:end -->`."""
    return page(name).partition(f"<!-- {label}:begin -->")[2].partition(f"<!-- {label}:end -->")[0]


def blocks(text: str, language: str = "") -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for kind, block in fenced if kind == language]


def typed(*words: str | Path) -> str:
    found = CliRunner().invoke(stemma, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_picture_of_the_quickstart_is_that_of_its_config() -> None:
    """After a change of its stages: python -m flows.planning.picture configs/quickstart.yaml >
    docs/pictures/quickstart.svg"""
    nodes = graph(load(QUICKSTART))
    drawn = pipeline_picture(nodes)
    assert drawn == page("docs/pictures/quickstart.svg")
    assert not [name for name in nodes if f"{name}: {nodes[name].stage.about}" not in drawn]


def test_labels_of_the_picture_stay_inside_their_boxes_in_wide_fonts() -> None:
    """DejaVu Sans, the widest that browsers fall back to, takes 0.59 em for a character of such names, on average."""
    name = "documents_of_a_step_with_a_long_name"
    config = yaml.safe_load(QUICKSTART.read_text())
    config["steps"] = {name: {"uses": "clean", "inputs": {"documents": "ingest"}}}
    drawn = pipeline_picture(graph(parse(config)))
    texts = re.findall(r'<text( class="small")?[^>]*?( textLength="\d+" [^>]*)?>([^<]*)</text>', drawn)
    (width,) = set(re.findall(r'<rect[^>]* width="(\d+)"', drawn))
    assert [text for _, squeezed, text in texts if squeezed] == [name]
    wide = {text: len(text) * 0.59 * (10 if small else 13) for small, squeezed, text in texts if not squeezed}
    assert not [text for text, pixels in wide.items() if pixels > int(width) - 18]


def test_the_shown_run_and_check_are_those_of_the_quickstart(built_data: Path) -> None:
    """After a change of its stages both are captured again: `make demo`, and the check that the guide names."""
    stages = list(graph(load(QUICKSTART)))
    (run,), (check,) = blocks(part("docs/tutorials/first-model.md", "demo")), blocks(part("docs/rerunning.md", "check"))
    for shown in (run, check):
        rows = shown.partition("\n\n")[0].splitlines()[1:]
        assert [row.split()[0] for row in rows if not row.startswith(" ")] == stages
    config, store = built_data / "config.yaml", built_data / "store"
    said = typed("check", config, "--root", store, "--set", "tokenizer.vocab_size=420").splitlines()
    assert check.split("\n")[0].split() == said[0].split()
    summary = r"\d+ to build, \d+ to reuse in \S+"
    counts, training = check.split("\n\n")[1:]
    assert re.fullmatch(summary, said[-1]) and re.fullmatch(summary, counts)
    assert training.split("\n")[1].split() == ["stage", "on", "time", "cost", "memory", "disk"]
    assert run.split("\n")[0].split() == ["stage", "status", "seconds", "key", "figure"]


def test_the_config_that_the_tutorial_shows_reads_files_of_those_fields(tmp_path: Path) -> None:
    shown = yaml.safe_load(blocks(part("docs/tutorials/own-text.md", "own-data"), "yaml")[0])
    for folder, name in (("books", "a.txt"), ("crawl", "a.jsonl"), ("wiki", "a.jsonl")):
        (tmp_path / folder).mkdir()
        text = "Once upon a time. " * 40
        (tmp_path / folder / name).write_text(text if name == "a.txt" else json.dumps({"text": text}) + "\n")
    (tmp_path / "instructions.json").write_text(json.dumps([{"instruction": "a", "input": "", "output": "b"}]))
    (tmp_path / "preferences.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    shown["ingest"]["read"][0]["paths"] = ["books/*.txt", "crawl/*.jsonl", "wiki/*.jsonl"]  # unpacked, as JSON Lines
    whole = {**yaml.safe_load(QUICKSTART.read_text()), **shown}
    assert "take out\n`sft.text_sources` and `rlhf.text_sources`" in page("docs/tutorials/own-text.md")
    del whole["sft"]["text_sources"], whole["rlhf"]["text_sources"]
    said = typed("check", write_config(tmp_path / "mine.yaml", whole), "--root", tmp_path / "store")
    assert said.startswith("nothing is built yet")


def test_the_config_for_data_alone_needs_no_model(tmp_path: Path) -> None:
    nodes = graph(load(REPOSITORY / "configs" / "corpus.yaml"))
    assert {"decontaminate", "shard", "corpus_report"} <= nodes.keys()
    assert not [name for name, node in nodes.items() if node.stage.makes_weights]


def test_the_stage_that_the_guide_adds_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, declaration = blocks(part("docs/stages.md", "stage"), "python")
    (used,) = blocks(part("docs/stages.md", "stage"), "yaml")
    file = tmp_path / "longest.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("corpus.longest", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "corpus.longest", module)
    spec.loader.exec_module(module)
    stage: Stage = eval(declaration, {"Stage": Stage, "needs": needs, "LongestConfig": module.LongestConfig})
    (step,) = yaml.safe_load(used)["steps"].values()
    assert step["uses"] == stage.name and all(stage.input(name) for name in step["inputs"])
    config = stage.config.model_validate({key: value for key, value in step.items() if key not in OWN_KEYS})
    with DocumentWriter(tmp_path / "in" / "documents") as writer:
        for size in range(600):
            writer.write(make_document("word " * (1 + size * 7 % 600), "books/a.txt"))
    run = Run(tmp_path / "work", LaunchConfig())
    out = tmp_path / "out"
    result = stage.load()(config, {"documents": tmp_path / "in"}, out, run)
    lengths = [len(one.text) for one in read_documents(out)]
    assert min(lengths) == 101 * len("word ") and len(lengths) == 500 == result.figures["documents"]
    assert json.loads((out / "sources.json").read_text())["books"]["documents"] == 500


def test_the_config_and_the_families_of_the_guide_to_open_models_are_those_that_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = blocks(part("docs/tutorials/align-an-open-model.md", "align"), "yaml")
    (tmp_path / "rewards.py").write_text(blocks(page("docs/tutorials/align-an-open-model.md"), "python")[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the stage, whose functions are looked for in its process
    tuned = graph(parse(yaml.safe_load(shown)))
    assert [tuned[name].inputs["model"] for name in ("sft", "dpo", "rloo")] == ["base_model", "sft", "dpo"]
    text = (DOCS / "tutorials" / "align-an-open-model.md").read_text(encoding="utf8").partition("## Families")[2]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in text.splitlines() if line.startswith("| `")]
    assert rows == [[name, shape[2]] for name, shape in SHAPES.items()]


def test_every_stage_has_a_row_in_the_guide() -> None:
    rows = page("docs/stages.md").partition("A config may leave")[0]
    assert not [name for name in STAGES if f"`{name}`" not in rows and f"`{name}_" not in rows]


def test_every_command_but_completion_takes_json_as_the_tutorial_says() -> None:
    def takes_json(name: str) -> bool:
        command = stemma.get_command(click.Context(stemma), name)
        assert command is not None
        each = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        return all(any(param.name == "as_json" for param in one.params) for one in each)

    without = [name for name in COMMANDS if not takes_json(name)]
    assert without == ["completion"]


def test_every_command_is_told_of_in_the_readme_or_a_guide() -> None:
    told = "\n".join(path.read_text(encoding="utf8") for path in (REPOSITORY / "README.md", *guides()))
    assert not [name for name in COMMANDS if not re.search(rf"(stemma |`){name}\b", told)]


def test_every_launch_section_that_a_guide_shows_is_one_that_is_taken() -> None:
    """Some blocks show several, a line each."""
    shown = [block for path in guides() for block in blocks(path.read_text(encoding="utf8"), "yaml")]
    single = [line for block in shown for line in block.splitlines() if line.startswith("launch: {")]
    whole = [block for block in shown if re.search(r"^launch:( *#.*)?$", block, flags=re.MULTILINE)]
    for text in (*single, *whole):
        LaunchConfig.model_validate(yaml.safe_load(text)["launch"])
    assert len(single) > 12 and len(whole) > 5


def test_every_option_that_a_guide_gives_to_a_command_is_one_of_it() -> None:
    pages = (REPOSITORY / "README.md", *guides())
    shown = [block for path in pages for kind in ("bash", "console") for block in blocks(path.read_text("utf8"), kind)]
    commands = []
    for line in "\n".join(shown).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(takewhile(lambda word: word[:1] not in tuple("|;&<>()"), lexer))
        at = [place for place, word in enumerate(words) if word == "stemma" or word.endswith("/stemma")]
        if at and words[at[0] + 1 :]:
            commands.append(words[at[0] + 1 :])
    for name, *words in commands:
        command = stemma.get_command(click.Context(stemma), name)
        assert command is not None, name
        if isinstance(command, click.Group) and words:
            name, *words = words
            command = command.get_command(click.Context(command), name)
            assert command is not None, name
        command.make_parser(click.Context(command)).parse_args(words)  # raises NoSuchOption
    assert len(commands) > 50


def test_guides_name_only_files_that_are_there() -> None:
    """By their path, or a file of training/ by its name alone, all of which the guide to training tells of."""
    folders = (*PACKAGES, "tests", "benchmarks", "tools")
    files = [f"/{path.relative_to(REPOSITORY)}" for name in folders for path in (REPOSITORY / name).rglob("*.*")]
    written = (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *guides())
    for guide in written:
        named = re.findall(r"`([\w./-]+\.(?:py|sh))`", guide.read_text(encoding="utf8"))
        assert not [name for name in named if not any(path.endswith(f"/{name}") for path in files)], guide.name
    table = page("docs/training/index.md").partition("| in `training/` |")[2].partition("## ")[0]
    there = {path.split("/")[2] for path in files if path.startswith("/training/") and path.endswith(".py")}
    told = {name.rstrip("/") for name in re.findall(r"`(\w+(?:\.py|/))`", table)}
    assert told - {"composer.py", "native.py"} == there - {"__init__.py"}


def literals() -> Iterator[str]:
    """Every text in the packages, with … where a value is put in."""
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
                if isinstance(node, ast.JoinedStr):
                    pieces = [str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values]
                    yield re.sub("…+", "…", "".join(pieces))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def troubleshooting() -> str:
    """The text of the page and of its chapter, each item of a list on one line."""
    pages = [DOCS / "troubleshooting.md", *sorted((DOCS / "troubleshooting").glob("*.md"))]
    return re.sub(r"\n  +", " ", "\n".join(path.read_text(encoding="utf8") for path in pages))


def test_each_message_that_troubleshooting_explains_is_one_that_the_code_can_print() -> None:
    """An item is the message, the code in parentheses where there is one, why, and the fix unless it is no error."""
    items = [line for line in troubleshooting().splitlines() if line.startswith("- `")]
    parsed = [re.fullmatch(r"- `([^`]+)`(?: \(`(\w+)`\)\.)? \S.*?(?:\.|:)( \*Fix:\* \S.*\.)?", line) for line in items]
    assert not [line for line, match in zip(items, parsed, strict=True) if not match]
    rows = [match.groups() for match in parsed if match]
    assert len(rows) > 110
    known = list(literals())
    texts = "\0".join(known)
    assert not [message for message, _, _ in rows if message not in texts]
    codes = {code for _, code, _ in rows if code}
    assert len(codes) > 70 and not codes - set(known)
    assert not [message for message, code, fix in rows if code and not fix]
    order = sorted(message for message, _, _ in rows)
    assert not [first for first, second in pairwise(order) if first == second]


LETTERS = (
    "The quiet river of the north bends twice before it reaches the old mill and the fields that belong to it.",
    "A careful reader will have noticed that the second letter was written with another pen, and in haste.",
    "They kept the records of the parish in a chest with three locks, and each of the keys had its own keeper.",
    "When the lamp went out, nobody in the room could say with certainty which of the two had spoken first.",
)


@pytest.mark.long
def test_the_outputs_in_the_lineage_guide_are_those_of_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The risk: a guide whose captured output nobody has seen for months."""
    guide = page("docs/lineage.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters").mkdir()
    for number in range(4):
        text = " ".join(LETTERS[(number + turn) % 4] for turn in range(3))
        (tmp_path / "letters" / f"{number + 1}.txt").write_text(text + "\n")
    (tmp_path / "corpus.yaml").write_text(blocks(guide, "yaml")[0])
    env = environment(STEMMA_ROOT=str(tmp_path / "store"))
    monkeypatch.setenv("STEMMA_ROOT", env["STEMMA_ROOT"])

    def run(*words: str) -> None:
        done = [sys.executable, "-m", "cli.main", "run", "corpus.yaml", *words]
        subprocess.run(done, env=env, cwd=tmp_path, check=True, capture_output=True)

    def masked(text: str) -> list[str]:
        text = re.sub(r"/\S*(?=/(letters|configs|clean)/)", "…", text)
        text = re.sub(r"\b(?=\d*[a-f])[0-9a-f]{8,16}\b|\b\d{8}\b|\d{4}-\d\d-\d\d", "#", text)
        return [line.rstrip() for line in text.splitlines()]

    shown = dict(block.split("\n", 1) for block in blocks(guide) if block.startswith("$ stemma "))
    run()
    for command in ("$ stemma lineage tokenizer", "$ stemma lineage letters/2.txt --down"):
        assert masked(typed(*command.split()[2:])) == masked(shown[command])
    run("--set", "tokenizer.vocab_size=500")
    assert masked(typed("gc")) == masked(shown["$ stemma gc"])


def test_no_page_is_longer_than_a_reader_takes_in() -> None:
    """300 lines; a longer one is split by subject."""
    pages = (REPOSITORY / "README.md", REPOSITORY / "AGENTS.md", *guides(), *(REPOSITORY / "benchmarks").rglob("*.md"))
    lengths = {path: len(path.read_text(encoding="utf8").splitlines()) for path in pages}
    assert not {str(path): length for path, length in lengths.items() if length > 300}


def table_cells(text: str) -> Iterator[str]:
    """The cells of a page's tables; a picture or a link counts by the words that are shown."""
    for line in re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if line.startswith("|"):
            yield from (re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", cell).strip() for cell in re.split(r"(?<!\\)\|", line))


def test_no_cell_of_a_table_is_a_paragraph() -> None:
    """60 characters; what says more is a list or sections."""
    pages = (*REPOSITORY.glob("*.md"), REPOSITORY / "tests" / "README.md", *guides())
    cells = {path.name: [cell for cell in table_cells(path.read_text("utf8")) if len(cell) > 60] for path in pages}
    assert not {name: long for name, long in cells.items() if long}
    assert list(table_cells("| a | [b](c) \\| d |\n\n```\n| code |\n```\n")) == ["", "a", "b \\| d", ""]
