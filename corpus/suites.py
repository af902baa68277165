"""What must hold of each kind of data, as Great Expectations suites in plain words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corpus.config import DocumentExpectations, InstructionExpectations, PreferenceExpectations, ValidateConfig

if TYPE_CHECKING:
    from great_expectations.expectations import Expectation
    from pandas import DataFrame, Series


@dataclass(frozen=True)
class Check:
    """One expectation with the sentence that says what it asks."""

    sentence: str
    expectation: Expectation


@dataclass(frozen=True)
class Suite:
    """The checks of one kind of data, and the columns that they need besides those of the data."""

    name: str
    checks: list[Check]
    derived: dict[str, Callable[[DataFrame], Series]]


def suite_of(kind: str, config: ValidateConfig) -> Suite:
    """kind: documents, instructions or preferences."""
    if kind == "documents":
        return _documents(config.documents)
    if kind == "instructions":
        return _instructions(config.instructions)
    return _preferences(config.preferences)


def _documents(limits: DocumentExpectations) -> Suite:
    import great_expectations.expectations as gxe

    checks = [
        _at_least("rows", limits.min_rows, "documents"),
        Check(
            f"at most {limits.max_null_share:.1%} of the documents have no text",
            gxe.ExpectColumnValuesToNotBeNull(column="text", mostly=1 - limits.max_null_share),
        ),
        _lengths("text", limits.min_characters, limits.max_characters, limits.min_length_share),
        Check(
            f"at most {limits.max_duplicate_share:.1%} of the texts occurred before",
            gxe.ExpectColumnProportionOfUniqueValuesToBeBetween(
                column="text", min_value=round(1 - limits.max_duplicate_share, 9)
            ),
        ),
        _mostly_true("language_like", limits.min_language_like_share, "of the texts look like language"),
        _mostly_true(
            "cleanly_decoded",
            1 - limits.max_replacement_share,
            "of the texts are free of U+FFFD, the trace of a wrong encoding",
        ),
    ]
    derived = {
        "language_like": lambda rows: rows["text"].fillna("").map(is_language_like),
        "cleanly_decoded": lambda rows: ~rows["text"].fillna("").str.contains("\ufffd", regex=False),
    }
    return Suite("documents", checks, derived)


def _instructions(limits: InstructionExpectations) -> Suite:
    checks = [
        _at_least("train_rows", limits.min_rows, "training pairs"),
        _at_least("heldout_rows", limits.min_heldout_rows, "held-out pairs"),
        _lengths("prompt", 1, limits.max_prompt_characters, limits.min_length_share),
        _lengths("response", 1, limits.max_response_characters, limits.min_length_share),
        _unique_pairs(limits.max_duplicate_share),
        _mostly_true("prompt_differs", limits.min_prompt_differs_share, "of the responses are not the prompt again"),
        _mostly_true(
            "language_like", limits.min_language_like_share, "of the responses look like language or a number"
        ),
    ]
    derived = {
        "prompt_differs": lambda rows: rows["prompt"].str.strip() != rows["response"].str.strip(),
        "language_like": lambda rows: rows["response"].map(is_answer_like),
    }
    return Suite("instructions", checks, derived)


def _preferences(limits: PreferenceExpectations) -> Suite:
    import great_expectations.expectations as gxe

    ratio = limits.max_length_ratio
    checks = [
        _at_least("train_rows", limits.min_rows, "training pairs"),
        _at_least("heldout_rows", limits.min_heldout_rows, "held-out pairs"),
        _lengths("prompt", 1, limits.max_prompt_characters, limits.min_length_share),
        _lengths("chosen", 1, limits.max_response_characters, limits.min_length_share),
        _lengths("rejected", 1, limits.max_response_characters, limits.min_length_share),
        _unique_pairs(limits.max_duplicate_share),
        _mostly_true("chosen_differs", limits.min_chosen_differs_share, "of the pairs have two different responses"),
        Check(
            f"chosen responses are on average at most {ratio:g} times as long as rejected ones, and vice versa",
            gxe.ExpectColumnMeanToBeBetween(column="relative_length", min_value=1 / ratio, max_value=ratio),
        ),
    ]
    derived = {
        "chosen_differs": lambda rows: rows["chosen"].str.strip() != rows["rejected"].str.strip(),
        # Its mean is the ratio of the two mean lengths.
        "relative_length": lambda rows: rows["chosen"].str.len() / max(1.0, rows["rejected"].str.len().mean()),
    }
    return Suite("preferences", checks, derived)


def is_language_like(text: str) -> bool:
    """At least 40 % letters among the characters that are not space, and words of 2 to 15 characters on average."""
    words = text.split()
    characters = sum(map(len, words))
    if not characters:
        return False
    letters = sum(map(str.isalpha, text))
    return letters >= 0.4 * characters and 2 <= characters / len(words) <= 15


def is_answer_like(text: str) -> bool:
    """At least a third letters, or a digit anywhere: "42" is an answer."""
    return any(map(str.isdigit, text)) or sum(map(str.isalpha, text)) >= max(1, len(text) / 3)


def _at_least(column: str, rows: int, what: str) -> Check:
    import great_expectations.expectations as gxe

    return Check(f"there are at least {rows:,} {what}", gxe.ExpectColumnMinToBeBetween(column=column, min_value=rows))


def _lengths(column: str, low: int, high: int, share: float) -> Check:
    import great_expectations.expectations as gxe

    return Check(
        f"at least {share:.1%} of the values of {column} have {low:,} to {high:,} characters",
        gxe.ExpectColumnValueLengthsToBeBetween(column=column, min_value=low, max_value=high, mostly=share),
    )


def _unique_pairs(max_duplicate_share: float) -> Check:
    import great_expectations.expectations as gxe

    return Check(
        f"at most {max_duplicate_share:.1%} of the pairs occurred before",
        gxe.ExpectColumnProportionOfUniqueValuesToBeBetween(column="id", min_value=round(1 - max_duplicate_share, 9)),
    )


def _mostly_true(column: str, share: float, what: str) -> Check:
    import great_expectations.expectations as gxe

    arguments: dict[str, Any] = {"column": column, "value_set": [True], "mostly": share}
    return Check(f"at least {share:.1%} {what}", gxe.ExpectColumnValuesToBeInSet(**arguments))
