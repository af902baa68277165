"""Config of texts and pairs that are made of the docstrings of installed packages. Importing it loads nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from corpus.readers.config import SourceDescription
from infra.config import Config
from infra.io.sources import Source


class InstalledPackages(Config):
    """Installed packages whose docstrings are read. They are parsed, never imported."""

    kind: str
    packages: tuple[str, ...] | None = None
    """Top-level package names, e.g. [numpy, scipy, pydoc_data]; by default all that are installed."""
    exclude_packages: tuple[str, ...] = ("oci",)
    """Top-level package names that are left out. oci is 220 MB of generated client code with one text over and over."""

    @model_validator(mode="after")
    def _selects_something(self) -> InstalledPackages:
        if self.packages is not None and not set(self.packages) - set(self.exclude_packages):
            raise ValueError("packages: expected at least one package name that exclude_packages does not exclude")
        return self

    def source(self, key: str) -> Source:
        """The installed files as one source whose digest comes from the packages' RECORD files."""
        from corpus.demo.docstrings import content_digest, records

        return Source(
            key,
            derive=lambda: content_digest(self.packages, self.exclude_packages),
            recipe=f"docstrings of {self.packages} without {self.exclude_packages}",
            watched=records(),
        )


class DocstringSelection(InstalledPackages):
    """Docstrings themselves, or their summary sentences."""

    kind: Literal["docstrings"] = "docstrings"


class DocstringDocuments(DocstringSelection, SourceDescription):
    """Docstrings of installed packages as documents, each below its name and signature."""

    language: str = Field("en", pattern=r"^([a-z]{2})?$")
    """ISO 639-1 code of the texts; nearly all docstrings are English."""
    limit_mb: float | None = Field(12, gt=0)
    """Megabytes (10^6 bytes of UTF-8) to take, from files in an order that mixes the packages; null takes all."""
    min_characters: int = Field(200, ge=1)
    """Minimum length; shorter docstrings are mostly one-liners."""
    signatures: bool = True
    """Begin a document with the qualified name and parameters of the object that it documents."""


class DocstringPairs(DocstringSelection):
    """Functions and classes with a docstring that opens with one good summary sentence."""

    min_characters: int = Field(20, ge=1)
    """Minimum length of a summary."""
    max_characters: int = Field(160, ge=1)
    """Maximum length of a summary."""
    limit: int | None = Field(None, ge=2)
    """Pairs to take, held-out ones included, from files in an order that mixes the packages; null takes all."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> DocstringPairs:
        if self.min_characters > self.max_characters:
            raise ValueError(f"min_characters: expected at most max_characters ({self.max_characters})")
        return self


class DocstringInstructions(DocstringPairs):
    """The prompt asks what a function does; the response is the summary sentence of its docstring."""


class DocstringSignatures(InstalledPackages):
    """The prompt asks about a signature; a rule decides if an answer is right.

    Signatures are those of public functions and classes that have a docstring, each once.
    """

    kind: Literal["signatures"] = "signatures"
    questions: tuple[Literal["count", "first", "has"], ...] = Field(("count", "first", "has"), min_length=1)
    """Questions to ask: the number of parameters, the first parameter, and if a given parameter exists. A model of a
    few million parameters learns the first two within minutes, and answers the third at chance level."""
    limit: int | None = Field(None, ge=2)
    """Pairs to take, held-out ones included, from files in an order that mixes the packages; null takes all."""


class DocstringLengths(InstalledPackages):
    """The prompt asks to describe a function or class in a given number of words ("in 4 to 6 words"); the response is
    the summary sentence of its docstring, and a rule counts the words of an answer."""

    kind: Literal["lengths"] = "lengths"
    limit: int | None = Field(None, ge=2)
    """Pairs to take, held-out ones included, from files in an order that mixes the packages; null takes all."""


class DocstringPreferences(DocstringPairs):
    """The true summary of a function against the summary of another one in the same package, of similar length."""


class DocstringStyle(InstalledPackages):
    """A function's summary as a command ("Return the path.") against the same one as a description ("Returns the
    path."): PEP 257 asks for the command."""

    kind: Literal["pep257"] = "pep257"
    limit: int | None = Field(None, ge=2)
    """Pairs to take, held-out ones included, from files in an order that mixes the packages; null takes all."""


class CommentDocuments(InstalledPackages, SourceDescription):
    """Made-up comments on functions of the installed packages, friendly and rude."""

    kind: Literal["comments"] = "comments"
    language: str = Field("en", pattern=r"^([a-z]{2})?$")
    """ISO 639-1 code of the texts."""
    limit_mb: float = Field(1, gt=0)
    """Megabytes (10^6 bytes of UTF-8) to make."""
    rude_share: float = Field(0.5, ge=0, le=1)
    """Share of the comments that are insults."""


class CommentReplies(InstalledPackages):
    """The prompt holds a made-up comment on a function, the response keeps the peace; as a preference it stands
    against a rude one."""

    kind: Literal["comments"] = "comments"
    rude_share: float = Field(0.5, ge=0, le=1)
    """Share of the comments that are insults."""
    limit: int | None = Field(None, ge=2)
    """Pairs to make, held-out ones included, from files in an order that mixes the packages; null makes one for each
    function and class."""
