"""Config of where texts and pairs are read from, and how. Importing this module loads nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from corpus.readers.folders import FolderFiles, Splits, is_hidden, select
from infra.config import Config, Seed, outside_identity
from infra.io.s3 import SCHEME
from infra.io.sources import FOLLOW, Place, Source, SourceDataset, SourceLocation, expand, expand_objects, glob_root

T = TypeVar("T")


def _at_least_one(items: tuple[T, ...]) -> tuple[T, ...]:
    # A min_length on the field would say "0 items" of a list whose items failed, besides saying why they failed.
    if not items:
        raise ValueError("expected at least one item")
    return items


SomeOf = Annotated[tuple[T, ...], AfterValidator(_at_least_one)]


def _known_encoding(value: str) -> str:
    import codecs

    try:
        # Codecs such as hex and zlib turn bytes into bytes; those of host names know no invalid byte but raise.
        "a".encode(value).decode(value)
        is_known = codecs.lookup(value).name not in ("idna", "punycode")
    except (LookupError, UnicodeError):
        is_known = False
    if not is_known:
        raise ValueError(f"encoding: expected one of text that Python knows, e.g. utf-8 or latin-1, not {value}")
    return value


EncodingOrAuto = Annotated[str, AfterValidator(lambda value: value if value == "auto" else _known_encoding(value))]


Header = Literal["auto", "first_row", "none"]
"""Role of the first row of a CSV or TSV file."""


def _order(file: Place) -> tuple[bool, str]:
    return (not isinstance(file, Path), str(file))


class FileSelection(Config):
    """Files, folders and globs that are read from disk."""

    kind: Literal["files"] = "files"
    paths: SomeOf[SourceLocation] = outside_identity()
    """Files, folders (all files below) or globs, relative to the config file; or s3:// URLs of the same.
    Credentials, region and server of S3 come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …)."""
    follow_links: bool = outside_identity(False)
    """Follow links in these folders, or among the matches of a glob, that point elsewhere, e.g. to another disk. false:
    such a link stops the stage, since data from others may contain a link to a private file. A path that is itself a
    link is always followed."""
    splits: Splits = outside_identity("train")
    """Files that a folder or glob gives where some are named after a validation or test split: test.jsonl,
    data/validation-00000-of-00001.parquet, test/a.jsonl. train leaves these out, with a note, as long as others are
    left; all reads them too. A file that is named itself is always read, and hidden files and side files of other
    programs (_SUCCESS, .crc, .DS_Store, a.txt~) never are, unless they are named themselves."""

    def selection(self) -> FolderFiles[Place]:
        """The files and objects that there are now, and those that are left out. Raises StageError as
        `infra.io.sources.expand` and `expand_objects` do."""
        selections = [self.selected(path) for path in self.paths]
        read = dict.fromkeys(file for selection in selections for file in selection.read)
        side = dict.fromkeys(file for selection in selections for file in selection.side if file not in read)
        other_splits = dict.fromkeys(
            file for selection in selections for file in selection.other_splits if file not in read
        )
        return FolderFiles(tuple(sorted(read, key=_order)), tuple(side), tuple(other_splits))

    def selected(self, path: str) -> FolderFiles[Place]:
        """The same of one of the paths."""
        if path.startswith(SCHEME):
            objects = expand_objects([path])
            start = path.partition("*")[0].rstrip("/") if "*" in path else path.rstrip("/")
            names = [str(item).removeprefix(start).lstrip("/") or item.name for item in objects]
            return select(zip(objects, names, strict=True), self.splits)
        files = expand([path], self.follow_links, FOLLOW)
        local_path = Path(path)
        if local_path.is_dir():
            return select(((file, file.relative_to(local_path).as_posix()) for file in files), self.splits)
        if local_path.exists() or files == (local_path,):
            return FolderFiles(files)
        root = glob_root(local_path)
        # Of what a glob matches a folder is no file of records.
        named_files = [(file, file.relative_to(root).as_posix()) for file in files if not file.is_dir()]
        # Hidden files are matched only by a pattern that names them.
        visible = [(file, name) for file, name in named_files if not is_hidden(name)]
        chosen = select(visible, self.splits)
        hidden = tuple(file for file, name in named_files if is_hidden(name))
        return FolderFiles((*chosen.read, *hidden), chosen.side, chosen.other_splits)

    def places(self) -> tuple[Place, ...]:
        """The files and objects to read. Raises StageError as `selection` does."""
        return self.selection().read

    def source(self, key: str) -> Source:
        files = self.places()
        return Source(
            key,
            paths=tuple(file for file in files if isinstance(file, Path)),
            objects=tuple(file for file in files if not isinstance(file, Path)),
        )


class SourceDescription(Config):
    """Metadata that a corpus should have for each of its sources."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source in the mixture, the reports and the documents. Default: its kind, with a number from the
    second source of a kind on."""
    licence: str = ""
    """Its licence, e.g. CC-BY-SA-4.0; goes into the report and the model card."""
    weight: float = Field(1.0, ge=0)
    """Weight of the source's documents relative to the other sources; used by the stage `mix`."""
    language: str = Field("", pattern=r"^([a-z]{2})?$")
    """ISO 639-1 code of the source's language, e.g. en; "" if mixed or unknown."""


class TextOptions(SourceDescription):
    """Options for making documents from the records of files."""

    encoding: EncodingOrAuto = "auto"
    """Encoding of text and JSON files, e.g. latin-1; bytes that do not fit it are errors. auto takes the byte order
    mark, what a page declares, UTF-8, or what charset-normalizer finds, in this order."""
    format: Literal[
        "auto", "text", "jsonl", "parquet", "arrow", "csv", "html", "warc",
        "notebook", "epub", "docx", "pdf", "subtitles", "mhtml", "email", "tex", "markdown",
    ] = "auto"  # fmt: skip
    """auto goes by the suffix before .gz, .zst, .bz2 or .xz: .jsonl, .ndjson and .json, .parquet, .arrow and .feather,
    .csv and .tsv, .html and .htm, .warc and .wet, .ipynb, .epub, .docx, .pdf (with the extra of that name), .srt and
    .vtt, .mhtml, .eml, .tex, .md; all others are text, but for those that are refused by name, such as .rtf, .xml and
    archives. A .json file may hold one list. What separates and quotes the fields of a CSV or TSV file is seen from its
    first rows."""
    header: Header = "auto"
    """The first row of CSV and TSV files: first_row has the names of the columns, none is a record like the others, and
    the columns are column_1, column_2, …; auto is none where the first row looks like those below it and not like
    names."""
    text_field: str = "text"
    """JSON key or column that holds the text; dotted for one inside others, e.g. page.body."""
    metadata_fields: tuple[str, ...] = ()
    """JSON keys or columns to keep as metadata, dotted or not; of WARC records url, date and content_type."""
    content: Literal["plain", "html", "email"] = "plain"
    """Format of a record's text: plain text, a web page (its main text is extracted), or an e-mail with headers
    (subject and body are extracted)."""
    text_unit: Literal["file", "paragraph", "line"] = "file"
    """Unit of a text file that becomes a document: the file, a paragraph between blank lines, or a line."""
    cut_characters: int | None = Field(None, ge=100)
    """Cut longer texts at the first paragraph end after this many characters; by default a text stays whole."""
    max_document_mb: float = Field(20, gt=0)
    """Maximum size of a document (10^6 bytes); larger ones are quarantined: they are most likely many documents in one,
    and are held in memory several times."""
    error_pages: Literal["skip", "read"] = "skip"
    """Pages of WARC files whose HTTP status is not 2xx, such as 404 and redirects: skip counts them in aux/sources.json
    (`skipped_records`)."""
    broken_files: Literal["stop", "quarantine"] = "stop"
    """Action for a binary, truncated or damaged file: stop the run, or count it as one quarantined record and keep the
    part that could be read."""


class FileDocuments(TextOptions, FileSelection):
    """Documents in text, JSON Lines, Parquet, Arrow, HTML, WARC or WET files, compressed (gzip, zstd, bzip2, xz) or
    not."""


class DatasetSelection(Config):
    """A Hugging Face dataset: a folder made by `save_to_disk`, a folder of data files, or a name on the hub that lies
    in the local cache. Nothing is fetched during a run."""

    kind: Literal["huggingface"] = "huggingface"
    dataset: SourceDataset = outside_identity()
    """A folder, relative to the config file, or a name on the hub, e.g. wikimedia/wikipedia."""
    subset: str | None = None
    """The configuration of the dataset, e.g. 20231101.en."""
    split: str = "train"
    """The split to read."""
    revision: str | None = None
    """Branch, tag or commit on the hub; by default main as it was last fetched."""

    def places(self) -> tuple[Place, ...]:
        """The data files. Raises StageError as `corpus.readers.hub.dataset_files` does."""
        from corpus.readers.hub import dataset_files

        return dataset_files(self.dataset, self.subset, self.split, self.revision)

    def source(self, key: str) -> Source:
        from corpus.readers.hub import dataset_files

        return Source(key, paths=dataset_files(self.dataset, self.subset, self.split, self.revision))


class HuggingFaceDocuments(TextOptions, DatasetSelection):
    """Documents of a Hugging Face dataset: a folder made by `save_to_disk`, a folder of data files, or a name on the
    hub that is in the local cache. Nothing is downloaded during a run."""


RULE = r"exact|number|json|tests|words:\d+-\d+|format:[\s\S]+"


def _compiles(rule: str) -> str:
    if rule.startswith("format:"):
        try:
            re.compile(rule.removeprefix("format:"))
        except re.error as error:
            raise ValueError(f"expected a regular expression after format: ({error})") from error
    return rule


Verify = Annotated[str, Field(pattern=rf"^({RULE})$"), AfterValidator(_compiles)]
"""The rule by which an answer is known to be right, see `InstructionOptions.verify`."""


class PairOptions(Config):
    """Options for making pairs from the records of files."""

    encoding: EncodingOrAuto = "auto"
    """Encoding of JSON, CSV and TSV files, e.g. latin-1; auto as for documents. Records that cannot be decoded are
    quarantined."""
    format: Literal["auto", "jsonl", "parquet", "arrow", "csv"] = "auto"
    """auto goes by the suffix before .gz, .zst, .bz2 or .xz: .parquet, .arrow and .feather, .csv and .tsv; all others
    are JSON Lines, or JSON that holds one list of objects."""
    header: Header = "auto"
    """The first row of CSV and TSV files: names of the columns (first_row), or a record (none) of column_1, column_2,
    …; auto as for documents."""
    prompt_field: str = "instruction"
    """JSON key or column of the prompt."""
    input_field: str | None = "input"
    """JSON key of further input that is appended to the prompt if it is present and not empty; null for none."""
    limit: int | None = Field(None, ge=2)
    """Number of records to read from the start of these files, held-out ones included; null reads all."""
    trim_conversations: bool = False
    """Cuts leading assistant turns and trailing human turns off a conversation that begins with the assistant or, in
    instructions, does not end with an answer. false: such a conversation is quarantined."""


OPTIONS = "options"
"""Placeholder of a template for the words of all choices."""


def fields_of(template: str) -> list[str]:
    """Return the fields in braces in a text. Raises ValueError if braces contain anything else."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"expected fields in braces, and {{{{ or }}}} for a brace itself ({error})") from error
    if wrong := [piece for piece in pieces if piece[1] is not None and (not piece[1].strip() or piece[2] or piece[3])]:
        raise ValueError(f"expected only the name of a field in braces, found {{{wrong[0][1]}…}}")
    return [field for _, field, _, _ in pieces if field is not None]


def _has_field(template: str) -> str:
    if not fields_of(template):
        raise ValueError("expected at least one field in braces, e.g. {premise}")
    return template


def _labels_as_text(choices: Any) -> Any:
    """YAML and JSON have numbers and booleans as labels; a word that is one was not put in quotes."""
    if not isinstance(choices, Mapping):
        return choices
    if wrong := [word for word in choices.values() if not isinstance(word, str)]:
        raise ValueError(f"expected words in quotes, found {json.dumps(wrong[0])}: YAML takes yes and no for booleans")
    return {label if isinstance(label, str) else json.dumps(label): word for label, word in choices.items()}


Choices = Annotated[dict[str, str], BeforeValidator(_labels_as_text), Field(min_length=1)]


class InstructionTemplate(Config):
    """One phrasing of a task: converts the fields of a record into a prompt and its answer. Fields are in braces,
    nested ones with dots, {choices.0} for the first of a list; {{ and }} are literal braces."""

    prompt: Annotated[str, AfterValidator(_has_field)]
    """The prompt, e.g. "{premise} Does it follow that {hypothesis}?". {options} stands for the words of all `choices`
    of the answer, a line each, as in FLAN (Wei et al. 2022, section 2.3)."""
    answer: Annotated[str, AfterValidator(_has_field)]
    """The response, e.g. "{label}"."""
    choices: dict[str, Choices] = Field(default_factory=dict)
    """Of a field the words that stand for each of its values, e.g. {label: {0: "yes", 1: "perhaps", 2: "no"}}, as the
    answer choices of T0 (Sanh et al. 2022, section 4). Words may name fields too: {gold: {0: "{choices.0}", 1:
    "{choices.1}"}}. A record with another value is quarantined."""

    @property
    def answered(self) -> str:
        """The field whose choices are the options."""
        return next(field for field in fields_of(self.answer) if field in self.choices)

    @model_validator(mode="after")
    def _names_its_choices(self) -> Self:
        prompt_fields, answer_fields = fields_of(self.prompt), fields_of(self.answer)
        if unused := [field for field in self.choices if field not in (*prompt_fields, *answer_fields)]:
            raise ValueError(f"choices: expected {{{unused[0]}}} in prompt or answer, but neither contains it")
        for words in self.choices.values():
            for word in words.values():
                fields_of(word)
        if (
            self.choices
            and OPTIONS in prompt_fields
            and len([field for field in answer_fields if field in self.choices]) != 1
        ):
            raise ValueError("prompt: expected one field of choices in the answer, since {options} are its words")
        return self


class InstructionOptions(PairOptions):
    """Prompts with responses, or conversations of several turns. Their form is seen from the records: instruction,
    input and output as in Alpaca, with `history` and `system` where they are there; a prompt with a completion (or
    response, answer; inputs and targets as in FLAN), texts or messages; turns under `conversations` or `messages` as in
    ShareGPT, {from, value} or {role, content}. Conversations start with the human, after the system if it speaks, and
    end with an answer; all others are put aside."""

    response_field: str = "output"
    """JSON key of the response."""
    system_field: str | None = "system"
    """JSON key of the system's message, next to a prompt or a conversation that does not begin with one. null: none is
    read."""
    templates: tuple[InstructionTemplate, ...] = ()
    """Phrasings of a task, by which the records of a data set become instructions (T0, Sanh et al. 2022; FLAN, Wei et
    al. 2022, which has ten a data set). One is chosen for each record by a hash of its content. Every record must have
    all fields that any of them names; other fields are not read. (): the form is seen from the records."""
    template_seed: Seed = 17
    """Seed for choosing a template for each record, together with the record's content."""
    weight: float = Field(1.0, gt=0)
    """Number of times that each training pair is used per epoch of `sft`: 2 is twice, 0.5 is every second pair,
    selected by id."""
    max_examples: int | None = Field(None, ge=1)
    """Maximum number of its training pairs, chosen at random by their ids: a cap keeps one large source from dominating
    small ones (3,000 per task in FLAN, Wei et al. 2022, section 2.1). null: no cap."""
    verify: Verify | None = None
    """Rule that decides if an answer is right. exact: it equals the response. number: it ends with the same number, the
    one after `####` if present (GSM8K, Cobbe et al. 2021); thousands separators, signs and decimals are parsed. json:
    it is valid JSON, and an object with all keys of the response if that is an object. words:4-6: it has four to six
    words. format:REGEX: the regular expression matches all of it. tests: it is Python code that passes the assertions
    in the reference, run in a separate process; see `reference_field`. RLHF then rewards right answers instead of those
    that the reward model prefers. null: no rule."""
    reference_field: str | None = None
    """JSON key of the reference that the rule compares answers with, if it is not the response: a text, a list of texts
    that become its lines, a number or an object. With `verify: tests` the assertions. null: the response."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.reference_field and not self.verify:
            raise ValueError("reference_field: expected a rule (`verify`) as well, but none is set")
        unread = ("prompt_field", "input_field", "response_field") if self.templates else ("template_seed",)
        for key in unread:
            if getattr(self, key) != type(self).model_fields[key].default:
                expectation = (
                    "none together with templates, which name their fields" if self.templates else "templates as well"
                )
                raise ValueError(f"{key}: expected {expectation}")
        return self


class FileInstructions(InstructionOptions, FileSelection):
    """Prompts with responses, or conversations, in JSON, JSON Lines, Parquet, Arrow, CSV or TSV files, compressed
    (gzip, zstd, bzip2, xz) or not. See `InstructionOptions` for the forms of their records."""


class HuggingFaceInstructions(InstructionOptions, DatasetSelection):
    """Prompts with responses, or conversations, of a Hugging Face dataset: a folder made by `save_to_disk`, a folder of
    data files, or a name on the hub that is in the local cache. See `InstructionOptions` for the forms."""


class PreferenceOptions(PairOptions):
    """Preference pairs. The form is detected from the records: a prompt (`instruction`, `prompt`, or the field named
    here) with a chosen and a rejected answer; turns (`conversations`, `messages`) with two answers as in ShareGPT; two
    lists of turns or two dialogues as in HH-RLHF, with the same beginning. Answers are texts, or messages {from, value}
    or {role, content}. Rankings have a prompt or turns and a list `answers` (or completions, responses): texts from
    best to worst, texts with a list `ranks` or `scores`, or objects with a text and its rank or score. All pairs of a
    ranking are written, those of equal rank as ties."""

    chosen_field: str = "chosen"
    """JSON key of the better response."""
    rejected_field: str = "rejected"
    """JSON key of the worse response."""
    dialogue: bool = False
    """Reads chosen and rejected as complete dialogues of Anthropic's HH-RLHF (Bai et al., 2022), regardless of other
    fields: turns that begin with a blank line and Human: or Assistant:. The prompt is then all text before the last
    Assistant turn; prompt_field and input_field are not read. Records without a prompt and without turns are read this
    way by default."""
    system_field: str | None = None
    """JSON key of the system's message, which then precedes the prompt. null: none is read but the first message of a
    conversation."""
    votes_field: str | None = None
    """JSON key of the numbers of people who preferred the chosen and the rejected answer, [3, 1], as `stemma feedback
    import` writes it under `votes`. The reward model then learns the share; equal numbers are a tie. null: none are
    read."""
    margin_field: str | None = None
    """JSON key of the margin by which the chosen answer is better, a number from 0; see reward_model.margin_coef. null:
    none is read."""
    annotator_field: str | None = None
    """JSON key of the annotator. Judgements of the same two answers then become one pair with its votes. null: each
    record is a pair by itself, and one that was there before a duplicate."""


class FilePreferences(PreferenceOptions, FileSelection):
    """Preference pairs in JSON, JSON Lines, Parquet, Arrow, CSV or TSV files, compressed (gzip, zstd, bzip2, xz) or
    not. See `PreferenceOptions` for the forms of their records."""


class HuggingFacePreferences(PreferenceOptions, DatasetSelection):
    """Preference pairs of a Hugging Face dataset: a folder made by `save_to_disk`, a folder of data files, or a name on
    the hub that is in the local cache. See `PreferenceOptions` for the forms of their records."""
