"""Config of the corpus stages: ingest, instructions, preferences, validate, clean, tokenizer, shard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from corpus.decontaminate.config import MatchConfig
from corpus.dedupe.config import NearDuplicates
from corpus.demo.config import (
    CommentDocuments,
    CommentReplies,
    DocstringDocuments,
    DocstringInstructions,
    DocstringLengths,
    DocstringPreferences,
    DocstringSignatures,
    DocstringStyle,
)
from corpus.readers.config import (
    FileDocuments,
    FileInstructions,
    FilePreferences,
    HuggingFaceDocuments,
    HuggingFaceInstructions,
    HuggingFacePreferences,
    SomeOf,
)
from infra.config import Config, Seed, StageConfig, outside_identity
from infra.io.s3 import SCHEME
from infra.io.sources import Source, SourceLocation, SourcePath, expand, expand_objects
from infra.project import PROJECT

if TYPE_CHECKING:
    from corpus.validation.suites import Suite

Share = Annotated[float, Field(ge=0, le=1)]

HELDOUT_SHARE = 0.05


DocumentSource = Annotated[
    DocstringDocuments | CommentDocuments | FileDocuments | HuggingFaceDocuments, Field(discriminator="kind")
]


class IngestConfig(StageConfig):
    """Reads documents from outside into Parquet."""

    read: SomeOf[DocumentSource] = (DocstringDocuments(),)
    """Sources of the text, in this order."""
    max_quarantine_share: Share = 0.01
    """Maximum share of unreadable records, which are written to aux/quarantine.jsonl; above it the stage fails."""

    @model_validator(mode="after")
    def _names_differ(self) -> IngestConfig:
        given = [source.name for source in self.read if source.name]
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(f"read: expected unique names; {', '.join(twice)} is listed more than once")
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


class NearPrompts(NearDuplicates):
    """Prompts that are near duplicates, by MinHash and verified (Broder, 1997; Lee et al., 2022).

    Word n-grams that more than 1 % of the prompts have, and more than ten, are a template's and not compared.
    """

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Minimum Jaccard similarity of the word n-grams of near-duplicate prompts."""
    ngram: int = Field(3, ge=1, le=32)
    """Words per n-gram: fewer than for documents, since prompts are short."""
    marks: bool = False
    """Count marks that carry meaning as part of the words, as in `dedupe.near`. Off here: two prompts that differ only
    in a sign leak each other's answers."""


InstructionSource = Annotated[
    DocstringInstructions
    | DocstringSignatures
    | DocstringLengths
    | CommentReplies
    | FileInstructions
    | HuggingFaceInstructions,
    Field(discriminator="kind"),
]


class InstructionsConfig(StageConfig):
    """Makes prompts with their responses, split into training and held-out pairs."""

    read: SomeOf[InstructionSource] = (DocstringInstructions(),)
    """Sources of the pairs, in this order."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    max_quarantine_share: Share = 0.01
    """Maximum share of unreadable records, which are written to aux/quarantine.jsonl; above it the stage fails."""
    near_prompts: NearPrompts | None = NearPrompts()
    """Keep near-duplicate prompts on the same side of the split; null compares prompts exactly."""
    decontaminate: MatchConfig | None = MatchConfig()
    """Drop pairs that hold a test item of the pipeline's benchmarks or safety probes; null keeps them."""

    def sources(self) -> list[Source]:
        return [source.source(f"instructions.read.{i}") for i, source in enumerate(self.read)]


PreferenceSource = Annotated[
    DocstringPreferences | DocstringStyle | CommentReplies | FilePreferences | HuggingFacePreferences,
    Field(discriminator="kind"),
]


class PreferencesConfig(StageConfig):
    """Makes prompts with a chosen and a rejected response, split into training and held-out pairs."""

    read: SomeOf[PreferenceSource] = (DocstringPreferences(),)
    """Sources of the pairs, in this order."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    max_quarantine_share: Share = 0.01
    """Maximum share of unreadable records, which are written to aux/quarantine.jsonl; above it the stage fails."""
    near_prompts: NearPrompts | None = NearPrompts()
    """Keep near-duplicate prompts on the same side of the split; null compares prompts exactly."""
    decontaminate: MatchConfig | None = MatchConfig()
    """Drop pairs that hold a test item of the pipeline's benchmarks or safety probes; null keeps them."""
    seed: Seed = 17
    """Seed for pairing wrong summaries with true ones."""

    def sources(self) -> list[Source]:
        return [source.source(f"preferences.read.{i}") for i, source in enumerate(self.read)]


READS_RECORDS = (IngestConfig, InstructionsConfig, PreferencesConfig)
"""The configs that name files of records."""

SUITES = PROJECT / "configs" / "suites"
DataKind = Literal["documents", "clean", "instructions", "preferences", "shards"]
DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)


class SuiteConfig(Config):
    """A Great Expectations suite in a file, with overrides of its limits."""

    suite: SourcePath | None = outside_identity(None)
    """YAML or JSON file; by default the one of this kind of data in configs/suites."""
    limits: dict[str, int | float] = Field(default_factory=dict)
    """Limits of the suite by name. They may also be given next to `suite`: {min_rows: 1000}."""

    @model_validator(mode="before")
    @classmethod
    def _gather_limits(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own_keys = {key: value for key, value in data.items() if key in cls.model_fields}
        extra_limits = {key: value for key, value in data.items() if key not in cls.model_fields}
        return {**own_keys, "limits": {**own_keys.get("limits", {}), **extra_limits}} if extra_limits else own_keys


class ValidateConfig(StageConfig):
    """Great Expectations suites for each kind of data: raw documents, documents at the end of the cleaning chain,
    instruction pairs, preference pairs, token shards. A kind that is null is not validated."""

    documents: SuiteConfig | None = SuiteConfig()
    clean: SuiteConfig | None = SuiteConfig()
    instructions: SuiteConfig | None = SuiteConfig()
    preferences: SuiteConfig | None = SuiteConfig()
    shards: SuiteConfig | None = SuiteConfig()
    max_rows: int = Field(200_000, ge=1)
    """Maximum number of rows to validate: larger data is sampled evenly by id. The number of rows is always exact."""
    kind: DataKind | None = None
    """Kind of data. The pipeline sets it; when run by hand it is detected from the files, with documents taken as raw.
    """

    def of(self, kind: DataKind, **limits: float) -> ValidateConfig:
        """Return the part of the config for one kind of data, so that a change elsewhere re-addresses nothing.

        Args:
            limits: replace the suite's limits that the config does not set.
        """
        chosen = self._chosen(kind)
        if limits and chosen.suite is None:
            chosen = chosen.model_copy(update={"limits": {**limits, **chosen.limits}})
        return ValidateConfig(**{kind: chosen}, max_rows=self.max_rows, kind=kind)

    def read(self, kind: DataKind) -> Suite:
        """The suite of a kind of data. Raises what `corpus.validation.suites.read_suite` raises."""
        from corpus.validation.suites import read_suite

        return read_suite(self._file(kind), self._chosen(kind).limits, f"validate.{kind}")

    def sources(self) -> list[Source]:
        return [Source(f"validate.{self.kind}.suite", paths=(self._file(self.kind),))] if self.kind else []

    def _chosen(self, kind: DataKind) -> SuiteConfig:
        chosen: SuiteConfig | None = getattr(self, kind)
        return chosen or SuiteConfig()

    def _file(self, kind: DataKind) -> Path:
        suite = self._chosen(kind).suite
        return Path(suite) if suite else SUITES / f"{kind}.yaml"


WORDPIECE_LEAST = 2 * 256 + 6
"""Entries of a WordPiece model before any is learnt: bytes, and special tokens including the unknown one."""


class TokenizerConfig(StageConfig):
    """Trains a byte-level tokenizer on the documents that are not held out, or imports an existing one."""

    kind: Literal["bpe", "unigram", "wordpiece"] = "bpe"
    """Byte-pair encoding as GPT-2 has it (Sennrich et al., 2016; Radford et al., 2019), a unigram language model (Kudo,
    2018) or WordPiece (Schuster & Nakajima, 2012), all over bytes, so that any text round-trips."""
    vocab_size: int = Field(4096, ge=300)
    """Number of entries, including special tokens and the 256 bytes, which WordPiece has twice (at least 518 entries).
    GPT-2 (Radford et al., 2019) has 50,257."""
    min_frequency: int = Field(2, ge=1)
    """Minimum number of occurrences of a pair of tokens before it is merged. Has no effect on a unigram model."""
    train_mb: float | None = Field(200, gt=0)
    """Megabytes (10^6 bytes of UTF-8) of text to train on, an even sample of all documents; null uses all. Memory grows
    with it."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    pretrained: SourcePath | None = outside_identity(None)
    """A Hugging Face tokenizer folder to import instead of training one. Missing tokens of the chat format are added,
    and its chat template is replaced by this project's."""
    baselines: tuple[SourcePath, ...] = outside_identity(())
    """Hugging Face tokenizer folders to compare with this tokenizer."""
    compare: bool = True
    """Measure a tokenizer that is not a BPE trained here against a BPE of the same size, trained on the same text."""

    @model_validator(mode="after")
    def _room_for_bytes(self) -> TokenizerConfig:
        if self.kind == "wordpiece" and self.pretrained is None and self.vocab_size < WORDPIECE_LEAST:
            raise ValueError(
                f"vocab_size: expected at least {WORDPIECE_LEAST} for wordpiece, which has an entry for each byte at "
                f"the beginning of a word and one for each inside it, not {self.vocab_size}"
            )
        return self

    def sources(self) -> list[Source]:
        taken = [Source("tokenizer.pretrained", paths=expand([self.pretrained]))] if self.pretrained else []
        baselines = [
            Source(f"tokenizer.baselines.{i}", paths=expand([folder])) for i, folder in enumerate(self.baselines)
        ]
        return [*taken, *baselines]


CANARY_GAP = r"\{(digits|letters):([1-9]\d?)\}"


class CanariesConfig(Config):
    """Made-up secrets of one format, planted in the training text (Carlini et al. 2019)."""

    text: str = Field(min_length=1)
    """The format: a text with at least one gap, `{digits:6}` or `{letters:4}`, which random characters fill."""
    copies: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 4, 16, 64), min_length=1)
    """One canary is drawn per number and planted that many times; a canary with 0 is a control that shows chance level.
    """

    @field_validator("text")
    @classmethod
    def _has_gaps(cls, text: str) -> str:
        left = re.sub(CANARY_GAP, "", text)
        if left == text or re.search(r"[{}]", left):
            raise ValueError("expected a text with gaps like {digits:6} or {letters:4}, of 1 to 99 characters each")
        return text

    @model_validator(mode="after")
    def _fit_the_space(self) -> CanariesConfig:
        space = 1
        for kind, length in re.findall(CANARY_GAP, self.text):
            space *= (10 if kind == "digits" else 26) ** int(length)
        if space < 2 * len(self.copies):
            raise ValueError(f"only {space} texts have this format, expected at least {2 * len(self.copies)}")
        return self


class ShardConfig(StageConfig):
    """Tokenises documents and packs them into MDS shards of sequences of one length."""

    sequence_length: int = Field(256, ge=8)
    """Tokens per sequence. GPT-3 (Brown et al., 2020) uses 2048."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups used for validation; the same in tokenizer, shard, instructions and preferences."""
    by_source: bool = False
    """Packs the training text of each source into separate sequences and shard files, so that `pretrain.mixture` can
    mix the sources during training. The validation side always mixes all sources."""
    end_of_text: str | None = Field(None, min_length=1)
    """The token that ends every document. null: <|endoftext|> or <|end_of_text|> where the tokenizer has one, else its
    eos_token, as of Gemma (<eos>), Llama 2 and Mistral (</s>)."""
    begin_of_text: str | None = None
    """The token that every document begins with; "" is none. null: the tokenizer's bos_token where it puts one in front
    of every text, by its post-processor or `add_bos_token`, as the models of Llama, Gemma and Mistral were trained."""
    shard_mb: float = Field(64, gt=0)
    """Size of a shard file before compression, in megabytes (2^20 bytes)."""
    compression: Annotated[str, Field(pattern=r"^(zstd|br|bz2)(:\d+)?$")] | None = None
    """Compression of shard files, optionally with a level: zstd, zstd:7, br, bz2. streaming decompresses them on read.
    gz is excluded because its files contain the time of day."""
    hashes: tuple[Literal["blake2b", "sha256", "xxh128", "xxh3_64", "xxh64"], ...] = ("xxh3_64",)
    """Hashes of each shard file in its index, which streaming checks with `validate_hash` after a download."""
    canaries: tuple[CanariesConfig, ...] = ()
    """Made-up secrets planted in the training text; `safety` measures how far the model reveals them. Default: none.
    For a model that will be used, plant them in a copy of the pipeline."""
    canary_seed: Seed = 17
    """Draws the canaries."""

    @model_validator(mode="after")
    def _canaries_fit(self) -> ShardConfig:
        texts = [canary.text for canary in self.canaries]
        if twice := sorted({text for text in texts if texts.count(text) > 1}):
            raise ValueError(f"canaries: expected each format once, with all copies; listed twice: {', '.join(twice)}")
        if self.canaries and self.by_source:
            raise ValueError("canaries: expected `by_source: false`, since they do not fill separate sequences")
        return self


class RemoteShardsConfig(StageConfig):
    """Shards on S3 that are downloaded during training."""

    location: SourceLocation = outside_identity(examples=["s3://bucket/shard/0123456789abcdef"])
    """s3://bucket/folder with all files of a shard artifact. Only their index is part of the identity: it contains the
    hash of every file."""

    @field_validator("location")
    @classmethod
    def _is_on_s3(cls, location: str) -> str:
        if not location.startswith(SCHEME):
            raise ValueError(f"expected {SCHEME}bucket/folder, not {location}")
        return location

    def sources(self) -> list[Source]:
        location = self.location.rstrip("/")
        urls = [f"{location}/{name}" for name in ("meta.json", "train/index.json", "validation/index.json")]
        return [Source("remote_shards.location", objects=expand_objects(urls))]
