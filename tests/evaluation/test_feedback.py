"""Judgements of people: read, checked, counted, and turned into pairs to train on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus.config import PreferencesConfig
from corpus.preferences import preferences
from evaluation.people.agreement import krippendorff_alpha
from evaluation.people.judgements import Judgement, Judgements
from evaluation.people.label_studio import tasks
from evaluation.people.outcome import outcome
from evaluation.people.pairs import Export, blind
from evaluation.people.win_rates import ELO, Contest, strengths, win_rates
from flows.config.read import parse
from flows.feedback.round import with_feedback
from infra.errors import StageError
from infra.run import Run
from training.generation.candidates import prompts_in


def test_alpha_is_that_of_the_paper() -> None:
    data = {
        "A": "1 2 3 3 2 1 4 1 2 . . .",
        "B": "1 2 3 3 2 2 4 1 2 5 . 3",
        "C": ". 3 3 3 2 3 4 2 2 5 1 .",
        "D": "1 2 3 3 2 4 4 1 2 5 1 .",
    }
    columns = zip(*(row.split() for row in data.values()), strict=True)
    found = krippendorff_alpha([[value for value in unit if value != "."] for unit in columns])
    assert found is not None
    assert found.value == pytest.approx(0.743, abs=5e-4)
    assert found.low < found.value < found.high


def test_alpha_says_nothing_where_nobody_judged_twice_or_all_said_the_same() -> None:
    assert krippendorff_alpha([["a"], ["b"]]) is None
    assert krippendorff_alpha([]) is None
    assert krippendorff_alpha([["a", "a"], ["a", "a"]]) is None


def test_strengths_expect_as_many_wins_as_there_were() -> None:
    """The likelihood equations of Bradley and Terry: each model's expected wins are those that it had."""
    random = np.random.default_rng(3)
    true = {"base": -200.0, "sft": 0.0, "rlhf": 200.0}
    names = list(true)
    contests = []
    for number in range(600):
        first, second = random.choice(names, 2, replace=False)
        won = random.random() < 1 / (1 + math.exp(-(true[first] - true[second]) / ELO))
        contests.append(Contest(first, second, float(won), f"{number}"))
    found = strengths(contests)
    met = [*contests, *(Contest(a, b, 0.5, "even") for i, a in enumerate(names) for b in names[i + 1 :])]
    for name in names:
        mine = [one for one in met if name in (one.first, one.second)]
        had = sum(one.won if one.first == name else 1 - one.won for one in mine)
        others = [one.second if one.first == name else one.first for one in mine]
        expected = sum(1 / (1 + math.exp(-(found[name].value - found[other].value) / ELO)) for other in others)
        assert expected == pytest.approx(had, abs=1e-3)
        assert found[name].low < true[name] < found[name].high


def test_a_model_that_always_won_is_strong_but_not_infinitely() -> None:
    contests = [Contest("new", "old", 1.0, f"{number}") for number in range(9)]
    found = strengths(contests)
    assert found["new"].value - found["old"].value == pytest.approx(ELO * math.log(9.5 / 0.5), rel=1e-3)
    (interval, count) = win_rates([*contests, Contest("old", "new", 1.0, "9")])["new", "old"]
    assert (interval.value, count) == (0.9, 10)
    # All of few pairs are no certainty: their interval had no width.
    ((won, _),) = win_rates(contests[:3]).values()
    assert (won.value, won.high) == (1, 1) and won.low == pytest.approx(0.438, abs=1e-3)
    ((even, _),) = win_rates([Contest("new", "old", 0.5, f"{n}") for n in range(4)]).values()
    assert even.low < 0.2 and even.high > 0.8
    ((same, _),) = win_rates([Contest("new", "old", 1.0, "one prompt")] * 9).values()
    assert (same.low, same.high) == (0, 1), "nine pairs of one prompt say nothing of others"


@pytest.fixture
def export() -> Export:
    answered = [(f"question {n}", [("sft", f"plain {n}"), ("rlhf", f"polite {n}")]) for n in range(8)]
    pairs, given_by = blind(answered, seed=1)
    return Export(pairs, given_by, {"sft": {}, "rlhf": {}}, {"seed": 1})


def _answer_of(export: Export, pair: str, model: str) -> str:
    return "ab"[export.given_by[pair].index(model)]


def test_the_order_of_answers_tells_nothing(export: Export) -> None:
    assert {given[0] for given in export.given_by.values()} == {"sft", "rlhf"}
    for id, pair in export.pairs.items():
        assert getattr(pair, _answer_of(export, id, "rlhf")).startswith("polite")


def test_an_export_is_read_back_and_a_changed_one_refused(export: Export, tmp_path: Path) -> None:
    folder = tmp_path / "round"
    export.write(folder, {})
    assert Export.read(folder) == export
    with pytest.raises(StageError, match="expected a new or an empty folder"):
        export.write(folder, {})
    changed = (folder / "pairs.jsonl").read_text().replace("polite 3", "polite three")
    (folder / "pairs.jsonl").write_text(changed)
    with pytest.raises(StageError, match="not the one that"):
        Export.read(folder)
    with pytest.raises(StageError, match="name the folder of an export"):
        Export.read(tmp_path)


@pytest.mark.parametrize("name", ["key.json", "pairs.jsonl"])
@pytest.mark.parametrize("left", [b"", b'{"export": "a', b"\0\0\0", b"[7]\n"])
def test_a_damaged_export_is_named(export: Export, tmp_path: Path, name: str, left: bytes) -> None:
    export.write(tmp_path / "round", {})
    (tmp_path / "round" / name).write_bytes(left)
    with pytest.raises(StageError) as error:
        Export.read(tmp_path / "round")
    (problem,) = error.value.problems
    assert (problem.code, problem.path) == ("damaged_export", str(tmp_path / "round"))


def test_judgements_of_our_page_and_of_label_studio_become_pairs(export: Export, tmp_path: Path) -> None:
    ids = list(export.pairs)
    ours = [
        {"export": export.id, "pair": id, "annotator": "ann", "choice": _answer_of(export, id, "rlhf"), "left": "b"}
        for id in ids[:6]
    ]
    ours[0] |= {"reason": "kinder", "correction": "a better one", "seconds": 2.5}
    wrong: list[Any] = [
        {**ours[0], "pair": "unknown"},
        {**ours[0], "export": "another"},
        {**ours[0], "choice": "left"},
        {**ours[0], "annotator": " "},
        {**ours[1], "choice": "tie"},
        7,
    ]
    lines = [json.dumps(row) for row in [*ours, *wrong, ours[0]]]
    (tmp_path / "ann.jsonl").write_text("\n".join([*lines, "{cut off"]))

    def annotated(task: dict[str, Any], result: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": 1,
            **task,
            "annotations": [{"completed_by": {"id": 3, "email": "bob@lab"}, "result": result, **more}],
        }

    def selects(side: str) -> list[dict[str, Any]]:
        value = {"selected": side}
        return [{"from_name": "comparison", "to_name": "answer1,answer2", "type": "pairwise", "value": value}]

    made = tasks(export.pairs.values(), export.id)
    tie = [
        {
            "from_name": "otherwise",
            "to_name": "prompt",
            "type": "choices",
            "value": {"choices": ["as good as each other"]},
        }
    ]
    side = {"a": "left", "b": "right"}
    exported = [
        annotated(made[0], selects(side[_answer_of(export, ids[0], "rlhf")]), lead_time=9.0),
        annotated(made[1], selects(side[_answer_of(export, ids[1], "sft")])),
        annotated(made[2], tie),
        annotated(made[3], [], was_cancelled=True),
        annotated(made[4], []),
    ]
    (tmp_path / "bob.json").write_text(json.dumps(exported))

    read = Judgements.read([tmp_path / "ann.jsonl", tmp_path / "bob.json"], export)
    assert [(one.where, one.reason) for one in read.aside] == [
        ("ann.jsonl:7", "there is no pair 'unknown' in the export"),
        ("ann.jsonl:8", f"it is of the export another, not of {export.id}"),
        ("ann.jsonl:9", "expected a choice of a, b, tie, neither, not 'left'"),
        ("ann.jsonl:10", "it names no annotator"),
        ("ann.jsonl:11", f"ann said {ours[1]['choice']} of this pair before, but now tie"),
        ("ann.jsonl:12", "expected a JSON object"),
        ("ann.jsonl:14", "expected a JSON object"),
        ("bob.json, task 5", "expected a choice of a, b, tie, neither, not None"),
    ]
    found = outcome(export, read)
    summary = found.summary
    assert (summary["judgements"], summary["skipped"], summary["quarantined"]) == (9, 1, 8)
    assert summary["annotators"] == {"ann": 6, "bob@lab": 3}
    (rate,) = summary["win_rates"]
    # Both for rlhf, one each way, one for rlhf and a tie, three for rlhf.
    assert (rate["model"], rate["over"], rate["pairs"]) == ("rlhf", "sft", 6)
    assert rate["value"] == pytest.approx((1 + 0.5 + 0.75 + 3) / 6, abs=1e-6)
    # The pair on which the two disagree is a tie; who said of the next one that it is one gave half a vote to each.
    assert [row["votes"] for row in found.preferences] == [[2, 0], [1.5, 0.5], [1, 0], [1, 0], [1, 0]]
    assert [row["votes"] for row in found.ties] == [[1, 1]] and summary["ties"] == 1
    assert all(row["chosen"].startswith("polite") for row in found.preferences)
    assert found.preferences[0]["annotators"] == ["ann", "bob@lab"]
    assert found.instructions == [
        {"prompt": export.pairs[ids[0]].prompt, "response": "a better one", "annotator": "ann"}
    ]

    found.write(tmp_path / "judged")
    config = PreferencesConfig.model_validate(
        {
            "read": [{"kind": "files", "paths": [f"{tmp_path}/judged/preferences.jsonl"], "prompt_field": "prompt"}],
            "heldout_share": 0.4,
        }
    )
    result = preferences(config, {}, tmp_path / "artifact", Run(tmp_path / "work"))
    assert result.figures["train_pairs"] + result.figures["heldout_pairs"] == 5


def test_what_was_written_after_a_first_save_and_whatever_stands_in_a_text_is_read(
    export: Export, tmp_path: Path
) -> None:
    first, second, third = list(export.pairs)[:3]
    said: dict[str, Any] = {"export": export.id, "annotator": "ann", "choice": "a", "left": "a"}
    saved = [{**said, "pair": first}, {**said, "pair": second, "correction": "one"}]
    later = [
        {**said, "pair": first, "reason": "kinder", "correction": "pasted\u2028in two\x85lines"},
        {**said, "pair": second, "correction": "another"},
        {**said, "pair": [third]},
    ]
    for name, rows in (("ann.jsonl", saved), ("ann (1).jsonl", later)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (tmp_path / name).write_text("".join(lines), encoding="utf8")
    (tmp_path / "studio.json").write_text(json.dumps([{"data": {"pair": third}, "annotations": [7]}]))
    read = Judgements.read([tmp_path / name for name in ("ann.jsonl", "ann (1).jsonl", "studio.json")], export)
    assert [(one.item, one.reason, one.correction) for one in read.used] == [
        (first, "kinder", "pasted\u2028in two\x85lines"),
        (second, "", "one"),
    ]
    assert [(one.where, one.reason) for one in read.aside] == [
        ("ann (1).jsonl:2", "ann has corrected this pair before, in other words"),
        ("ann (1).jsonl:3", f"there is no pair {[third]!r} in the export"),
        ("studio.json, task 1", "expected a JSON object"),
    ]


def test_an_export_of_another_form_costs_what_is_wrong_in_it_alone(export: Export, tmp_path: Path) -> None:
    """A text in the place of a list of texts became its letters with spaces between them; others ended the import with
    a traceback, and a byte order mark cost a whole file."""
    first, second, third, fourth, fifth = list(export.pairs)[:5]
    left = {"from_name": "comparison", "value": {"selected": "left"}}
    corrected = {"from_name": "correction", "value": {"text": "better words"}}
    tasks: list[Any] = [
        {"data": {"pair": pair}, "annotations": [{"completed_by": 1, "lead_time": 10**400, "result": result}]}
        for pair, result in ((first, [left, corrected]), (second, [left, "odd", {"value": 3}]), (third, "odd"))
    ]
    tasks.append({"data": {"pair": fourth}, "annotations": 7})
    (tmp_path / "studio.json").write_text(json.dumps(tasks), encoding="utf-8-sig")
    line = json.dumps({"pair": fifth, "annotator": "ann", "choice": "b", "seconds": math.inf})
    (tmp_path / "ann.jsonl").write_text(f"{line}\n[{'1' * 5000}]\n", encoding="utf-8-sig")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    read = Judgements.read([tmp_path / name for name in ("studio.json", "ann.jsonl", "deep.json")], export)
    assert [(one.item, one.choice, one.correction, one.seconds) for one in read.used] == [
        (first, "a", "better words", None),
        (second, "a", "", None),
        (fifth, "b", "", None),
    ]
    assert [(one.where, one.reason) for one in read.aside] == [
        ("studio.json, task 3", "expected a choice of a, b, tie, neither, not None"),
        ("studio.json, task 4", "expected a JSON object"),
        ("ann.jsonl:2", "expected a JSON object"),
        ("deep.json", "expected a JSON object"),
    ]


def test_a_round_s_votes_and_ties_go_on_to_the_reward_model(export: Export, tmp_path: Path) -> None:
    """Every judge of the first pair says that it is a tie, of the second that neither can be used, of the third two of
    three prefer a; a round of another pipeline and one without judgements are not read."""
    ids = list(export.pairs)
    said = [(ids[0], "tie"), (ids[1], "neither"), (ids[2], "a"), *((id, "b") for id in ids[3:])]
    rows = [Judgement(id, name, choice) for id, choice in said for name in ("ann", "bob", "eve")]
    rows[6] = Judgement(ids[2], "ann", "b")
    found = outcome(export, Judgements(used=rows))
    assert [row["votes"] for row in found.preferences] == [[2, 1], *[[3, 0]] * 5]
    assert [row["votes"] for row in found.ties] == [[1.5, 1.5]]
    config = parse({"name": "mine", "preferences": {"read": [{"kind": "docstrings"}], "heldout_share": 0.4}})
    for name, pipeline in (("1-a", "mine"), ("2-b", "another"), ("3-c", "mine")):
        folder = tmp_path / "feedback" / name
        replace(export, drawn={"pipeline": pipeline}).write(folder, {})
        if name != "3-c":
            found.write(folder / "judged")
    learning = with_feedback(config, tmp_path).section("preferences")
    assert isinstance(learning, PreferencesConfig)
    of_people = learning.model_copy(update={"read": learning.read[1:]})
    assert len(of_people.read) == 1
    preferences(of_people, {}, tmp_path / "artifact", Run(tmp_path / "work"))
    lines = [json.loads(line) for side in ("train", "heldout")
             for line in (tmp_path / "artifact" / f"{side}.jsonl").read_text().splitlines()]  # fmt: skip
    assert sorted(line["votes"] for line in lines) == [[1.5, 1.5], [2, 1], *[[3, 0]] * 5]


def test_an_export_goes_into_an_empty_folder_that_is_there(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out .`, or another disk: it cannot be taken away and another put in its place. All answers were drawn then."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    before = here.stat().st_ino
    export.write(Path("."), {"judge.html": "page"})
    assert Export.read(here).id == export.id and here.stat().st_ino == before
    assert sorted(path.name for path in here.iterdir()) == ["judge.html", "key.json", "pairs.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_an_export_that_cannot_be_written_leaves_an_empty_folder_empty(export: Export, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        export.write(tmp_path, {"no/folder": "page"})
    assert list(tmp_path.iterdir()) == []


def test_half_surrogate_pairs_in_prompts_and_reasons_end_nothing(export: Export, tmp_path: Path) -> None:
    """JSON can escape them; tokenizers and UTF-8 take none."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a \\ud83d b"}\n{"prompt": "\\ud83d\\ude00"}\n')
    assert prompts_in(tmp_path / "p.jsonl") == ["a \ufffd b", "\U0001f600"]
    pair = next(iter(export.pairs))
    rows = [{"pair": pair, "annotator": "Ann", "choice": "a", "reason": "odd \ud83d"}, {"pair": "\ud83d"}]
    (tmp_path / "j.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome(export, Judgements.read([tmp_path / "j.jsonl"], export)).write(tmp_path / "judged")
    said = json.loads((tmp_path / "judged" / "judgements.jsonl").read_text(encoding="utf8"))
    assert said["reason"] == "odd \ufffd"
