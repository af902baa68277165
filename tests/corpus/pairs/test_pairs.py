"""Instruction and preference pairs: the right texts, on the right side, none of them twice."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from corpus.cleaning.people.toxicity_scorers import ProfanityScorer
from corpus.config import InstructionsConfig, PreferencesConfig
from corpus.demo.comments import comment_documents
from corpus.demo.config import CommentDocuments
from corpus.demo.docstrings import Docstring
from corpus.demo.signatures import question_about, signature_of
from corpus.demo.summaries import shortened, summary_of
from corpus.demo.texts import both_moods
from corpus.documents.parts import is_heldout
from corpus.documents.quarantine import Rejected
from corpus.instructions import instructions
from corpus.pairs.dialogues import split_dialogues
from corpus.pairs.files import Pair
from corpus.preferences import file_pairs, preferences
from corpus.readers.config import FilePreferences
from infra.errors import StageError
from training.rl.verify import rules_of

DOCSTRINGS = {"kind": "docstrings", "packages": ["click", "jinja2", "networkx"]}


def function(text: str, signature: str = "pack.load(path)") -> Docstring:
    return Docstring("pack", "pack/io.py:load", "function", signature, text)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, lines_of):
    from infra.run import Run

    found = {}
    for name, stage, config in (
        ("instructions", instructions, InstructionsConfig(read=[DOCSTRINGS])),
        # Each answer serves twice, as the right one and as a wrong one, unless its pair is left out of the split.
        ("preferences", preferences, PreferencesConfig(read=[DOCSTRINGS], near_prompts=None)),
    ):
        out = tmp_path_factory.mktemp(name)
        stage(config, {}, out, Run(tmp_path_factory.mktemp("work")))
        found[name] = lines_of(out / "train.jsonl"), lines_of(out / "heldout.jsonl")
    return found


def test_docstring_instructions_ask_about_a_function_and_answer_with_its_summary(pairs):
    everything = [pair for side in pairs["instructions"] for pair in side]
    shortest_path = [pair for pair in everything if "`networkx.algorithms.dag.ancestors(" in pair["prompt"]]
    assert [pair["response"] for pair in shortest_path] == ["Returns all nodes having a path to `source` in `G`."]
    assert len({pair["prompt"].partition("`")[0] for pair in everything}) >= 8
    assert set(everything[0]) == {"id", "prompt", "response", "source"}


def test_no_answer_occurs_twice_or_on_both_sides(pairs):
    train, heldout = ([pair["response"] for pair in side] for side in pairs["instructions"])
    assert len(train) > 500 and len(heldout) > 20
    assert len(set(train + heldout)) == len(train + heldout)


def test_answers_are_single_sentences_of_sensible_length(pairs):
    answers = [pair["response"] for side in pairs["instructions"] for pair in side]
    assert all(20 <= len(answer) <= 160 and answer[-1] in ".!?" and "\n" not in answer for answer in answers)


def test_wrong_summaries_are_real_different_and_of_the_same_package_and_side(pairs):
    for side in pairs["preferences"]:
        package_of = {pair["chosen"]: pair["source"].split("/")[1] for pair in side}
        for pair in side:
            assert pair["chosen"] != pair["rejected"]
            assert package_of[pair["rejected"]] == pair["source"].split("/")[1]


def test_neither_a_text_by_itself_nor_its_length_tells_right_from_wrong(pairs):
    train, _ = pairs["preferences"]
    assert Counter(pair["chosen"] for pair in train) == Counter(pair["rejected"] for pair in train)
    assert all(0.5 < len(pair["chosen"]) / len(pair["rejected"]) < 2 for pair in train)


def test_a_preference_has_the_side_of_the_instruction_with_the_same_prompt(pairs):
    for side, other in ((0, 1), (1, 0)):
        preferred = {pair["prompt"] for pair in pairs["preferences"][side]}
        assert preferred and not preferred & {pair["prompt"] for pair in pairs["instructions"][other]}


def test_same_bytes_twice_and_another_seed_gives_other_pairs(build, payload):
    source = DOCSTRINGS | {"packages": ["networkx"], "limit": 200}
    one, again, other = (
        payload(build(preferences, PreferencesConfig(read=[source], seed=seed))) for seed in (17, 17, 18)
    )
    assert one == again != other


def test_limit_takes_so_many_pairs(build, lines_of):
    out = build(instructions, InstructionsConfig(read=[DOCSTRINGS | {"limit": 100}]))
    assert len(lines_of(out / "train.jsonl")) + len(lines_of(out / "heldout.jsonl")) == 100


@pytest.mark.parametrize(
    "text",
    [
        "Load it.",
        "Args: the path of the file that is loaded here.",
        "Return repr(self), the representation of it.",
        "See the documentation of the other function.",
        "Deprecated since the version before the last.",
        ">>> load of the file that has the name",
        "Load a file " + "with many words " * 20 + ".",
        "x = 3 * y + [1, 2, 3] / 4 - {5: 6}",
    ],
)
def test_summaries_that_say_nothing_are_not_taken(text):
    assert summary_of(function(text), 20, 160) is None


def test_private_functions_are_not_asked_about():
    text = "Load the table from a file on disk."
    assert summary_of(function(text), 20, 160) == text
    assert summary_of(function(text, "pack._load(path)"), 20, 160) is None


def test_long_signatures_are_shortened():
    assert shortened("pack.load(path, mode)") == "pack.load(path, mode)"
    short = shortened(f"pack.load({', '.join(f'parameter_{i}' for i in range(30))})")
    assert len(short) < 110 and short.endswith(", ...)")


def test_alpaca_files_join_instruction_and_input(build, write, lines_of):
    rows = [{"instruction": f"Add {i}.", "input": "1" if i % 2 else "", "output": str(i)} for i in range(100)]
    out = build(
        instructions, InstructionsConfig(read=[{"kind": "files", "paths": [write("a.json", json.dumps(rows))]}])
    )
    found = {
        pair["prompt"]: pair["response"] for side in ("train", "heldout") for pair in lines_of(out / f"{side}.jsonl")
    }
    assert found["Add 2."] == "2" and found["Add 3.\n\n1"] == "3" and len(found) == 100


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_half_characters_are_mended(name, build, write, lines_of):
    rows = [json.dumps({"instruction": f"Add {i}.", "output": f"{i} \ud83d"}) for i in range(100)]
    content = f"[{','.join(rows)}]" if name == "a.json" else "\n".join(rows)
    config = InstructionsConfig(read=[{"kind": "files", "paths": [write(name, content)]}])
    out = build(instructions, config)
    assert sorted(pair["response"] for side in ("train", "heldout") for pair in lines_of(out / f"{side}.jsonl")) == (
        sorted(f"{i} \ufffd" for i in range(100))
    )


@pytest.mark.parametrize(
    ("signature", "shown", "parameters"),
    [
        ("pack.io.load(path, mode)", "load(path, mode)", ["path", "mode"]),
        ("pack.Loader(*args, **kwargs)", "Loader(*args, **kwargs)", ["args", "kwargs"]),
        ("pack.now()", "now()", []),
        ("pack.Loader", "", []),
        ("pack._load(path)", "", []),
        ("pack.test_it(path)", "", []),
        ("pack.größe_der(x)", "", []),
        ("pack.many(a, b, c, d, e, f, g)", "", []),
    ],
)
def test_signatures_of_public_functions_are_asked_about(signature, shown, parameters):
    assert signature_of(function("", signature)) == (shown, parameters)


def test_questions_are_answered_by_the_signature_in_them():
    def asked(*questions):
        return dict(question_about(f"f{i}(path, mode)", ["path", "mode"], ["axis"], questions) for i in range(200))

    found = asked("count", "first", "has")
    assert set(found.values()) == {"2", "path", "Yes.", "No."}
    for prompt, response in found.items():
        if prompt.startswith("Does "):
            assert (prompt.split("`")[3] in ("path", "mode")) == (response == "Yes.")
    assert set(asked("count", "first").values()) == {"2", "path"}
    assert question_about("now()", [], ["axis"], ["first"])[1] == "0"


@pytest.mark.parametrize(
    ("sentence", "command", "description"),
    [
        ("Returns the path.", "Return the path.", "Returns the path."),
        ("Try it again.", "Try it again.", "Tries it again."),
        ("Matches a name.", "Match a name.", "Matches a name."),
        ("Display all of it.", "Display all of it.", "Displays all of it."),
    ],
)
def test_a_summary_is_told_as_a_command_and_as_a_description(sentence, command, description):
    assert both_moods(sentence) == (command, description)
    assert both_moods("The path.") is None


def test_style_pairs_differ_in_their_first_word_and_lie_on_the_side_of_their_docstring(build, lines_of):
    read = [DOCSTRINGS | {"limit": 400}, {"kind": "pep257", "packages": ["networkx"], "limit": 120}]
    out = build(preferences, PreferencesConfig(read=read, heldout_share=0.1))
    sides = [lines_of(out / f"{side}.jsonl") for side in ("train", "heldout")]
    style = [pair for side in sides for pair in side if pair["source"].startswith("pep257/")]
    assert len(style) == 120
    for pair in style:
        assert pair["chosen"].split()[1:] == pair["rejected"].split()[1:] and "class `" not in pair["prompt"]
        assert pair["rejected"].split()[0].startswith(pair["chosen"].split()[0][:-1])
    prompts = [{pair["prompt"] for pair in side} for side in sides]
    assert not prompts[0] & prompts[1]


def test_descriptions_are_asked_for_in_as_many_words_as_their_docstring_has(build, lines_of):
    lengths = {"kind": "lengths", "packages": ["networkx"], "limit": 200}
    out = build(instructions, InstructionsConfig(read=[lengths], heldout_share=0.1, near_prompts=None))
    pairs = [pair for side in ("train", "heldout") for pair in lines_of(out / f"{side}.jsonl")]
    assert len(pairs) == 200 and {pair["verify"] for pair in pairs} == {"words:4-6", "words:7-9", "words:10-14"}
    for pair, rule in zip(pairs, rules_of(pairs, "pairs"), strict=True):
        low, high = pair["verify"].removeprefix("words:").split("-")
        assert f" in {low} to {high} words." in pair["prompt"] and rule.allows(pair["response"])
        assert not rule.allows("Too few.") and not rule.allows("word " * 15)


def test_verifiable_pairs_say_so_and_lie_mixed_with_the_others_in_the_heldout_file(build, lines_of, write):
    exactly = {"heldout_share": 0.1, "near_prompts": None}
    alone = build(instructions, InstructionsConfig(read=[DOCSTRINGS | {"limit": 600}], **exactly))
    signatures = {"kind": "signatures", "packages": ["networkx"], "limit": 300}
    rows = "".join(json.dumps({"instruction": f"{i} + 1 =", "output": str(i + 1)}) + "\n" for i in range(300))
    sums = {"kind": "files", "paths": [write("sums.jsonl", rows)], "verify": "exact"}
    read = [DOCSTRINGS | {"limit": 600}, signatures, sums]
    out = build(instructions, InstructionsConfig(read=read, **exactly))
    train, heldout = (lines_of(out / f"{side}.jsonl") for side in ("train", "heldout"))
    assert [pair for pair in heldout if pair["source"].startswith("docstrings/")] == lines_of(alone / "heldout.jsonl")
    kinds = [pair["source"].split("/")[0] for pair in heldout]
    assert all(kinds[: len(kinds) // 3].count(kind) == pytest.approx(kinds.count(kind) / 3, abs=1) for kind in kinds)
    for pair in (*train, *heldout):
        assert pair.get("verify") == (None if pair["source"].startswith("docstrings/") else "exact")
    asked = [pair for pair in (*train, *heldout) if pair["source"].startswith("signatures/")]
    assert len(asked) == 300 and len({pair["prompt"].split("`")[1] for pair in asked}) == 300
    sides = [{pair["prompt"].split("`")[1] for pair in side if "sig" in pair["source"]} for side in (train, heldout)]
    assert not sides[0] & sides[1]


def test_made_up_comments_are_rude_in_their_share_and_replies_keep_the_peace(build, lines_of):
    comments = {"kind": "comments", "packages": ["networkx"], "rude_share": 0.5}
    scores = ProfanityScorer()
    documents = list(comment_documents(CommentDocuments(**comments, limit_mb=0.1), "comments"))
    assert sum(len(one.text.encode()) for one in documents) == pytest.approx(100_000, rel=0.02)
    lines = [line for one in documents for line in one.text.splitlines()[2:]]
    assert (scores(lines) > 0.5).mean() == pytest.approx(0.5, abs=0.1)
    friendly = comment_documents(CommentDocuments(**comments | {"rude_share": 0}, limit_mb=0.02), "comments")
    assert scores([one.text for one in friendly]).max() < 0.5

    read = [comments | {"limit": 300}]
    asked = build(instructions, InstructionsConfig(read=read, heldout_share=0.1))
    preferred = build(preferences, PreferencesConfig(read=read, heldout_share=0.1))
    pairs = [pair for side in ("train", "heldout") for pair in lines_of(preferred / f"{side}.jsonl")]
    assert len(pairs) > 250 and scores([pair["chosen"] for pair in pairs]).max() < 0.5
    assert (scores([pair["rejected"] for pair in pairs]) > 0.5).mean() > 0.9
    for side in ("train", "heldout"):
        answers = {pair["prompt"]: pair["response"] for pair in lines_of(asked / f"{side}.jsonl")}
        assert all(answers[pair["prompt"]] == pair["chosen"] for pair in lines_of(preferred / f"{side}.jsonl"))


def test_equal_prompts_stay_on_one_side_and_equal_pairs_are_counted(build, write, lines_of):
    rows = [{"instruction": f"Say {i % 50}.", "output": f"answer {i % 100}"} for i in range(200)]
    path = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    out = build(instructions, InstructionsConfig(read=[{"kind": "files", "paths": [path]}], heldout_share=0.2))
    train, heldout = ({pair["prompt"] for pair in lines_of(out / f"{side}.jsonl")} for side in ("train", "heldout"))
    assert not train & heldout and len(train | heldout) == 50
    assert all(is_heldout(prompt, 0.2) for prompt in heldout)
    assert json.loads((out / "aux" / "counts.json").read_text())["sources"][0]["duplicates"] == 100


@pytest.mark.parametrize(
    ("content", "keys", "code", "names"),
    [
        (b"[]", {}, "empty_source", ["pairs.json"]),
        (b'[{"q": "a", "a": "b"}]', {}, "wrong_field", ["pairs.json:1", "instruction", "a, q", "prompt_field"]),
        (b'[{"instruction": "a", "output": 3}]', {}, "too_much_quarantined", ["output is not a string"]),
        (b'[{"instruction": "a", "output": "b"}]', {}, "too_few_pairs", ["1 for training and 0 held out"]),
        (b'{"instruction": "a", "output"\n', {}, "too_much_quarantined", ["pairs.json:1", "not JSON"]),
        (b"\0\1\2", {}, "binary_source", ["pairs.json"]),
    ],
)
def test_bad_pair_files_are_named(build, write, content, keys, code, names):
    config = InstructionsConfig(read=[{"kind": "files", "paths": [write("pairs.json", content)], **keys}])
    with pytest.raises(StageError) as caught:
        build(instructions, config)
    assert caught.value.problems[0].code == code
    assert all(part in str(caught.value) for part in names), str(caught.value)


def test_dialogues_split_at_the_last_assistant_turn(build, write, lines_of):
    start = "\n\nHuman: Hello {}\n\nAssistant: Hi.\n\nHuman: Why?"
    rows = [
        {"chosen": f"{start.format(i)}\n\nAssistant: Because.", "rejected": f"{start.format(i)}\n\nAssistant: No {i}."}
        for i in range(100)
    ]
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    source = {"kind": "files", "paths": [write("hh.jsonl.gz", content)], "dialogue": True}
    out = build(preferences, PreferencesConfig(read=[source]))
    first = lines_of(out / "train.jsonl")[0]
    assert first["prompt"] == "Human: Hello 0\n\nAssistant: Hi.\n\nHuman: Why?"
    assert (first["chosen"], first["rejected"]) == ("Because.", "No 0.")


HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Yes."}
ASKED, SAID, OTHER = ({"role": role, "content": text} for role, text in
                      (("user", "Why?"), ("assistant", "Yes."), ("assistant", "No.")))  # fmt: skip
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"instruction": "Why?", "chosen": "Yes.", "rejected": "No."}, "Why?"),
        ({"instruction": "Why?", "input": "Say it.", "chosen": "Yes.", "rejected": "No."}, "Why?\n\nSay it."),
        ({"prompt": "Why?", "chosen": "Yes.", "rejected": "No."}, "Why?"),
        ({"question": "Why?", "chosen": SAID, "rejected": OTHER}, "Why?"),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}}, "Why?"),
        (
            {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
            "Human: Why?\n\nAssistant: Yes.\n\nHuman: Why?",
        ),
        ({"prompt": [SYSTEM, ASKED], "chosen": [SAID], "rejected": [OTHER]}, "Be short.\n\nWhy?"),
        ({"prompt": "Why?", "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, "Why?"),
        ({"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, "Why?"),
        ({"chosen": "\n\nHuman: Why?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."}, "Why?"),
    ],
    ids="alpaca input prompt message sharegpt turns system ultrafeedback lists dialogues".split(),  # noqa: SIM905
)
def test_the_form_of_preferences_is_seen_from_their_records(record, prompt, write):
    path = write("pairs.jsonl", json.dumps(record) + "\n")
    source = FilePreferences(paths=[path])
    (pair,) = file_pairs(source, source.places(), "preferences.read.0")
    assert dict(pair.fields) == {"prompt": prompt, "chosen": "Yes.", "rejected": "No."}
    assert pair.group == (prompt if "instruction" in record else "Why?")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "Why?", "chosen": "Yes.", "rejected": "Yes. "}, "equal answers: chosen and rejected are the same"),
        ({"prompt": "Why?", "chosen": "Yes.", "rejected": " "}, "no answer: rejected is empty"),
        ({"prompt": "Why?", "chosen": None, "rejected": "No."}, "no answer: there is no chosen"),
        ({"prompt": "Why?", "chosen": 3, "rejected": "No."}, "expected a list of messages"),
        ({"chosen": "Yes.", "rejected": "No."}, "no field instruction"),
        ({"conversations": [GPT], "chosen": GPT, "rejected": GPT}, "the conversation starts with the assistant"),
        ({"conversations": [HUMAN, GPT], "chosen": GPT, "rejected": GPT}, "does not end with the human"),
        ({"conversations": [], "chosen": GPT, "rejected": GPT}, "no prompt: the dialogue is empty"),
        ({"conversations": [{"from": "chorus", "value": "3"}], "chosen": GPT, "rejected": GPT}, "unknown role: chorus"),
        ({"conversations": [HUMAN], "chosen": HUMAN, "rejected": GPT}, "expected one answer of the assistant"),
        ({"chosen": [SAID, ASKED, SAID], "rejected": [SAID, ASKED, OTHER]}, "starts with the assistant"),
        ({"chosen": [ASKED, ASKED], "rejected": [ASKED, OTHER]}, "no answer: expected conversations that end"),
        ({"chosen": [ASKED, SAID], "rejected": [SYSTEM, OTHER]}, "not two answers to the same dialogue"),
        ({"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"}, "chosen is empty"),
        ({"chosen": "\n\nAssistant: a\n\nAssistant: b", "rejected": "\n\nAssistant: a"}, "starts with the assistant"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}, "the same dialogue"),
        ({"chosen": "\n\nAssistant: a", "rejected": "no turns"}, "Assistant"),
    ],
)
def test_what_is_no_pair_is_put_aside_with_the_reason(record, reason, write):
    """After a record that is one, so that the file's fields are known to be right."""
    good = {"instruction": "Why?", "chosen": "Yes.", "rejected": "No."}
    path = write("pairs.jsonl", "".join(json.dumps(one) + "\n" for one in (good, record)))
    source = FilePreferences(paths=[path])
    pair, aside = file_pairs(source, source.places(), "preferences.read.0")
    assert isinstance(pair, Pair) and isinstance(aside, Rejected)
    assert reason in aside.reason and aside.line == 2


def test_a_file_without_answers_is_refused_by_its_first_record(write):
    path = write("pairs.jsonl", json.dumps({"prompt": "Why?", "answer": "Yes.", "rejected": "No."}) + "\n")
    source = FilePreferences(paths=[path])
    with pytest.raises(StageError, match=r"expected the field chosen; the fields are: answer, prompt, rejected"):
        list(file_pairs(source, source.places(), "preferences.read.0"))


def test_a_single_turn_goes_without_its_mark():
    found = split_dialogues("\n\nHuman: Why?\n\nAssistant: Because.", "\n\nHuman: Why?\n\nAssistant:")
    assert found == ("Why?", "Because.", "", "Why?")


def test_real_preferences_are_read_without_being_told(shared_data, write):
    """rasbt's 1,100 pairs, of which 6 have equal answers, and 2,312 dialogues of HH-RLHF, 9 of which are no pairs."""
    for folder, ending, pairs, aside in (("rasbt_sft_dpo", "*preference.json", 1094, 6), ("hh_rlhf", "*.gz", 2303, 9)):
        source = FilePreferences(paths=[str(next((shared_data / folder).rglob(ending)))])
        found = list(file_pairs(source, source.places(), "preferences.read.0"))
        assert [sum(isinstance(one, kind) for one in found) for kind in (Pair, Rejected)] == [pairs, aside]
