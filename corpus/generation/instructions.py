"""Prompts with their responses, written by a language model with their responses from documents.

python -m corpus.generation.instructions --config instructions.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from corpus.documents.parts import Document
from corpus.generation.answers import EndpointAnswer
from corpus.generation.asking import Asking
from corpus.generation.config import Backtranslation, GenerateInstructionsConfig, PairTemplate, Questions
from corpus.generation.prompts import filled, prompt_of
from corpus.pairs.files import Pair
from corpus.pairs.split import write_pairs
from infra.io.json import BadJson, parse_json
from infra.run import Result, Run

SECTION = "generate_instructions"


def generate_instructions(
    config: GenerateInstructionsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run
) -> Result:
    """Write train.jsonl and heldout.jsonl as `corpus.instructions` does, and generation.json, aux/provenance.parquet
    and aux/unanswered.jsonl as `corpus.generation.stage` does.

    A pair is on the side of its document, so that no held-out answer is in the training text. One whose prompt has a
    near duplicate on the other side is left out.
    Raises StageError as `Asking.documents` and `corpus.pairs.split.write_pairs` do.
    """
    prompt = prompt_of(config, config.task)
    with Asking(config, prompt, SECTION, inputs["documents"], out_dir, run) as asking:
        figures, headline = write_pairs(
            config, SECTION, {SECTION: config}, lambda *_: _pairs(config, asking), inputs, out_dir, run
        )
        asking.write_facts()
    return Result({**figures, **asking.figures()}, f"{headline}, by {config.endpoint.model} ({prompt.name})")


def _pairs(config: GenerateInstructionsConfig, asking: Asking) -> Iterator[Pair]:
    for asked_document in asking.documents():
        made = 0
        for sample, answers in enumerate(asked_document.samples):
            for piece, answer in zip(asked_document.pieces, answers, strict=True):
                for prompt, response in _exchanges(config.task, asked_document.document, piece, answer):
                    source = f"{config.name}/{asked_document.document.source}"
                    fields = {"prompt": prompt, "response": response}
                    pair = Pair(fields, source, asked_document.document.group, compared=prompt)
                    asking.made(pair.id, asked_document, sample, answer)
                    made += 1
                    yield pair
        if asked_document.samples and not made and not asked_document.fault:
            asking.fault(asked_document, "unparsable", "no question with an answer")


def _exchanges(
    task: Questions | Backtranslation | PairTemplate, document: Document, piece: str, answer: EndpointAnswer
) -> list[tuple[str, str]]:
    """The prompts with their responses that an answer to a piece of a document gives."""
    text = answer.text.strip()
    if isinstance(task, Backtranslation) or (isinstance(task, PairTemplate) and task.answer == "instruction"):
        return [(text, piece.strip())]
    if isinstance(task, PairTemplate) and task.answer == "response":
        return [(filled(task.instruction, document, piece), text)]
    pairs = pairs_in(text)
    if answer.fault == "truncated":
        pairs = pairs[:-1]
    if isinstance(task, Questions) and task.passage:
        return [(f"{piece.strip()}\n\n{question}", response) for question, response in pairs]
    return pairs


_FENCED = re.compile(r"\A\s*```\w*\s*\n(.*?)\n\s*```\s*\Z", re.DOTALL)
_MARK = re.compile(
    r"\s*(?:[-*#>•]+\s+|\d+[.)]\s+)*(?:\*\*|__)?(question|answer|q|a)(?:\s*\d+)?(?:\*\*|__)?\s*[:：]\s*(?:\*\*|__)?\s*",
    re.IGNORECASE,
)
_ASKED = ("question", "instruction", "prompt", "q")
_SAID = ("answer", "response", "output", "a")


def pairs_in(text: str) -> list[tuple[str, str]]:
    """The questions and answers in a text: lines `Question: …` and `Answer: …`, also `Q:` and `A:`, numbered, as a list
    or in bold, each going on until the next mark; or a JSON list of {question, answer}. A question without an answer
    is left out."""
    if fenced := _FENCED.match(text):
        text = fenced[1]
    if text.lstrip()[:1] in ("[", "{"):
        # A text that begins like JSON and is not is read by its marks, as any other.
        with suppress(BadJson):
            return _of_json(parse_json(text))
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if mark := _MARK.match(line):
            found.append((mark[1][0].lower(), [line[mark.end() :]]))
        elif found:
            found[-1][1].append(line)
    parts = [(kind, "\n".join(lines).strip()) for kind, lines in found]
    return [
        (asked, said)
        for (first, asked), (second, said) in pairwise(parts)
        if (first, second) == ("q", "a") and asked and said
    ]


def _of_json(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):  # {"questions": […]}
        inner = [one for one in value.values() if isinstance(one, list)]
        value = inner[0] if len(inner) == 1 else [value]
    rows = [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
    found = [(_first(row, _ASKED), _first(row, _SAID)) for row in rows]
    return [(asked, said) for asked, said in found if asked and said]


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    texts = (row.get(name) for name in names)
    return next((text.strip() for text in texts if isinstance(text, str) and text.strip()), "")


if __name__ == "__main__":
    from infra.alone import main

    main(generate_instructions, GenerateInstructionsConfig)
