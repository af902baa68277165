"""Config of the corpus stages: ingest, instructions, preferences, validate, clean, tokenizer, shard."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from infra.config import Config, StageConfig, outside_identity
from infra.sources import Source, SourcePath, expand

Share = Annotated[float, Field(ge=0, le=1)]

HELDOUT_SHARE = 0.05

T = TypeVar("T")


def _at_least_one(items: tuple[T, ...]) -> tuple[T, ...]:
    # A min_length on the field would say "0 items" of a list whose items failed, besides saying why they failed.
    if not items:
        raise ValueError("expected at least one item")
    return items


SomeOf = Annotated[tuple[T, ...], AfterValidator(_at_least_one)]


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
    paths: SomeOf[SourcePath] = outside_identity()
    """Files, folders (all files below) or globs, relative to the config file."""
    encoding: str = "utf-8"
    """Encoding of text and JSON files, e.g. latin-1."""

    @model_validator(mode="after")
    def _encoding_exists(self) -> FileSelection:
        import codecs

        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ValueError(
                f"encoding: expected one that Python knows, e.g. utf-8 or latin-1, not {self.encoding}"
            ) from None
        return self

    def source(self, key: str) -> Source:
        return Source(key, paths=expand(self.paths))


class DocstringDocuments(DocstringSelection):
    """Docstrings of installed packages as documents, each below its name and signature."""

    limit_mb: float | None = Field(12, gt=0)
    """Megabytes (10^6 bytes of UTF-8) to take, from files in an order that mixes the packages; null takes all."""
    min_characters: int = Field(200, ge=1)
    """Shorter docstrings are not taken: most are one-liners."""
    signatures: bool = True
    """Whether a document opens with the qualified name and parameters of what it documents."""


class FileDocuments(FileSelection):
    """Documents in text, JSON Lines or Parquet files, gzipped or not."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """auto goes by the suffix: .jsonl and .ndjson (also with .gz), .parquet; all others are text."""
    text_field: str = "text"
    """JSON key or Parquet column that holds the text."""
    cut_characters: int | None = Field(None, ge=100)
    """Cut longer texts at the first paragraph end after this many characters; by default a text stays whole."""


DocumentSource = Annotated[DocstringDocuments | FileDocuments, Field(discriminator="kind")]


class IngestConfig(StageConfig):
    """Reads documents from outside into Parquet."""

    read: SomeOf[DocumentSource] = (DocstringDocuments(),)
    """Where the text comes from, in this order."""
    max_quarantine_share: Share = 0.01
    """Share of unreadable records that is put aside in aux/quarantine.jsonl; above it the stage stops."""

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


class DocumentExpectations(Config):
    """What must hold of ingested documents."""

    min_rows: int = Field(20, ge=1)
    """Fewest documents."""
    max_null_share: Share = 0.0
    """Largest share of documents without text."""
    min_characters: int = Field(1, ge=0)
    """A text shorter than this counts as wrong."""
    max_characters: int = Field(5_000_000, ge=1)
    """A text longer than this counts as wrong: most likely a file that should have been cut into documents."""
    min_length_share: Share = 0.99
    """Smallest share of texts with a length between the two."""
    max_duplicate_share: Share = 0.3
    """Largest share of documents whose text occurred before. Web crawls hold 3 to 14 % near-duplicates (Lee et al.,
    2022, Deduplicating Training Data Makes Language Models Better); far more is a broken reader."""
    min_language_like_share: Share = 0.9
    """Smallest share of texts that look like language: at least 40 % letters, mean word length 2 to 15."""
    max_replacement_share: Share = 0.01
    """Largest share of texts with U+FFFD, the trace of a wrong encoding."""


class InstructionExpectations(Config):
    """What must hold of instruction pairs, training and held-out together where not said otherwise."""

    min_rows: int = Field(20, ge=1)
    """Fewest training pairs."""
    min_heldout_rows: int = Field(1, ge=1)
    """Fewest held-out pairs."""
    max_prompt_characters: int = Field(20_000, ge=1)
    """A longer prompt counts as wrong."""
    max_response_characters: int = Field(20_000, ge=1)
    """A longer response counts as wrong."""
    min_length_share: Share = 0.99
    """Smallest share of prompts, and of responses, that are not empty and not longer than this."""
    max_duplicate_share: Share = 0.01
    """Largest share of pairs that occurred before."""
    min_prompt_differs_share: Share = 0.99
    """Smallest share of pairs whose response is not just the prompt again."""
    min_language_like_share: Share = 0.9
    """Smallest share of responses with at least one letter among each three characters, or a digit at all."""


class PreferenceExpectations(Config):
    """What must hold of preference pairs, training and held-out together where not said otherwise."""

    min_rows: int = Field(20, ge=1)
    """Fewest training pairs."""
    min_heldout_rows: int = Field(1, ge=1)
    """Fewest held-out pairs."""
    max_prompt_characters: int = Field(50_000, ge=1)
    """A longer prompt counts as wrong: whole dialogues are long."""
    max_response_characters: int = Field(20_000, ge=1)
    """A longer chosen or rejected response counts as wrong."""
    min_length_share: Share = 0.97
    """Smallest share of prompts, and of either response, that are not empty and not longer than this. In HH-RLHF up to
    1 % of the last turns are empty."""
    max_duplicate_share: Share = 0.01
    """Largest share of pairs that occurred before."""
    min_chosen_differs_share: Share = 0.98
    """Smallest share of pairs whose chosen and rejected responses differ. In HH-RLHF up to 1 % are equal."""
    max_length_ratio: float = Field(3.0, ge=1)
    """Largest ratio of the mean lengths of chosen and rejected responses, either way round; beyond it a reward model
    learns length (Singhal et al., 2023, A Long Way to Go)."""


class ValidateConfig(StageConfig):
    """A Great Expectations suite over what was read; which part applies goes by the kind of data."""

    documents: DocumentExpectations = DocumentExpectations()
    instructions: InstructionExpectations = InstructionExpectations()
    preferences: PreferenceExpectations = PreferenceExpectations()
    max_rows: int = Field(200_000, ge=1)
    """Rows that are looked at: larger data is sampled evenly by id. Its length in rows is always counted whole."""


class CleanConfig(StageConfig):
    """Rules that drop documents, each on its own switch: null turns a rule off. A document is dropped by the first rule
    that it breaks, in the order of the keys."""

    drop_exact_duplicates: bool = True
    """Keep the first of equal texts (C4, Raffel et al., 2020; Lee et al., 2022)."""
    min_characters: int | None = Field(100, ge=1)
    """Shortest text. C4 asks for at least 3 sentences on a page and 5 words in a line; docstrings are shorter than
    pages."""
    max_characters: int | None = Field(1_000_000, ge=1)
    """Longest text. Gopher (Rae et al., 2021) drops documents of over 100,000 words."""
    mean_word_length: tuple[float, float] | None = (3.0, 10.0)
    """Smallest and largest mean word length in characters (Gopher)."""
    min_alphabetic_word_share: Share | None = 0.6
    """Smallest share of words with a letter in them. Gopher: 0.8; technical text holds more numbers and operators."""
    max_symbol_word_ratio: Share | None = 0.1
    """Largest ratio of hash signs, and of ellipses, to words (Gopher)."""
    max_bullet_line_share: Share | None = 0.9
    """Largest share of lines that open with a bullet point (Gopher)."""
    max_ellipsis_line_share: Share | None = 0.3
    """Largest share of lines that end with an ellipsis (Gopher)."""
    max_repeated_line_share: Share | None = 0.3
    """Largest share of lines that occurred before in the same text (Gopher)."""
    max_repeated_line_character_share: Share | None = 0.2
    """Largest share of the characters that lie in such lines (Gopher)."""
    min_stop_words: int | None = Field(2, ge=1)
    """Fewest of the, be, to, of, and, that, have, with (Gopher: two). English only: turn it off for other languages."""
    drop_lorem_ipsum: bool = True
    """Drop texts with "lorem ipsum" (C4)."""

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> CleanConfig:
        if self.mean_word_length and self.mean_word_length[0] > self.mean_word_length[1]:
            raise ValueError("mean_word_length: expected [smallest, largest]")
        if self.min_characters and self.max_characters and self.min_characters > self.max_characters:
            raise ValueError(f"min_characters: expected at most max_characters ({self.max_characters})")
        return self


class TokenizerConfig(StageConfig):
    """Trains a byte-level BPE tokenizer on the documents that are not held out, or takes over a finished one."""

    vocab_size: int = Field(4096, ge=300)
    """Entries, special tokens and the 256 bytes included. GPT-2 (Radford et al., 2019) has 50,257."""
    min_frequency: int = Field(2, ge=1)
    """A pair of tokens must occur this often to be merged."""
    train_mb: float | None = Field(1000, gt=0)
    """Megabytes (10^6 bytes of UTF-8) of text to train on, from the start; null takes all. Memory grows with it."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    pretrained: SourcePath | None = outside_identity(None)
    """A Hugging Face tokenizer folder to take over instead of training one; the keys above are then not read."""

    def sources(self) -> list[Source]:
        return [Source("tokenizer.pretrained", paths=expand([self.pretrained]))] if self.pretrained else []


class ShardConfig(StageConfig):
    """Tokenises documents and packs them into MDS shards of sequences of one length."""

    sequence_length: int = Field(256, ge=8)
    """Tokens a sequence. GPT-3 (Brown et al., 2020) has 2048."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that goes to validation; the same in tokenizer, shard, instructions and preferences."""
    shard_mb: float = Field(64, gt=0)
    """Megabytes (2^20 bytes) a shard file before compression."""
    compression: Literal["zstd"] | None = None
    """Compression of shard files; streaming decompresses them as they are read."""
    workers: int = outside_identity(2, ge=1)
    """Threads that tokenise. The shards are the same for any number."""
