"""Prompts with their responses, written by a language model with their responses from documents.

python -m corpus.generation.instructions --config instructions.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from corpus.documents.parts import Document
from corpus.generation.answers import Answer
from corpus.generation.asking import Asking
from corpus.generation.config import Backtranslation, GenerateInstructionsConfig, PairTemplate, Questions
from corpus.generation.pairs import pairs_in
from corpus.generation.prompts import filled, prompt_of
from corpus.pairs.files import Pair
from corpus.pairs.split import write_pairs
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
            asking.fault(asked_document, "unparsable", "no question with its answer")


def _exchanges(
    task: Questions | Backtranslation | PairTemplate, document: Document, piece: str, answer: Answer
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


if __name__ == "__main__":
    from infra.alone import main

    main(generate_instructions, GenerateInstructionsConfig)
