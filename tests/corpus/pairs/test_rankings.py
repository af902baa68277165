"""Rankings become all their pairs, ties and margins with them, and judgements of several people one pair."""

from __future__ import annotations

import json

import pytest

from corpus.config import PreferencesConfig
from corpus.documents.quarantine import Rejected
from corpus.preferences import file_pairs, preferences
from corpus.readers.config import FilePreferences
from infra.errors import StageError

ORDER = [("A", "B"), ("A", "C"), ("B", "C")]


def _built(records, build, write, lines_of, **keys):
    path = write("ranked.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    source = {"kind": "files", "paths": [str(path)], **keys}
    out = build(preferences, PreferencesConfig(read=[source], heldout_share=0.5, max_quarantine_share=0.5))
    return [*lines_of(out / "train.jsonl"), *lines_of(out / "heldout.jsonl")], out


def _asked(prompt, lines):
    return [line for line in lines if line["prompt"] == prompt]


def _order(lines):
    return [(line["chosen"], line["rejected"]) for line in lines]


FORMS = {
    "as they lie": {"prompt": "0", "answers": ["A", "B", "C"]},
    "ranks beside": {"prompt": "0", "answers": ["C", "A", "B"], "ranks": [3, 1, 2]},
    "scores": {"prompt": "0", "completions": ["C", "B", "A"], "scores": [1, 4, 9.5]},
    "nectar": {
        "prompt": "0",
        "answers": [{"answer": "B", "rank": 2.0}, {"answer": "A", "rank": 1.0}, {"answer": "C", "rank": 7.0}],
    },
    "ultrafeedback": {
        "instruction": "0",
        "completions": [{"response": t, "overall_score": s} for t, s in (("C", 2), ("A", 8), ("B", 7.5))],
    },
    "turns": {"messages": [{"role": "user", "content": "0"}], "responses": ["A", "B", "C"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_ranking_is_read_as_all_its_pairs_side_by_side_whatever_its_form(form, build, write, lines_of):
    others = [{"prompt": str(number), "answers": ["yes", "no"]} for number in range(1, 12)]
    lines, _ = _built([*others[:6], FORMS[form], *others[6:]], build, write, lines_of)
    found = _asked("0", lines)
    assert _order(found) == ORDER
    assert len({line["ranking"] for line in found}) == 1 and all("votes" not in line for line in found)
    margins = {"scores": [5.5, 8.5, 3.0], "ultrafeedback": [0.5, 6.0, 5.5]}.get(form, [None] * 3)
    assert [line.get("margin") for line in found] == margins
    places = [number for number, line in enumerate(lines) if line["prompt"] == "0"]
    assert places == [*range(places[0], places[0] + 3)]
    assert "ranking" not in _asked("1", lines)[0], "two answers are a plain pair"


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1" + 400 * "0"])
@pytest.mark.parametrize(
    "record",
    [
        '{"prompt": "p", "answers": ["a", "b"], "scores": [%s, 1]}',
        '{"prompt": "p", "chosen": "a", "rejected": "b", "margin": %s}',
        '{"prompt": "p", "chosen": "a", "rejected": "b", "votes": [%s, 1]}',
    ],
)
def test_numbers_that_no_float_holds_are_no_scores_margins_or_votes(record, number, write):
    """They would stand in the loss of a reward model."""
    path = str(write("a.jsonl", record % number + "\n"))
    source = FilePreferences(paths=[path], votes_field="votes", margin_field="margin")
    (aside,) = file_pairs(source, source.places(), "preferences.read.0")
    assert isinstance(aside, Rejected) and aside.reason.startswith("expected ")


def test_a_ranking_without_a_prompt_is_put_aside_or_where_the_first_has_none_refused(build, write, lines_of):
    ranked = [{"prompt": str(number), "answers": ["yes", "no"]} for number in range(12)]
    lines, out = _built([*ranked, {"answers": ["yes", "no"]}], build, write, lines_of)
    assert len(lines) == 12
    assert [row["reason"] for row in lines_of(out / "aux" / "quarantine.jsonl")] == ["no field instruction"]
    with pytest.raises(StageError, match="expected the field instruction; the fields are: answers"):
        _built([{"answers": ["yes", "no"]}, *ranked], build, write, lines_of)


def test_equal_ranks_are_ties_and_what_is_no_ranking_is_put_aside(build, write, lines_of):
    records = [
        {"prompt": "0", "answers": ["A", "B", "C"], "ranks": [1, 2, 2]},
        {"prompt": "a", "answers": ["A", "A "]},
        {"prompt": "b", "answers": ["A", " "]},
        {"prompt": "c", "answers": ["A", "B"], "ranks": [1]},
        {"prompt": "d", "answers": [{"text": "A", "score": 1}, {"text": "B"}]},
        {"prompt": "e", "answers": [{"from": "human", "value": "A"}, "B"]},
        *({"prompt": str(number), "answers": ["yes", "no"]} for number in range(1, 9)),
    ]
    lines, out = _built(records, build, write, lines_of)
    assert [line.get("votes") for line in _asked("0", lines)] == [None, None, [0.5, 0.5]]
    reasons = [line["reason"] for line in lines_of(out / "aux" / "quarantine.jsonl")]
    for said, reason in zip(
        ("same answer twice", "is empty", "as many ranks", "a rank or a score of every", "one answer of the assistant"),
        reasons,
        strict=True,
    ):
        assert said in reason


def test_judgements_of_several_people_become_one_pair_with_its_votes(build, write, lines_of, tmp_path):
    def said(who, chosen, rejected, prompt="0"):
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "who": who}

    records = [
        said("ann", "A", "B"),
        said("bob", "B", "A"),
        said("eve", "A", "B"),
        said("ann", "A", "B"),
        {"prompt": "0", "chosen": "A", "rejected": "B"},
        *(said("ann", "yes", "no", str(number)) for number in range(1, 9)),
        said("bob", "no", "yes", "1"),
    ]
    lines, out = _built(records, build, write, lines_of, annotator_field="who")
    (judged,) = _asked("0", lines)
    assert (judged["chosen"], judged["votes"]) == ("A", [2.0, 1.0])
    assert _asked("1", lines)[0]["votes"] == [1.0, 1.0] and len(lines) == 9
    reasons = [line["reason"] for line in lines_of(out / "aux" / "quarantine.jsonl")]
    assert sorted(reasons) == ["a second judgement of a pair by ann", "no annotator: there is no who"]


def test_who_finds_two_answers_on_a_par_has_half_a_vote_for_either(write):
    ranks = {"ann": [1, 1, 2], "bob": [2, 1, 3], "eve": [2, 2, 1]}
    rows = [{"prompt": "0", "answers": ["A", "B", "C"], "ranks": some, "who": who} for who, some in ranks.items()]
    path = write("judged.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    source = FilePreferences(paths=[path], annotator_field="who")
    pairs = file_pairs(source, source.places(), "preferences.read.0")
    found = {(pair.fields["chosen"], pair.fields["rejected"]): pair.votes for pair in pairs}
    assert found == {("B", "A"): (2.0, 1.0), ("A", "C"): (2.0, 1.0), ("B", "C"): (2.0, 1.0)}


def test_votes_and_margins_are_read_where_their_fields_are_named(build, write, lines_of):
    good = {"chosen": "yes", "rejected": "no", "votes": [3, 1], "by": {"how": 0.5}}
    records = [
        *({"prompt": str(number), **good} for number in range(8)),
        {"prompt": "8", **good, "votes": [1, 2]},
        {"prompt": "9", **good, "by": {"how": -1}},
    ]
    plain, _ = _built(records, build, write, lines_of)
    assert all(line.keys() == {"id", "prompt", "chosen", "rejected", "source"} for line in plain)
    lines, out = _built(records, build, write, lines_of, votes_field="votes", margin_field="by.how")
    assert len(lines) == 8 and {(*line["votes"], line["margin"]) for line in lines} == {(3.0, 1.0, 0.5)}
    assert len(lines_of(out / "aux" / "quarantine.jsonl")) == 2
