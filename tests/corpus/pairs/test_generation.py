"""Documents that a model behind an endpoint writes: what comes of every answer, and what is never paid for twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError

from corpus.documents.parts import DocumentWriter, is_heldout, link_parts, make_document, read_documents
from corpus.documents.sources import SourceCounts, SourceFacts, read_sources, write_sources
from corpus.generation.answers import AnswerStore, EndpointAnswer
from corpus.generation.config import EndpointConfig, GenerateConfig, GenerateInstructionsConfig, SamplingConfig
from corpus.generation.endpoint import Endpoint, EndpointFailure, Request
from corpus.generation.instructions import generate_instructions, pairs_in
from corpus.generation.prompts import pieces_of
from corpus.generation.stage import generate
from flows.config.graph import graph
from flows.config.read import parse
from infra.errors import Cancelled, StageError
from infra.fingerprint import fingerprint
from infra.run import Result, Run
from tests.support.programs.command import REPOSITORY, environment
from tests.support.programs.processes import wait_until
from tests.support.services.endpoint import Reply, completion, endpoint


def given(folder: Path, documents: int = 12, source: str = "books") -> Path:
    """In two parts."""
    counts, half = SourceCounts(), documents // 2
    for place, numbers in enumerate((range(half), range(half, documents))):
        with DocumentWriter(folder / str(place) / "documents") as writer:
            for number in numbers:
                text = f"Chapter {number}. The quiet river bends {number} times before it reaches the mill."
                one = make_document(text, f"{source}/{number}.txt", f"group {number}", "en", '{"title": "River"}')
                writer.write(one)
                counts.add(one)
    link_parts([folder / "0", folder / "1"], folder)
    write_sources(folder, {source: SourceFacts("public domain", 1.0, "en")}, counts)
    return folder


def built(config: dict[str, Any], documents: Path, out: Path, **run: Any) -> Result:
    out.mkdir(parents=True)
    work = Run(out.parent / f"{out.name}.work", answers_dir=out.parent / "answers", **run)
    return generate(GenerateConfig(**config), {"documents": documents}, out, work)


def upper(body: dict[str, Any], _: int) -> Reply:
    return completion(body["messages"][-1]["content"].rpartition("\n\n")[2].upper())


def payload(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "aux" not in path.parts}


def at(url: str, **more: Any) -> dict[str, Any]:
    return {"endpoint": {"url": url, "model": "m", **more}}


def test_made_documents_follow_the_originals_and_say_where_they_come_from(tmp_path: Path) -> None:
    documents = given(tmp_path / "in")
    with endpoint(upper) as (url, calls):
        result = built({**at(url), "licence": "cc0-1.0", "system": "Be exact."}, documents, tmp_path / "out")
    originals, found = list(read_documents(documents)), list(read_documents(tmp_path / "out"))
    assert found[:12] == originals
    assert [one.text for one in found[12:]] == [one.text.upper() for one in originals]
    assert [one.group for one in found[12:]] == [one.group for one in originals]
    assert found[12].source == "generated/books/0.txt" and found[12].language == "en"
    origin = {"from": originals[0].id, "model": "m", "prompt": "rephrase/encyclopedia"}
    assert json.loads(found[12].metadata) == {"title": "River", "generated": origin}
    rows = pq.read_table(tmp_path / "out" / "aux" / "provenance.parquet").to_pylist()
    assert [row["text"] for row in rows] == [one.text for one in originals]
    assert [row["id"] for row in rows] == [one.id for one in found[12:]]
    facts = json.loads((tmp_path / "out" / "generation.json").read_text())
    assert rows[0]["prompt"] == f"rephrase/encyclopedia {facts['prompt']['digest']}"
    assert rows[0]["answered_by"] == "scripted-1" and "{text}" in facts["prompt"]["text"]
    assert calls.bodies[0]["messages"][0] == {"role": "system", "content": "Be exact."}
    sources = read_sources(tmp_path / "out")
    assert (
        sources["generated"].licence == "cc0-1.0" and sources["generated"].documents == 12 == sources["books"].documents
    )
    assert result.figures["made"] == 12 and result.figures["documents"] == 24
    assert result.figures["completion_tokens"] == 84 and result.figures["requests"] == 12 == len(calls.bodies)
    seeds = [body["seed"] for body in calls.bodies]
    assert len(set(seeds)) == 12 and all(0 <= seed < 2**31 for seed in seeds)


def test_a_repeated_build_asks_nothing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """The endpoint answers otherwise each time; slow first answers must not change the order."""
    documents = given(tmp_path / "in")
    later = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        if number == 0:
            later.wait(10)
        elif number == 11:
            later.set()
        return completion(f"Answer {number} to {body['seed']}")

    with endpoint(reply) as (url, calls):
        built(at(url), documents, tmp_path / "first")
        asked = len(calls.bodies)
        again = built(at(url, concurrency=3, requests_per_minute=1), documents, tmp_path / "second")
        assert asked == 12 == len(calls.bodies)
        assert again.figures["cached"] == 12 and again.figures["requests"] == 0
        built({**at(url), "sampling": {"temperature": 0.1}}, documents, tmp_path / "third")
        assert len(calls.bodies) == 24
    assert payload(tmp_path / "first") == payload(tmp_path / "second") != payload(tmp_path / "third")


class Clock:
    """Time that passes in pauses alone."""

    def __init__(self) -> None:
        self.time, self.pauses = 1000.0, list[float]()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)


def answers_of(url: str, store: Path, questions: int = 1, clock: Clock | None = None, **config: Any) -> list[Any]:
    async def ask() -> list[Any]:
        kept, time_ = AnswerStore(store), clock or Clock()
        config_ = EndpointConfig(url=url, model="m", **config)
        asked = Endpoint(config_, SamplingConfig(), kept, "generate.endpoint", time_.sleep, time_.now)
        requests = [Request([{"role": "user", "content": f"Question {number}"}]) for number in range(questions)]
        try:
            return await asyncio.gather(*map(asked.ask, requests))
        finally:
            await asked.close()
            kept.close()

    return asyncio.run(ask())


def test_an_overloaded_endpoint_is_asked_again_after_the_pause_that_it_asks_for(tmp_path: Path) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    replies: list[Reply] = [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "7"}),
        (503, "<html>busy</html>", {"Retry-After": date}),
        (500, {"error": "broken"}, {}),
        (200, {"error": {"message": "no instance free"}}, {}),
        (200, "<html>a proxy</html>", {}),
        completion("Here."),
    ]
    clock = Clock()
    with endpoint(lambda _, number: replies[number]) as (url, calls):
        assert answers_of(url, tmp_path, clock=clock) == [EndpointAnswer("Here.", "stop", "scripted-1", 11, 7)]
    assert len(calls.bodies) == 6
    assert clock.pauses[0] == 7.0 and 500 < clock.pauses[1] <= 600
    assert [2 <= clock.pauses[2] <= 4, 4 <= clock.pauses[3] <= 8, 8 <= clock.pauses[4] <= 16] == [True] * 3


def test_requests_keep_to_the_rate_and_to_the_number_under_way(tmp_path: Path) -> None:
    clock, several = Clock(), threading.Barrier(3)

    def reply(body: dict[str, Any], number: int) -> Reply:
        several.wait(10)
        return completion("Yes.")

    with endpoint(reply) as (url, calls):
        answers_of(url, tmp_path, 12, clock, concurrency=3, requests_per_minute=30)
    assert calls.most == 3 and len(calls.bodies) == 12
    assert clock.time - 1000 == pytest.approx(11 * 2)


@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        ((401, {"error": {"message": "wrong key"}}, {}), "endpoint_refused", "HTTP 401: wrong key"),
        ((404, {"error": {"message": "no model m"}}, {}), "endpoint_refused", "no model m"),
        ((301, "", {"Location": "http://127.0.0.1:9/"}), "endpoint_refused", "HTTP 301"),
        ((429, {"error": {"message": "quota"}}, {}), "rate_limited", "quota, 3 times"),
        ((429, "", {"Retry-After": "86400"}), "rate_limited", "24.0 hours"),
    ],
)
def test_what_no_document_could_mend_stops_the_stage(tmp_path: Path, reply: Reply, code: str, said: str) -> None:
    with endpoint(lambda *_: reply) as (url, _), pytest.raises(StageError) as raised:
        answers_of(url, tmp_path, attempts=3)
    (problem,) = raised.value.problems
    assert (problem.code, problem.path) == (code, "generate.endpoint") and said in problem.message


def test_an_endpoint_that_is_not_there_stops_the_stage(tmp_path: Path) -> None:
    with endpoint(upper) as (url, _):
        pass
    with pytest.raises(StageError, match="2 times") as raised:
        answers_of(url, tmp_path, attempts=2)
    assert raised.value.problems[0].code == "endpoint_unreachable"


def test_a_refused_document_and_one_that_hangs_are_failures_of_their_own(tmp_path: Path) -> None:
    free = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        if body["messages"][-1]["content"] == "Question 0":
            return 400, {"error": {"message": "too long for the model"}}, {}
        free.wait(30)
        return completion("late")

    with endpoint(reply) as (url, calls):
        refused, hung = answers_of(url, tmp_path, 2, timeout_s=2, attempts=2)
        free.set()
    assert refused == EndpointFailure("HTTP 400: too long for the model")
    assert hung == EndpointFailure("no complete answer within 2 s, 2 times")
    assert len(calls.bodies) == 3, "what is refused is not sent again"


def test_equal_requests_at_once_are_one(tmp_path: Path) -> None:
    documents = tmp_path / "in"
    with DocumentWriter(documents / "documents") as writer:
        for number in range(5):
            writer.write(make_document("Twice told.", f"books/{number}"))
    with endpoint(lambda *_: completion("Told.")) as (url, calls):
        result = built({**at(url), "seed": None}, documents, tmp_path / "out")
    assert len(calls.bodies) == 1 and "seed" not in calls.bodies[0]
    assert result.figures["cached"] == 4 and result.figures["left_repeated"] == 4 and result.figures["made"] == 1


def test_answers_without_text_or_end_are_counted_and_bounded(tmp_path: Path) -> None:
    documents = given(tmp_path / "in", 40)

    def reply(body: dict[str, Any], _: int) -> Reply:
        text = body["messages"][-1]["content"]
        faults = {"Chapter 3.": completion(" \n"), "Chapter 5.": completion("Cut of", "length")}
        faults |= {"Chapter 7.": completion("No.", "content_filter"), "Chapter 8.": completion(None, "tool_calls")}
        return next((found for chapter, found in faults.items() if chapter in text), completion(f"Well: {text[-50:]}"))

    limits = {"failed": 0.05, "empty": 0.05}
    with endpoint(reply) as (url, calls):
        result = built({**at(url), "answer_limits": limits}, documents, tmp_path / "out")
        kept = built({**at(url), "answer_limits": limits, "keep_truncated": True}, documents, tmp_path / "kept")
        with pytest.raises(StageError) as raised:
            built({**at(url), "answer_limits": {"failed": 0.05, "empty": 0.02}}, documents, tmp_path / "bounded")
        assert len(calls.bodies) == 40
    names = ("asked", "answered", "failed", "truncated", "empty", "made")
    assert [result.figures[name] for name in names] == [40, 39, 1, 1, 2, 36]
    assert kept.figures["made"] == 37 and kept.figures["truncated"] == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "aux" / "unanswered.jsonl").read_text().splitlines()]
    assert [row["fault"] for row in rows] == ["empty", "truncated", "failed", "empty"]
    (problem,) = raised.value.problems
    assert problem.code == "bad_answers" and problem.path == "generate.answer_limits.empty"
    assert "got an empty answer, of 40 to ask about; at most 2 % are allowed" in problem.message


def test_a_broken_endpoint_is_not_asked_about_the_whole_corpus(tmp_path: Path) -> None:
    documents = given(tmp_path / "in", 600)
    with endpoint(lambda *_: (400, {"detail": "no chat template"}, {})) as (url, calls):
        with pytest.raises(StageError, match="no chat template"):
            built(at(url, concurrency=2), documents, tmp_path / "out")
        assert len(calls.bodies) < 40


def test_long_documents_are_asked_about_in_pieces(tmp_path: Path) -> None:
    sentence = "It bends twice before it reaches the mill. "
    text = "\n\n".join([sentence * 6, sentence * 30, "x" * 1000])
    pieces = list(pieces_of(text, 300))
    assert "".join("".join(pieces).split()) == "".join(text.split()) and max(map(len, pieces)) <= 600
    assert pieces[1].endswith("mill."), "cut at a sentence end"
    with DocumentWriter(tmp_path / "in" / "documents") as writer:
        writer.write(make_document(text, "books/a"))
    with endpoint(upper) as (url, calls):
        built({**at(url), "cut_characters": 300, "keep_originals": False}, tmp_path / "in", tmp_path / "out")
    (made,) = read_documents(tmp_path / "out")
    assert len(calls.bodies) == len(pieces) and "".join(made.text.split()) == "".join(text.upper().split())


def test_tasks_say_what_is_wanted(tmp_path: Path) -> None:
    documents = given(tmp_path / "in", 3)
    tasks: dict[str, tuple[dict[str, Any], str]] = {
        "translate": ({"kind": "translate", "language": "de"}, "into German"),
        "questions": ({"kind": "questions", "count": 4}, "Write 4 questions"),
        "template": (
            {"kind": "template", "prompt": "{metadata.title} {{in}} {language} of {source}: {text}"},
            "River {in} en of books/0.txt: Chapter 0.",
        ),
    }
    for name, (task, said) in tasks.items():
        with endpoint(lambda *_: completion("<think>Hm.</think>\nGut.")) as (url, calls):
            built({**at(url), "task": task, "samples": 2, "keep_originals": False}, documents, tmp_path / name)
        assert any(said in prompt for prompt in calls.prompts) and len(calls.bodies) == 6
        (made,) = read_documents(tmp_path / name)
        assert made.text == "Gut." and made.language == ("de" if name == "translate" else "en")


def test_some_documents_are_chosen_by_source_and_id(tmp_path: Path) -> None:
    documents = given(tmp_path / "in", 30)
    with endpoint(upper) as (url, calls):
        result = built({**at(url), "max_documents": 7}, documents, tmp_path / "out")
        with pytest.raises(StageError, match="did you mean books"):
            built({**at(url), "from_sources": ["book"]}, documents, tmp_path / "wrong")
        with pytest.raises(StageError, match="already have a source named books"):
            built({**at(url), "name": "books"}, documents, tmp_path / "taken")
    least = sorted(one.id for one in read_documents(documents))[:7]
    origins = [json.loads(one.metadata).get("generated", {}).get("from") for one in read_documents(tmp_path / "out")]
    assert sorted(filter(None, origins)) == least
    assert result.figures["asked"] == 7 == len(calls.bodies) and result.figures["documents"] == 37


def test_the_key_comes_from_the_environment_and_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = given(tmp_path / "in", 3)
    key = "opaque7key-of-a-provider"
    asks = {"api_key_variable": "PROVIDER_API_KEY"}
    with endpoint(upper) as (url, calls):
        with pytest.raises(StageError, match="PROVIDER_API_KEY, which is not set"):
            built(at(url, **asks), documents, tmp_path / "without")
        monkeypatch.setenv("PROVIDER_API_KEY", key)
        with (tmp_path / "journal").open("w+") as journal:
            built(at(url, **asks), documents, tmp_path / "out", journal=journal)
    assert all(one["Authorization"] == f"Bearer {key}" for one in calls.headers)
    wrong = endpoint(lambda *_: (401, {"error": {"message": f"Incorrect API key: {key}"}}, {}))
    with wrong as (url, _), pytest.raises(StageError) as raised:
        built({**at(url, **asks), "name": "other", "seed": 3}, documents, tmp_path / "refused")
    assert key not in str(raised.value) and "Incorrect API key" in str(raised.value)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not written


def test_identity_is_model_prompt_and_sampling_not_where_they_are_asked() -> None:
    def name(**changed: Any) -> str:
        config = {"endpoint": {"url": "http://127.0.0.1:8000/v1", "model": "m"}, **changed}
        return fingerprint("generate", 1, GenerateConfig(**config), {"documents": "d"}, {})

    elsewhere = {"url": "https://api.example.com/v1", "model": "m", "api_key_variable": "A_KEY", "concurrency": 3}
    limits = {"requests_per_minute": 9, "timeout_s": 1, "attempts": 1, "token_limit_key": "max_completion_tokens"}
    assert name() == name(endpoint={**elsewhere, **limits}) == name(answer_limits={"failed": 1})
    changes: list[dict[str, Any]] = [
        {"endpoint": {**elsewhere, "model": "other"}},
        {"endpoint": {**elsewhere, "model_version": "2"}},
        {"sampling": {"temperature": 0}},
        {"sampling": {"extra": {"min_p": 0.1}}},
        {"system": "x"},
        {"task": {"kind": "rephrase", "style": "textbook"}},
        {"task": {"kind": "template", "prompt": "{text}"}},
        {"seed": None},
    ]
    assert len({name(), *(name(**change) for change in changes)}) == 1 + len(changes)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"endpoint": {"url": "127.0.0.1:8000", "model": "m"}}, "expected http://HOST"),
        ({"endpoint": {"url": "http://me:secret@host/v1", "model": "m"}}, "no user or password"),
        ({"endpoint": {"url": "http://host/v1/chat/completions", "model": "m"}}, "before /chat/completions"),
        ({"endpoint": {"url": "http://h/v1", "model": "m", "api_key_variable": "sk-abc"}}, "not the key itself"),
        ({"endpoint": {"url": "http://h/v1", "model": "m", "api_key_variable": "MINE"}}, "MINE_API_KEY"),
        (
            {"endpoint": {"url": "http://h/v1", "model": "m", "api_key_variable": "STEMMA_AUTH"}},
            "stages do not receive",
        ),
        ({"sampling": {"extra": {"temperature": 1}}}, "expected keys other than"),
        ({"task": {"kind": "translate", "language": "xx"}}, "ISO 639"),
        ({"task": {"kind": "template", "prompt": "Hello"}}, "expected {text}"),
        ({"task": {"kind": "template", "prompt": "{text} {title}"}}, "not {title}"),
        ({"task": {"kind": "template", "prompt": "{text} {"}}, "braces"),
    ],
)
def test_a_wrong_config_is_told_before_anything_runs(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        GenerateConfig(**{"endpoint": {"url": "http://h/v1", "model": "m"}, **changed})
    assert said in str(raised.value)


def test_a_cancelled_stage_ends_while_the_endpoint_is_silent(tmp_path: Path) -> None:
    free, asked = threading.Event(), threading.Event()

    def reply(*_: Any) -> Reply:
        asked.set()
        free.wait(60)
        return completion("late")

    with endpoint(reply) as (url, _):
        with pytest.raises(Cancelled):
            built(at(url), given(tmp_path / "in"), tmp_path / "out", is_cancelled=asked.is_set)
        free.set()


def test_a_killed_stage_goes_on_without_asking_again(tmp_path: Path) -> None:
    documents = given(tmp_path / "in", 30)
    hold = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        if number >= 10:
            hold.wait(60)
        return upper(body, number)

    with endpoint(reply) as (url, calls):
        config = at(url, concurrency=1)
        (tmp_path / "generate.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "corpus.generation.stage", "--config", tmp_path / "generate.yaml"]
        places = ["--input", f"documents={documents}", "--out", tmp_path / "killed"]
        with subprocess.Popen([*command, *places], cwd=REPOSITORY, env=environment()) as killed:
            wait_until(lambda: len(calls.bodies) > 10)
            killed.kill()
        hold.set()
        (tmp_path / "killed.work" / "answers").rename(tmp_path / "answers")
        built(config, documents, tmp_path / "out")
    assert len(calls.bodies) == 31, "the one under way was lost, and no other"
    assert len(set(calls.prompts)) == 30 and len(list(read_documents(tmp_path / "out"))) == 60


def test_a_file_of_answers_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "answers.sqlite").write_text("no database at all " * 20)
    with endpoint(upper) as (url, _), pytest.raises(StageError) as raised:
        built(at(url), given(tmp_path / "in"), tmp_path / "out")
    assert raised.value.problems[0].code == "bad_answers_file" and "answers.sqlite" in raised.value.problems[0].path


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("Question: Who?\nAnswer: Ada.\n\nQ: When?\nA: Now\nor then.", [("Who?", "Ada."), ("When?", "Now\nor then.")]),
        ("Sure!\n1. **Q1:** Who?\n   **A1:** Ada.\n2. Q: Why?", [("Who?", "Ada.")]),
        ("- **Question**: Who?\n- **Answer**: A: the first.", [("Who?", "A: the first.")]),
        ('```json\n[{"question": "Who?", "answer": "Ada."}, {"question": "When?"}]\n```', [("Who?", "Ada.")]),
        ('{"pairs": [{"instruction": "Say.", "response": "Said."}]}', [("Say.", "Said.")]),
        ("A plain answer without any mark.", []),
        ("Answer: Ada.\nQuestion: Who?", []),
    ],
)  # fmt: skip
def test_questions_are_found_as_models_write_them(text: str, pairs: list[tuple[str, str]]) -> None:
    assert pairs_in(text) == pairs


def instructed(config: dict[str, Any], documents: Path, out: Path, **inputs: Path) -> Result:
    out.mkdir()
    work = Run(out.parent / f"{out.name}.work", answers_dir=out.parent / "answers")
    found = GenerateInstructionsConfig(**config)
    return generate_instructions(found, {"documents": documents, **inputs}, out, work)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_instructions_are_on_the_side_of_their_documents_and_have_no_twin_on_the_other(tmp_path: Path) -> None:
    documents = given(tmp_path / "in", 60)
    questions = (
        "Question: How often does the river bend in chapter {0}, in so many words as there are?\nAnswer: {0} times."
    )
    same = "\nQuestion: What does the river reach in the end after all of its bends?\nAnswer: The mill, chapter {0}."

    def reply(body: dict[str, Any], _: int) -> Reply:
        chapter = body["messages"][-1]["content"].rpartition("Chapter ")[2].partition(".")[0]
        return completion("No question here." if chapter == "9" else (questions + same).format(chapter))

    config = {"heldout_share": 0.3, "near_prompts": {"threshold": 0.95}}
    with endpoint(reply) as (url, calls):
        result = instructed({**at(url), **config}, documents, tmp_path / "out")
        assert "Write 5 questions" in calls.prompts[0]
        with pytest.raises(StageError) as raised:
            instructed({**at(url), **config, "answer_limits": {"unparsable": 0.01}}, documents, tmp_path / "bounded")
    sides = {side: lines(tmp_path / "out" / f"{side}.jsonl") for side in ("train", "heldout")}
    for side, rows in sides.items():
        assert rows and all(is_heldout(f"group {row['source'][16:-4]}", 0.3) == (side == "heldout") for row in rows)
    asked = [row["prompt"] for rows in sides.values() for row in rows if "in the end" in row["prompt"]]
    on_one_side = [sum(row["prompt"] == asked[0] for row in rows) for rows in sides.values()]
    assert asked and 0 in on_one_side, "the same question of documents of both sides"
    assert result.figures["unparsable"] == 1 and result.figures["near_duplicates"] > 0
    assert raised.value.problems[0].path == "generate_instructions.answer_limits.unparsable"
    provenance = pq.read_table(tmp_path / "out" / "aux" / "provenance.parquet").to_pylist()
    assert {row["id"] for rows in sides.values() for row in rows} <= {row["id"] for row in provenance}


@pytest.mark.parametrize(
    ("task", "prompt", "response"),
    [
        ({"kind": "questions", "passage": True}, "Chapter 0. The quiet river", "ANSWER"),
        ({"kind": "backtranslation"}, "Question: Who", "Chapter 0. The quiet river"),
        (
            {"kind": "template", "prompt": "{text}", "answer": "response", "instruction": "Short, {source}: {text}"},
            "Short, books/0.txt: Chapter 0.",
            "Question: Who",
        ),
    ],
)  # fmt: skip
def test_an_answer_becomes_the_prompt_or_the_response(
    tmp_path: Path, task: dict[str, Any], prompt: str, response: str
) -> None:
    documents = given(tmp_path / "in", 20)
    with endpoint(lambda _, number: completion(f"Question: Who {number}?\nAnswer: ANSWER {number}")) as (url, _):
        config = {**at(url), "task": task, "heldout_share": 0.3, "near_prompts": None}
        instructed(config, documents, tmp_path / "out")
    rows = [row for side in ("train", "heldout") for row in lines(tmp_path / "out" / f"{side}.jsonl")]
    (row,) = (row for row in rows if row["source"] == "generated/books/0.txt")
    assert row["prompt"].startswith(prompt) and row["response"].startswith(response)


def test_pairs_that_hold_a_test_item_are_dropped(tmp_path: Path) -> None:
    item = "which of the two rivers of the north bends twice before it reaches the old mill"
    (tmp_path / "items").mkdir()
    row = {"task": "quiz", "item": "0", "texts": [item], "parts": [], "answers": []}
    (tmp_path / "items" / "items.jsonl").write_text(json.dumps(row) + "\n")

    def reply(body: dict[str, Any], number: int) -> Reply:
        recited = f"Question: Say {item}?\nAnswer: Number {number}."
        return completion(recited if number < 3 else f"Question: What is number {number}?\nAnswer: It is {number}.")

    with endpoint(reply) as (url, _):
        config = {**at(url), "heldout_share": 0.3, "near_prompts": None}
        result = instructed(config, given(tmp_path / "in", 30), tmp_path / "out", benchmark_text=tmp_path / "items")
    assert result.figures["dropped"] == 3 and result.figures["items_hit"] == 1


def test_generated_instructions_are_cleared_of_the_benchmarks_and_tune_a_model() -> None:
    base: dict[str, Any] = {
        "name": "x",
        "ingest": {},
        "base_model": {"path": "model"},
        "benchmarks": {"tasks": ["cloze"]},
    }
    served = {"endpoint": {"url": "http://127.0.0.1:8000/v1", "model": "m"}}
    steps = {
        "questions": {"uses": "generate_instructions", "inputs": {"documents": "ingest"}, **served},
        "chat": {"uses": "sft", "inputs": {"model": "base_model", "instructions": "questions"}, "duration": "1 epoch"},
    }
    nodes = graph(parse({**base, "steps": steps}))
    assert dict(nodes["questions"].inputs) == {"documents": "ingest", "benchmark_text": "benchmark_text"}
    assert nodes["chat"].inputs["instructions"] == "questions"
    kept = {**steps, "questions": {**steps["questions"], "decontaminate": None}}
    assert "benchmark_text" not in graph(parse({**base, "steps": kept}))
    mixed = {**base, "generate": {**served, "name": "told"}, "tokenizer": {}, "shard": {"by_source": True}}
    assert graph(parse(mixed))["tokenizer"].inputs["documents"] == "generate"
