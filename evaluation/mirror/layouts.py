"""Third-party files of known benchmarks, converted row by row to the hub's dataset.

A benchmark's questions are published in several layouts: MosaicML's evaluation gauntlet has `query`, `choices` and
`gold` for all of them, authors publish TSV or raw text. lm-eval's tasks name the fields of the dataset on the hub, so a
row is converted back to those; a prompt made from it is then the one that the task makes from the hub's row.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
_GAUNTLET = frozenset({"query", "choices", "gold"})
_PRONOUNS = r"\b(he|she|they|him|her|them|his|hers|their|theirs)\b"


class DataLayout:
    """One layout of one dataset's files.

    name: its name where a mirror records the source of its rows. fields: fields of its rows. convert: returns a row in
    the form of the hub's dataset; raises ValueError for a row that cannot be converted.
    """

    def __init__(self, name: str, fields: Iterable[str], convert: Callable[[Row], dict[str, Any]]) -> None:
        self.name, self.fields, self.convert = name, frozenset(fields), convert

    def fits(self, row: Row) -> bool:
        return self.fields <= row.keys()


def _letters(choices: list[str]) -> list[str]:
    return list(string.ascii_uppercase[: len(choices)])


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text, re.DOTALL)
    if not match:
        raise ValueError(f"expected {pattern}, got {text[:60]!r}")
    return match


def _lettered(question: str) -> Callable[[Row], dict[str, Any]]:
    """Convert rows as in ARC and OpenBookQA: choices with letters, and the letter of the right one."""

    def convert(row: Row) -> dict[str, Any]:
        letters = _letters(row["choices"])
        question_text = row["query"].removeprefix("Question: ").rstrip("\n")
        return {
            question: question_text,
            "choices": {"text": list(row["choices"]), "label": letters},
            "answerKey": letters[row["gold"]],
        }

    return convert


def _commonsense_qa(row: Row) -> dict[str, Any]:
    match = _match(r"(?:Question: )?(.*?)\n(?:Choices:\n)?(A\. .*)\nAnswer:", row["query"])
    texts = [line.partition(". ")[2] for line in match[2].split("\n")]
    if len(texts) != 5:
        raise ValueError(f"CommonsenseQA has five choices per question, but this file has {len(texts)}")
    return {
        "question": match[1],
        "choices": {"text": texts, "label": _letters(texts)},
        "answerKey": "ABCDE"[row["gold"]],
    }


def _piqa(row: Row) -> dict[str, Any]:
    first, second = row["choices"]
    goal = row["query"].removeprefix("Question: ").rstrip("\n")
    return {"goal": goal, "sol1": first, "sol2": second, "label": row["gold"]}


def _boolq(row: Row) -> dict[str, Any]:
    if list(row["choices"]) != ["no", "yes"]:
        raise ValueError(f"expected the choices no and yes, got {row['choices']}")
    match = _match(r"Passage: (.*)\nQuestion: (.*?)\??", row["query"])
    return {"passage": match[1], "question": match[2], "label": row["gold"]}


def _copa(row: Row) -> dict[str, Any]:
    match = _match(r"(.*?),? (because|therefore)", row["query"])
    first, second = row["choices"]
    question = {"because": "cause", "therefore": "effect"}[match[2]]
    return {
        "premise": match[1] + ".",
        "choice1": first,
        "choice2": second,
        "question": question,
        "label": row["gold"],
    }


def _winograd(row: Row) -> dict[str, Any]:
    """Convert a row of a file without the pronoun. Any pronoun works: the task replaces it with the options."""
    contexts = [text.split(" ") for text in row["context_options"]]
    same = 0
    while all(len(words) > same + 1 for words in contexts) and len({words[same] for words in contexts}) == 1:
        same += 1
    template = " ".join(contexts[0][:same]) + " "
    options = [" ".join(words[same:]) for words in contexts]
    pronoun = "it"
    return {
        "text": f"{template}{pronoun} {row['continuation']}",
        "pronoun": pronoun,
        "pronoun_loc": len(template),
        "options": options,
        "label": row["gold"],
    }


def _trivia(row: Row) -> dict[str, Any]:
    match = _match(r"Question: (.*?)\??\nAnswer:", row["context"])
    return {"question": match[1], "answer": {"value": row["answer"], "aliases": list(row["aliases"])}}


def _winogender(row: Row) -> dict[str, Any]:
    occupation, participant, label, gender = row["sentid"].removesuffix(".txt").split(".")
    match = re.search(_PRONOUNS, row["sentence"], re.IGNORECASE)
    if not match:
        raise ValueError(f"no pronoun in {row['sentence']!r}")
    return {
        "sentid": row["sentid"],
        "sentence": row["sentence"],
        "pronoun": match[0],
        "occupation": occupation,
        "participant": participant,
        "gender": gender,
        "label": int(label),
    }


def _truthfulqa(row: Row) -> dict[str, Any]:
    """Convert a row of the authors' mc_task.json, with each answer and its label; lm-eval's mc1 scores the first
    as right."""
    if "choices" in row["mc1_targets"]:  # the hub's rows have fields of the same names
        return dict(row)
    targets = {}
    for name in ("mc1_targets", "mc2_targets"):
        ordered = sorted(row[name].items(), key=lambda item: -item[1])
        targets[name] = {"choices": [answer for answer, _ in ordered], "labels": [int(label) for _, label in ordered]}
        if not any(targets[name]["labels"]):
            raise ValueError(f"{name} has no right answer")
    return {"question": row["question"], **targets}


def _translation(first: str, second: str) -> DataLayout:
    """Return the layout with one sentence per language, in columns named after the languages, as from two files pasted
    side by side."""
    return DataLayout(
        f"columns {first} and {second}",
        {first, second},
        lambda row: {"translation": {language: row[language] for language in (first, second)}},
    )


_GAUNTLET_NAME = "MosaicML's evaluation gauntlet"
LAYOUTS: dict[tuple[str, str | None], DataLayout] = {
    ("allenai/ai2_arc", "ARC-Easy"): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _lettered("question")),
    ("allenai/ai2_arc", "ARC-Challenge"): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _lettered("question")),
    ("allenai/openbookqa", "main"): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _lettered("question_stem")),
    ("tau/commonsense_qa", None): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _commonsense_qa),
    ("baber/piqa", None): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _piqa),
    ("aps/super_glue", "boolq"): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _boolq),
    ("aps/super_glue", "copa"): DataLayout(_GAUNTLET_NAME, _GAUNTLET, _copa),
    ("lighteval/winograd_wsc", "wsc273"): DataLayout(
        _GAUNTLET_NAME, {"context_options", "continuation", "gold"}, _winograd
    ),
    ("mandarjoshi/trivia_qa", "rc.nocontext"): DataLayout(_GAUNTLET_NAME, {"context", "answer", "aliases"}, _trivia),
    ("truthfulqa/truthful_qa", "multiple_choice"): DataLayout(
        "the authors' mc_task.json", {"question", "mc1_targets", "mc2_targets"}, _truthfulqa
    ),
    ("oskarvanderwal/winogender", "all"): DataLayout("the authors' TSV", {"sentid", "sentence"}, _winogender),
    ("wmt/wmt14", "fr-en"): _translation("fr", "en"),
    ("wmt/wmt16", "de-en"): _translation("de", "en"),
    ("wmt/wmt16", "ro-en"): _translation("ro", "en"),
    ("IWSLT/iwslt2017", "iwslt2017-en-ar"): _translation("en", "ar"),
}
"""Layouts by the hub's name of the dataset and of its config."""

FILE_NAMES = {
    "openbookqa": ("openbook_qa",),
    "wsc273": ("winograd_wsc", "winograd"),
    "triviaqa": ("triviaqa_small", "triviaqa_sm", "triviaqa_sm_sub"),
    "lambada_openai": ("lambada_openai", "lambada"),
    "wikitext": ("wikitext2", "wikitext2_train_5k"),
    "crows_pairs_english": ("crows_pairs_anonymized", "crows_pairs"),
    "winogender_all": ("all_sentences",),
    "truthfulqa_mc1": ("mc_task",),
    "truthfulqa_mc2": ("mc_task",),
    "ifeval": ("input_data",),
}
"""File names of these tasks that differ from the task's name."""


_HEADING = r" ?= [^=].*[^=] = ?"


def wikitext_pages(text: str) -> Iterator[dict[str, Any]]:
    """Yield WikiText's raw text as articles, each with its heading, as in the hub's document-level dataset.

    Text that does not begin with a heading has none: its paragraphs are separated by empty lines.
    """
    lines = text.strip("\n").splitlines()
    with_headings = bool(lines) and re.fullmatch(_HEADING, lines[0]) is not None
    page: list[str] = []
    for line in [*lines, ""]:
        ends = re.fullmatch(_HEADING, line) if with_headings else not line.strip()
        if ends and page:
            yield {"page": "\n".join(page) + "\n"}
            page = []
        if with_headings or line.strip():
            page.append(line)
    if any(line.strip() for line in page):
        yield {"page": "\n".join(page) + "\n"}
