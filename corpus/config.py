"""Config of the corpus stages: ingest, instructions, preferences, validate, clean, tokenizer, shard."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, model_validator

from infra.config import Config, StageConfig, outside_identity
from infra.project import PROJECT
from infra.sources import Place, Source, SourceDataset, SourceLocation, SourcePath, expand, expand_objects

if TYPE_CHECKING:
    from corpus.suites import Suite

Share = Annotated[float, Field(ge=0, le=1)]

HELDOUT_SHARE = 0.05

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
        known = codecs.lookup(value).name not in ("idna", "punycode")
    except (LookupError, UnicodeError):
        known = False
    if not known:
        raise ValueError(f"encoding: expected one of text that Python knows, e.g. utf-8 or latin-1, not {value}")
    return value


Encoding = Annotated[str, AfterValidator(_known_encoding)]
EncodingOrAuto = Annotated[str, AfterValidator(lambda value: value if value == "auto" else _known_encoding(value))]


class DocstringSelection(Config):
    """Which installed packages' docstrings are read. They are parsed, never imported."""

    kind: Literal["docstrings"] = "docstrings"
    packages: tuple[str, ...] | None = None
    """Top-level package names, e.g. [numpy, scipy, pydoc_data]; by default all that are installed."""
    exclude_packages: tuple[str, ...] = ("oci",)
    """Top-level package names that are left out. oci is 220 MB of generated client code with one text over and over."""

    @model_validator(mode="after")
    def _selects_something(self) -> DocstringSelection:
        if self.packages is not None and not set(self.packages) - set(self.exclude_packages):
            raise ValueError("packages: expected at least one package name that exclude_packages does not take away")
        return self

    def source(self, key: str) -> Source:
        """The installed files as one source whose digest comes from the packages' RECORD files."""
        from corpus.docstrings import content_digest, records

        return Source(
            key,
            derive=lambda: content_digest(self.packages, self.exclude_packages),
            recipe=f"docstrings of {self.packages} without {self.exclude_packages}",
            watched=records(),
        )


class FileSelection(Config):
    """Files, folders and globs that are read from disk."""

    kind: Literal["files"] = "files"
    paths: SomeOf[SourceLocation] = outside_identity()
    """Files, folders (all files below) or globs, relative to the config file; or s3:// URLs of the same.
    Credentials, region and server of S3 come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …)."""
    encoding: Encoding = "utf-8"
    """Encoding of text and JSON files, e.g. latin-1."""

    def places(self) -> tuple[Place, ...]:
        """The files and objects that there are now. Raises StageError as `infra.sources.expand_objects` does."""
        return (*expand(self.paths), *expand_objects(self.paths))

    def source(self, key: str) -> Source:
        return Source(key, paths=expand(self.paths), objects=expand_objects(self.paths))


class SourceDescription(Config):
    """What a corpus should know of each of its sources."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """How the mixture, the reports and the documents call this source; by default its kind, from the second of a
    kind on with a number."""
    licence: str = ""
    """Its licence, e.g. CC-BY-SA-4.0; goes into the report and the model card."""
    weight: float = Field(1.0, ge=0)
    """How often its documents are to be seen, relative to the other sources; read by the stage `mix`."""
    language: str = Field("", pattern=r"^([a-z]{2})?$")
    """ISO 639-1 code of its texts, e.g. en; "" where they are mixed or nobody knows."""


class DocstringDocuments(DocstringSelection, SourceDescription):
    """Docstrings of installed packages as documents, each below its name and signature."""

    language: str = Field("en", pattern=r"^([a-z]{2})?$")
    """ISO 639-1 code of the texts; nearly all docstrings are English."""
    limit_mb: float | None = Field(12, gt=0)
    """Megabytes (10^6 bytes of UTF-8) to take, from files in an order that mixes the packages; null takes all."""
    min_characters: int = Field(200, ge=1)
    """Shorter docstrings are not taken: most are one-liners."""
    signatures: bool = True
    """Whether a document opens with the qualified name and parameters of what it documents."""


class TextOptions(SourceDescription):
    """How documents are made of the records of files."""

    encoding: EncodingOrAuto = "auto"
    """Encoding of text and JSON files, e.g. latin-1; bytes that do not fit it are errors. auto takes the byte order
    mark, what a page declares, UTF-8, or what charset-normalizer finds, in this order."""
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "html", "warc"] = "auto"
    """auto goes by the suffix before .gz, .zst, .bz2 or .xz: .jsonl, .ndjson and .json, .parquet, .arrow, .html and
    .htm, .warc and .wet; all others are text. A .json file may hold one list."""
    text_field: str = "text"
    """JSON key or column that holds the text; dotted for one inside others, e.g. page.body."""
    metadata_fields: tuple[str, ...] = ()
    """JSON keys or columns to keep as metadata, dotted or not; of WARC records url, date and content_type."""
    content: Literal["plain", "html", "email"] = "plain"
    """What the text of a record is: plain text, a page (its main text is taken), or an e-mail with its headers (subject
    and body are taken)."""
    text_unit: Literal["file", "paragraph", "line"] = "file"
    """What a document of a text file is: the file, a paragraph between blank lines, or a line."""
    cut_characters: int | None = Field(None, ge=100)
    """Cut longer texts at the first paragraph end after this many characters; by default a text stays whole."""
    max_document_mb: float = Field(20, gt=0)
    """Larger documents (10^6 bytes) are put aside: most likely many in one, and held in memory several times."""
    broken_files: Literal["stop", "quarantine"] = "stop"
    """What a file does that is binary, truncated or damaged: stop the run, or count as one record that was put aside,
    with what could be read of it kept."""


class FileDocuments(TextOptions, FileSelection):
    """Documents in text, JSON Lines, Parquet, Arrow, HTML, WARC or WET files, compressed (gzip, zstd, bzip2, xz) or
    not."""


class HuggingFaceDocuments(TextOptions):
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
        """The data files. Raises StageError as `corpus.hub.dataset_files` does."""
        from corpus.hub import dataset_files

        return dataset_files(self.dataset, self.subset, self.split, self.revision)

    def source(self, key: str) -> Source:
        from corpus.hub import dataset_files

        return Source(key, paths=dataset_files(self.dataset, self.subset, self.split, self.revision))


DocumentSource = Annotated[DocstringDocuments | FileDocuments | HuggingFaceDocuments, Field(discriminator="kind")]


class IngestConfig(StageConfig):
    """Reads documents from outside into Parquet."""

    read: SomeOf[DocumentSource] = (DocstringDocuments(),)
    """Where the text comes from, in this order."""
    max_quarantine_share: Share = 0.01
    """Share of unreadable records that is put aside in aux/quarantine.jsonl; above it the stage stops."""

    @model_validator(mode="after")
    def _names_differ(self) -> IngestConfig:
        given = [source.name for source in self.read if source.name]
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(f"read: expected names that differ; {', '.join(twice)} stands more than once")
        return self

    def names(self) -> list[str]:
        """The name of each source: its own, else its kind, with a number where that is taken."""
        names = [source.name or "" for source in self.read]
        for index, source in enumerate(self.read):
            if not names[index]:
                options = (source.kind if n == 1 else f"{source.kind}-{n}" for n in count(1))
                names[index] = next(option for option in options if option not in names)
        return names

    def sources(self) -> list[Source]:
        return [source.source(f"ingest.read.{i}") for i, source in enumerate(self.read)]


class DocstringPairs(DocstringSelection):
    """Functions and classes with a docstring that opens with one good summary sentence."""

    min_characters: int = Field(20, ge=1)
    """Shorter summaries are not taken."""
    max_characters: int = Field(160, ge=1)
    """Longer summaries are not taken."""
    limit: int | None = Field(None, ge=2)
    """Pairs to take, held-out ones included, from files in an order that mixes the packages; null takes all."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> DocstringPairs:
        if self.min_characters > self.max_characters:
            raise ValueError(f"min_characters: expected at most max_characters ({self.max_characters})")
        return self


class PairFiles(FileSelection):
    """JSON or JSON Lines files of pairs, gzipped or not; a JSON file holds one list of objects."""

    prompt_field: str = "instruction"
    """JSON key of the prompt."""
    input_field: str | None = "input"
    """JSON key of further input that is put below the prompt where it is there and not empty; null for none."""
    limit: int | None = Field(None, ge=2)
    """Records to take from the start of these files, held-out ones included; null takes all."""


class DocstringInstructions(DocstringPairs):
    """The prompt asks what a function does; the response is the summary sentence of its docstring."""


class FileInstructions(PairFiles):
    """Instruction pairs as in Alpaca: instruction, input, output."""

    response_field: str = "output"
    """JSON key of the response."""


InstructionSource = Annotated[DocstringInstructions | FileInstructions, Field(discriminator="kind")]


class InstructionsConfig(StageConfig):
    """Makes prompts with their responses, split into training and held-out pairs."""

    read: SomeOf[InstructionSource] = (DocstringInstructions(),)
    """Where the pairs come from, in this order."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    max_quarantine_share: Share = 0.01
    """Share of unreadable records that is put aside in aux/quarantine.jsonl; above it the stage stops."""

    def sources(self) -> list[Source]:
        return [source.source(f"instructions.read.{i}") for i, source in enumerate(self.read)]


class DocstringPreferences(DocstringPairs):
    """The true summary of a function against the summary of another one in the same package, of similar length."""


class FilePreferences(PairFiles):
    """Preference pairs: a prompt with a chosen and a rejected response, or two whole dialogues."""

    chosen_field: str = "chosen"
    """JSON key of the better response."""
    rejected_field: str = "rejected"
    """JSON key of the worse response."""
    dialogue: bool = False
    """Whether chosen and rejected hold whole dialogues as in Anthropic's HH-RLHF (Bai et al., 2022): turns that open
    with a blank line and Human: or Assistant:. The prompt is then all before the last Assistant turn, and prompt_field
    and input_field are not read."""


PreferenceSource = Annotated[DocstringPreferences | FilePreferences, Field(discriminator="kind")]


class PreferencesConfig(StageConfig):
    """Makes prompts with a chosen and a rejected response, split into training and held-out pairs."""

    read: SomeOf[PreferenceSource] = (DocstringPreferences(),)
    """Where the pairs come from, in this order."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    max_quarantine_share: Share = 0.01
    """Share of unreadable records that is put aside in aux/quarantine.jsonl; above it the stage stops."""
    seed: int = 17
    """Decides which wrong summary stands against which true one."""

    def sources(self) -> list[Source]:
        return [source.source(f"preferences.read.{i}") for i, source in enumerate(self.read)]


SUITES = PROJECT / "configs" / "suites"
DataKind = Literal["documents", "clean", "instructions", "preferences", "shards"]
DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)


class SuiteConfig(Config):
    """A Great Expectations suite in a file, and which of its limits are to be others."""

    suite: SourcePath | None = outside_identity(None)
    """YAML or JSON file; by default the one of this kind of data in configs/suites."""
    limits: dict[str, int | float] = Field(default_factory=dict)
    """Limits of the suite by name. They may also stand beside `suite`: {min_rows: 1000}."""

    @model_validator(mode="before")
    @classmethod
    def _gather_limits(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = {key: value for key, value in data.items() if key in cls.model_fields}
        beside = {key: value for key, value in data.items() if key not in cls.model_fields}
        return {**own, "limits": {**own.get("limits", {}), **beside}} if beside else own


class ValidateConfig(StageConfig):
    """Great Expectations suites for each kind of data: documents as they were read, documents that went through the
    whole chain, instruction pairs, preference pairs, token shards. A kind that is null is not validated."""

    documents: SuiteConfig | None = SuiteConfig()
    clean: SuiteConfig | None = SuiteConfig()
    instructions: SuiteConfig | None = SuiteConfig()
    preferences: SuiteConfig | None = SuiteConfig()
    shards: SuiteConfig | None = SuiteConfig()
    max_rows: int = Field(200_000, ge=1)
    """Rows that are looked at: larger data is sampled evenly by id. Its length in rows is always counted whole."""
    kind: DataKind | None = None
    """The kind of data at hand. The pipeline fills it in; by hand it is seen from the files, documents being raw."""

    def of(self, kind: DataKind, **limits: float) -> ValidateConfig:
        """The part that speaks of one kind of data, so that a change elsewhere re-addresses nothing.

        limits: what takes the place of the suite's limits where the config does not move them.
        """
        chosen = self._chosen(kind)
        if limits and chosen.suite is None:
            chosen = chosen.model_copy(update={"limits": {**limits, **chosen.limits}})
        return ValidateConfig(**{kind: chosen}, max_rows=self.max_rows, kind=kind)

    def read(self, kind: DataKind) -> Suite:
        """The suite of a kind of data. Raises what `corpus.suites.read_suite` raises."""
        from corpus.suites import read_suite

        return read_suite(self._file(kind), self._chosen(kind).limits, f"validate.{kind}")

    def sources(self) -> list[Source]:
        return [Source(f"validate.{self.kind}.suite", paths=(self._file(self.kind),))] if self.kind else []

    def _chosen(self, kind: DataKind) -> SuiteConfig:
        chosen: SuiteConfig | None = getattr(self, kind)
        return chosen or SuiteConfig()

    def _file(self, kind: DataKind) -> Path:
        suite = self._chosen(kind).suite
        return Path(suite) if suite else SUITES / f"{kind}.yaml"


class TokenizerConfig(StageConfig):
    """Trains a byte-level tokenizer on the documents that are not held out, or takes over a finished one."""

    kind: Literal["bpe", "unigram", "wordpiece"] = "bpe"
    """Byte-pair encoding as GPT-2 has it (Sennrich et al., 2016; Radford et al., 2019), a unigram language model (Kudo,
    2018) or WordPiece (Schuster & Nakajima, 2012), all over bytes: any text comes back whole."""
    vocab_size: int = Field(4096, ge=300)
    """Entries, special tokens and the 256 bytes included. GPT-2 (Radford et al., 2019) has 50,257."""
    min_frequency: int = Field(2, ge=1)
    """A pair of tokens must occur this often to be merged. Bears on nothing in a unigram model."""
    train_mb: float | None = Field(200, gt=0)
    """Megabytes (10^6 bytes of UTF-8) of text to train on, an even sample of all documents; null takes all. Memory
    grows with it."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    pretrained: SourcePath | None = outside_identity(None)
    """A Hugging Face tokenizer folder to take over instead of training one. Tokens of the chat format that it lacks are
    added, and its chat template becomes ours."""
    baselines: tuple[SourcePath, ...] = outside_identity(())
    """Hugging Face tokenizer folders to measure beside this tokenizer."""
    compare: bool = True
    """Whether a tokenizer that is no BPE trained here is measured beside one, of the same size on the same text."""

    def sources(self) -> list[Source]:
        taken = [Source("tokenizer.pretrained", paths=expand([self.pretrained]))] if self.pretrained else []
        baselines = [
            Source(f"tokenizer.baselines.{i}", paths=expand([folder])) for i, folder in enumerate(self.baselines)
        ]
        return [*taken, *baselines]


class ShardConfig(StageConfig):
    """Tokenises documents and packs them into MDS shards of sequences of one length."""

    sequence_length: int = Field(256, ge=8)
    """Tokens a sequence. GPT-3 (Brown et al., 2020) has 2048."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that goes to validation; the same in tokenizer, shard, instructions and preferences."""
    shard_mb: float = Field(64, gt=0)
    """Megabytes (2^20 bytes) a shard file before compression."""
    compression: Annotated[str, Field(pattern=r"^(zstd|br|bz2)(:\d+)?$")] | None = None
    """Compression of shard files, with its level or without: zstd, zstd:7, br, bz2. streaming unpacks them as they are
    read. gz is not among them, since its files hold the time of day."""
    hashes: tuple[Literal["blake2b", "sha256", "xxh128", "xxh3_64", "xxh64"], ...] = ("xxh3_64",)
    """Hashes of each shard file in its index, which streaming checks with `validate_hash` after a download."""
