"""Templates of T0 and FLAN: a data set's fields become prompts and answers, in one of several phrasings."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from pydantic import ValidationError

from corpus.config import InstructionsConfig
from corpus.documents.quarantine import Rejected
from corpus.instructions import file_pairs, instructions
from corpus.readers.config import FileInstructions
from corpus.recognition.first_records import first_record_problems

WORDS = {0: "yes", 1: "perhaps", 2: "no"}
ENTAILS = [
    {"prompt": "{premise} Does it follow that {hypothesis}?", "answer": "{label}", "choices": {"label": WORDS}},
    {
        "prompt": "Premise: {premise}\nHypothesis: {hypothesis}\n{options}",
        "answer": "It is {label}.",
        "choices": {"label": {"0": "true", "1": "open", "2": "false"}},
    },
]
PHRASED = {
    "yes": "It rains {n}. Does it follow that {{streets}} are wet?",
    "It is true.": "Premise: It rains {n}.\nHypothesis: {{streets}} are wet\n- true\n- open\n- false",
}


def _rows(count):
    return [
        {
            "premise": f"It rains {n}.",
            "hypothesis": "{streets} are wet",
            "label": 0,
            "instruction": "No.",
            "output": "x",
        }
        for n in range(count)
    ]


def _read(record, write, templates, **keys):
    source = FileInstructions(paths=[write("rows.jsonl", json.dumps(record) + "\n")], templates=templates, **keys)
    (found,) = file_pairs(source, source.places(), "instructions.read.0")
    return found


def test_each_record_gets_one_of_the_phrasings_whatever_stands_before_it(build, write, lines_of):
    """The draw follows from the record and the seed; braces within the data are text."""

    def drawn(rows, seed):
        path = write("nli.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        read = [{"kind": "files", "paths": [path], "templates": ENTAILS, "template_seed": seed, "verify": "exact"}]
        out = build(instructions, InstructionsConfig(read=read, heldout_share=0.2, max_quarantine_share=0))
        return {row["prompt"]: row for side in ("train", "heldout") for row in lines_of(out / f"{side}.jsonl")}

    rows = _rows(60)
    found = drawn(rows, 17)
    answers = Counter(row["response"] for row in found.values())
    assert answers.keys() == PHRASED.keys() and min(answers.values()) > 15 and answers.total() == 60
    possible = {text.format(n=n): answer for answer, text in PHRASED.items() for n in range(60)}
    assert all(possible[prompt] == row["response"] and row["verify"] == "exact" for prompt, row in found.items())
    assert drawn(rows[:30:-1] + rows[:31], 17) == found
    assert drawn(rows, 18).keys() != found.keys()


def test_a_record_lies_on_one_side_of_the_split_in_whichever_phrasing(write):
    groups = {_read(_rows(1)[0], write, ENTAILS, template_seed=seed).group for seed in range(8)}
    prompts = {_read(_rows(1)[0], write, ENTAILS, template_seed=seed).fields["prompt"] for seed in range(8)}
    assert len(groups) == 1 and len(prompts) == 2


def test_answers_may_be_texts_of_the_record_by_its_label(write):
    """As in arc_easy and piqa: a list of choices, of which some records have more, and the number of the right one."""
    template = {
        "prompt": "{query}\n{options}",
        "answer": "{gold}",
        "choices": {"gold": {n: f"{{choices.{n}}}" for n in range(4)}},
    }
    record = {"query": "Why?", "choices": ["{a}", "b", "c"], "gold": 1}
    assert dict(_read(record, write, [template]).fields) == {"prompt": "Why?\n- {a}\n- b\n- c", "response": "b"}
    beyond = _read(record | {"gold": 3}, write, [template])
    assert isinstance(beyond, Rejected) and "no field choices.3" in beyond.reason
    plain = {"prompt": "{query}\n{choices} {at.most}", "answer": "{right}"}
    record |= {"right": True, "at": {"most": 2.5}}
    assert dict(_read(record, write, [plain]).fields) == {"prompt": "Why?\n{a}\nb\nc 2.5", "response": "true"}


def test_a_label_without_words_and_an_empty_field_are_put_aside(build, write):
    rows = [*_rows(30), {**_rows(1)[0], "label": -1}, {**_rows(1)[0], "hypothesis": None}]
    path = write("nli.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    read = [{"kind": "files", "paths": [path], "templates": ENTAILS}]
    out = build(instructions, InstructionsConfig(read=read, heldout_share=0.2, max_quarantine_share=0.1))
    reasons = [json.loads(line)["reason"] for line in (out / "aux" / "quarantine.jsonl").read_text().splitlines()]
    assert reasons == [
        "choices.label has no words for '-1', only for 0, 1, 2",
        "the field hypothesis is not a text or number, or is empty",
    ]


@pytest.mark.parametrize("answers", [[""], ["  ", "\n"], []])
def test_a_list_of_empty_texts_is_an_empty_field(answers, write):
    aside = _read({"q": "Who?", "answers": answers}, write, [{"prompt": "{q}", "answer": "{answers}"}])
    assert isinstance(aside, Rejected) and aside.reason == "the field answers is not a text or number, or is empty"


def test_a_field_that_the_records_do_not_have_is_told_before_a_run(write):
    templates = [ENTAILS[0], {**ENTAILS[1], "prompt": "{premise} {hypotesis}"}]
    path = write("nli.jsonl", json.dumps(_rows(1)[0]) + "\n")
    config = InstructionsConfig(read=[{"kind": "files", "paths": [path], "templates": templates}])
    (problem,) = first_record_problems(config)
    assert (problem.code, problem.path) == ("wrong_field", f"{path}:1")
    fields = "hypothesis, instruction, label, output, premise"
    assert problem.message == f"expected the field hypotesis; the fields are: {fields}"
    assert problem.fix == "name hypothesis in instructions.read.0.templates.1.prompt"


@pytest.mark.parametrize(
    ("template", "more", "said"),
    [
        ({"prompt": "Why?", "answer": "{a}"}, {}, "at least one field in braces"),
        ({"prompt": "{q", "answer": "{a}"}, {}, "expected fields in braces, and"),
        ({"prompt": "{}", "answer": "{a}"}, {}, "only the name of a field in braces"),
        ({"prompt": "{q:>3}", "answer": "{a}"}, {}, "only the name of a field in braces"),
        ({"prompt": "{q}", "answer": "{a}", "choices": {"b": {0: "x"}}}, {}, "expected {b} in prompt or answer"),
        ({"prompt": "{q}", "answer": "{a}", "choices": {"a": {0: False}}}, {}, "words in quotes, found false"),
        ({"prompt": "{options} {b}", "answer": "{a}", "choices": {"b": {0: "x"}}}, {}, "one field of choices in the"),
        (
            {"prompt": "{q}", "answer": "{a}"},
            {"prompt_field": "q"},
            "prompt_field: expected none together with templates",
        ),
        (None, {"template_seed": 3}, "template_seed: expected templates as well"),
    ],
)
def test_a_template_that_cannot_be_filled_is_an_error_of_the_config(template, more, said):
    with pytest.raises(ValidationError) as caught:
        FileInstructions(paths=["x.jsonl"], templates=[template] if template else [], **more)
    assert said in str(caught.value)
