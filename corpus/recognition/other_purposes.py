"""Records that are not for pretraining although they hold prose: items of benchmarks, judged answers, questions or
answers of pairs in a form that no reader takes, and whole tables in one object."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from corpus.pairs.dialogues import CALLS, RESULTS, ROLES
from corpus.readers.record import Record, field_names, is_given, pick
from infra.errors import Problem

MOST = 0.5
"""The share of the sampled records that must have a form."""
_CHOICES = ("choices", "options", "endings")
_CHOICE_STEMS = {"choice", "option", "opt", "sol", "ending"}
_RIGHT = ("gold", "answer", "label", "answerKey", "answer_idx", "correct", "target", "ground_truth")
_SIDES_OF_PAIRS = {
    "instruction", "prompt", "question", "query", "input", "inputs", "user_message",
    "output", "response", "answer", "answers", "completion", "completions", "reply", "target", "targets", "solution",
    "assistant_message", "conversation", "conversations", "messages", "chosen", "rejected", "human_ref",
}  # fmt: skip
"""Names of fields that hold questions, answers or dialogues, in lower case and without what numbers them."""


def has_field(sample: Sequence[Record], name: str) -> bool:
    """Return True if most records have a field that is not null."""
    return sum(is_given(record.value, name) for record in sample) >= MOST * len(sample)


def benchmark_items(sample: Sequence[Record]) -> Problem | None:
    """The problem of records that are items of a benchmark: choices, and which of them is right; or code to write with
    its tests."""
    fields = _choice_fields(sample)
    if not fields and all(has_field(sample, name) for name in ("canonical_solution", "test")):  # HumanEval
        fields = ["canonical_solution", "test"]
    if not fields:
        return None
    message = f"expected data to train on, found items of a benchmark: {', '.join(fields)}"
    fix = "put the file under benchmarks.tasks, or choose an interpretation with --as"
    return Problem("benchmark_items", sample[0].place, message, fix)


def _choice_fields(sample: Sequence[Record]) -> list[str]:
    choices = [name for name in _CHOICES if has_field(sample, name)][:1] or _numbered_choices(sample)
    right = next((name for name in _RIGHT if has_field(sample, name)), "")
    values = [pick(record.value, right) for record in sample if is_given(record.value, right)] if right else []
    # A word of prose is an answer to learn; a number or letter only points to the right choice.
    is_pointer = all(not isinstance(value, str) or len(value.strip()) <= 2 for value in values)
    return [*choices, right] if choices and right and is_pointer else []


def _numbered_choices(sample: Sequence[Record]) -> list[str]:
    """Choices in a field each: option1 and option2, or A, B and C."""
    names = [name for name in sample[0].value if has_field(sample, name)]
    by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        by_stem[_stem(name)].append(name)
    numbered = next((group for stem, group in by_stem.items() if stem in _CHOICE_STEMS and len(group) > 1), [])
    letters: list[str] = [name for name in ("A", "B", "C", "D", "E") if name in names]
    return numbered or (letters if len(letters) > 2 else [])


def _stem(name: str) -> str:
    """A field's name in lower case, without a number or letter behind it: response_1, answer_b, full_text."""
    return re.sub(r"(?:[_ -]?[0-9]+|[_ -][a-z])$", "", name.lower())


def judged_answers(sample: Sequence[Record]) -> Problem | None:
    """The problem of single answers that people called good or bad, as trl's unpaired preferences are: as instructions
    the bad ones would be learnt too."""
    labels = [pick(record.value, "label") for record in sample]
    if not all(isinstance(label, bool) for label in labels) or all(labels):
        return None
    bad = labels.count(False)
    message = f"expected answers to learn, found {bad} of {len(labels)} that are judged bad: label is false"
    fix = "keep the records whose label is true; --as PATH=instructions then reads them"
    return Problem("judged_answers", sample[0].place, message, fix.replace("PATH", str(sample[0].file)))


_ROLE_FIELDS = ("role", "from", "author_role", "speaker_role")
_CHAT_MARKS = re.compile(
    r"<\|im_start\|>|\[/?INST\]|<\|start_header_id\|>|<start_of_turn>|<\|(?:user|assistant)\|>|<\|turn>"
    r"|<[|｜](?:User|Assistant)[|｜]>|^###? ?(?:Human|Instruction|Assistant|Response|User):"
    r"|^(?:Human|USER|User|ASSISTANT|Assistant|GPT): ",
    re.MULTILINE,
)
"""Marks of turns in the chat templates of ChatML, Llama 2 and 3, Gemma, Zephyr, DeepSeek, Alpaca and Vicuna."""


def separate_messages(sample: Sequence[Record], text_field: str) -> Problem | None:
    """The problem of records that are a message each, as OpenAssistant has them: as documents they lose who speaks, and
    what an answer is to."""
    field = next((name for name in _ROLE_FIELDS if has_field(sample, name)), "")
    given = [pick(record.value, field) for record in sample if field and is_given(record.value, field)]
    if not given or not {str(role).lower() for role in given} <= {*ROLES, *CALLS, *RESULTS}:
        return None
    path = sample[0].file
    message = f"expected documents or whole conversations, found one message in each record: {field} names the speaker"
    fix = (
        "join the messages of a conversation into a list under `messages`; or read each as a document by --text-field "
        f"{path}={text_field}"
    )
    return Problem("separate_messages", sample[0].place, message, fix)


def rendered_chat(sample: Sequence[Record], text_field: str) -> Problem | None:
    """The problem of conversations that a chat template has made texts of: as documents, the answers are not learnt as
    such, and its marks become words."""
    texts = [text for record in sample if isinstance(text := pick(record.value, text_field), str)]
    marks = [matches for text in texts if len(matches := _CHAT_MARKS.findall(text[:20_000])) > 1]
    if len(marks) <= MOST * len(sample):
        return None
    path = sample[0].file
    message = (
        f"expected documents, found conversations as a chat template writes them: {text_field} has "
        f"{marks[0][0].strip()} in {len(marks)} of {len(sample)} records"
    )
    fix = (
        "write the messages as a list under `messages`, or prompt and response as fields; or read the texts "
        f"unchanged by --text-field {path}={text_field}"
    )
    return Problem("rendered_chat", sample[0].place, message, fix)


def side_of_a_pair(sample: Sequence[Record], text_field: str) -> Problem | None:
    """The problem of a text that is by its name the question or answer of a pair, and no document."""
    if not any(_stem(part) in _SIDES_OF_PAIRS for part in text_field.split(".")):
        return None
    path = sample[0].file
    message = (
        f"expected pairs in a form that is read, or documents; {text_field} is by its name a question or an answer, "
        f"and no reader takes these fields as a pair: {field_names(sample[0].value)}"
    )
    fix = (
        "name the fields prompt and response, or prompt, chosen and rejected; "
        f"or read documents by --text-field {path}={text_field}"
    )
    return Problem("side_of_a_pair", sample[0].place, message, fix)


def table_in_an_object(record: Record) -> Problem | None:
    """The problem of a file's one object that is a whole table: a record under each key, or a column."""
    values = list(record.value.values())
    mappings = [value for value in values if isinstance(value, Mapping)]
    lists = [value for value in values if isinstance(value, list)]
    names = {tuple(sorted(value)) for value in mappings}
    lengths = {len(value) for value in lists}
    fix = 'write its rows as JSON Lines, in pandas by `to_json(orient="records", lines=True)`'
    if len(mappings) == len(values) > 1 and len(names) == 1:
        is_numbered = all(name.isdecimal() for name in next(iter(names)))
        if is_numbered or len(values) > 2:
            return _wrapped(record, "a column under each key" if is_numbered else "a record under each key", fix)
    if len(lists) == len(values) and len(lengths) == 1 and min(lengths) > 1 and _are_scalars(lists):
        return _wrapped(record, "a column under each key", fix)
    if isinstance(record.value.get("columns"), list) and isinstance(record.value.get("data"), list):
        return _wrapped(record, "the names of columns under `columns` and rows under `data`", fix)
    return None


def list_in_an_object(record: Record) -> Problem | None:
    """The problem of a file's one object that holds the records in a list."""
    for key, value in record.value.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            fix = f"write the list alone, e.g. by `jq -c '.[\"{key}\"][]' {record.file} > records.jsonl`"
            return _wrapped(record, f"a list of {len(value):,} under `{key}`", fix)
    return None


def _wrapped(record: Record, content: str, fix: str) -> Problem:
    message = f"expected a record on each line, or one list of them; found one object with {content}"
    return Problem("unreadable_source", record.place, message, fix)


def _are_scalars(columns: Sequence[Sequence[object]]) -> bool:
    return not any(isinstance(cell, list | Mapping) for column in columns for cell in column)
