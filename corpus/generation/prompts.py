"""Prompts that ask a model about a document: the messages of the built-in tasks and of templates.

A change of a built-in text is a change of what the stages compute: raise their versions in tasks/stages.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter

from corpus.documents.parts import Document
from corpus.generation.config import Backtranslation, GenerationConfig, Questions, Rephrase, Template, Translate
from corpus.readers.formats.plain import cut
from corpus.readers.record import MISSING, Unreadable, pick
from infra.io.json import parse_json

Task = Rephrase | Translate | Questions | Backtranslation | Template

_STYLES = {
    "plain": "in very simple words and short sentences that a small child understands",
    "encyclopedia": "in clear, neutral prose of high quality, as in an encyclopedia",
    "textbook": "as a passage of a textbook that defines its terms and explains step by step",
    "dialogue": "as a dialogue in which a learner asks and a teacher answers",
}
_REPHRASE = (
    "Rewrite the following text {style}. Keep every fact, name and number; add none. Answer in the language of the "
    "text, with the rewritten text alone.\n\n{text}"
)
_TRANSLATE = (
    "Translate the following text into {language}. Keep names, numbers, code and formulas as they are. Answer with the "
    "translation alone.\n\n{text}"
)
_QUESTIONS = (
    "Write {count} questions that the following text answers, each with its answer, in the language of the text. A "
    "question must be understood without the text; an answer says no more than the text does. Write each as two "
    "lines:\nQuestion: …\nAnswer: …\n\nText:\n\n{text}"
)
_PASSAGE_QUESTIONS = (
    "Write {count} questions about the following text that can be answered from it, each with its answer, in the "
    "language of the text. Write each as two lines:\nQuestion: …\nAnswer: …\n\nText:\n\n{text}"
)
_BACKTRANSLATION = (
    "The following text is a response. Write the instruction or question of a user to which it is the best response, "
    "in the language of the text. Answer with the instruction alone.\n\n{text}"
)
_SENTENCE_END = re.compile(r"[.!?。！？](?:[\"')\]]*\s+|(?<=[。！？]))")


@dataclass(frozen=True)
class EndpointPrompt:
    """The messages of a task. name: `rephrase/textbook`, `translate/de`, `template/NAME`. text: with {text} and the
    like where a document's fields go. system: "" for none."""

    name: str
    text: str
    system: str
    language: str | None

    @property
    def digest(self) -> str:
        """The first 8 hex digits of the SHA-256 of both texts."""
        return hashlib.sha256(f"{self.system}\0{self.text}".encode()).hexdigest()[:8]

    def messages(self, document: Document, piece: str) -> list[dict[str, str]]:
        """Raise Unreadable for a document without a field that the prompt names."""
        message = {"role": "user", "content": filled(self.text, document, piece)}
        return [{"role": "system", "content": self.system}, message] if self.system else [message]


def prompt_of(config: GenerationConfig, task: Task) -> EndpointPrompt:
    name, text, language = _text_of(task)
    return EndpointPrompt(name, text, config.system, language)


def _text_of(task: Task) -> tuple[str, str, str | None]:
    if isinstance(task, Rephrase):
        return f"rephrase/{task.style}", _REPHRASE.replace("{style}", _STYLES[task.style]), None
    if isinstance(task, Translate):
        from babel import Locale

        spelled = Locale("en").languages[task.language]
        return f"translate/{task.language}", _TRANSLATE.replace("{language}", spelled), task.language
    if isinstance(task, Questions):
        text = _PASSAGE_QUESTIONS if task.passage else _QUESTIONS
        return "questions", text.replace("{count}", str(task.count)), None
    if isinstance(task, Backtranslation):
        return "backtranslation", _BACKTRANSLATION, None
    return f"template/{task.name}", task.prompt, task.language


def filled(template: str, document: Document, piece: str) -> str:
    """A template with a document's fields, whose own braces mean nothing. Raises Unreadable for one that is missing."""
    return "".join(
        literal + (_value(field, document, piece) if field is not None else "")
        for literal, field, _, _ in Formatter().parse(template)
    )


def _value(field: str, document: Document, piece: str) -> str:
    if not field.startswith("metadata."):
        return {"text": piece, "source": document.source, "language": document.language}[field]
    value = pick(metadata_of(document), field.removeprefix("metadata."))
    if value is MISSING or value is None:
        raise Unreadable(f"no {field}")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def metadata_of(document: Document) -> dict[str, object]:
    """The metadata of a document; empty where they are no JSON object."""
    try:
        metadata = parse_json(document.metadata) if document.metadata else {}
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def pieces_of(text: str, characters: int | None) -> Iterator[str]:
    """The pieces of a text that each get a request: cut at the first blank line after `characters`, and where twice as
    many come without one at a sentence end, a space or anywhere."""
    if characters is None or len(text) <= characters:
        yield text
        return
    for _, piece in cut(io.StringIO(text), characters):
        left = str(piece)
        while len(left) > 2 * characters:
            end = _cut_before(left, characters)
            yield left[:end].rstrip()
            left = left[end:].lstrip()
        if left:
            yield left


def _cut_before(text: str, characters: int) -> int:
    """Return the last sentence end in the second half of the first `characters`, else the last space there, else all of
    them."""
    begin = characters // 2
    ends = [match.end() for match in _SENTENCE_END.finditer(text, begin, characters)]
    space = text.rfind(" ", begin, characters)
    return ends[-1] if ends else space if space > 0 else characters
