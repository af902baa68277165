"""Quality rules over one text: each measures one thing and names the paper that it comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from corpus.config import CleanConfig

GOPHER = "Gopher, Rae et al., 2021"
C4 = "C4, Raffel et al., 2020"
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
BULLETS = ("-", "*", "•", "‣", "●", "▪")
ELLIPSES = ("...", "…")
_LETTER = re.compile(r"[^\W\d_]")


class Measured:
    """A text with what the rules measure of it, each computed when first asked for."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without the space around them."""
        return [line for line in map(str.strip, self.text.splitlines()) if line]

    @cached_property
    def repeated_lines(self) -> list[str]:
        """The lines that occurred before in this text."""
        seen: set[str] = set()
        return [line for line in self.lines if line in seen or seen.add(line)]  # type: ignore[func-returns-value]

    def mean_word_length(self) -> float:
        return sum(map(len, self.words)) / max(1, len(self.words))

    def alphabetic_word_share(self) -> float:
        return sum(_LETTER.search(word) is not None for word in self.words) / max(1, len(self.words))

    def symbol_word_ratio(self) -> float:
        """The larger of the ratios of hash signs and of ellipses to words."""
        ellipses = sum(map(self.text.count, ELLIPSES))
        return max(self.text.count("#"), ellipses) / max(1, len(self.words))

    def bullet_line_share(self) -> float:
        return sum(line.startswith(BULLETS) for line in self.lines) / max(1, len(self.lines))

    def ellipsis_line_share(self) -> float:
        return sum(line.endswith(ELLIPSES) for line in self.lines) / max(1, len(self.lines))

    def repeated_line_share(self) -> float:
        return len(self.repeated_lines) / max(1, len(self.lines))

    def repeated_line_character_share(self) -> float:
        return sum(map(len, self.repeated_lines)) / max(1, sum(map(len, self.lines)))

    def stop_words(self) -> int:
        return len(STOP_WORDS.intersection(word.strip(".,;:!?\"'()").lower() for word in self.words))

    def lorem_ipsums(self) -> int:
        return self.text.lower().count("lorem ipsum")


@dataclass(frozen=True)
class Rule:
    """Drops a text whose measure lies outside [low, high]; `name` is the config key that sets it."""

    name: str
    paper: str
    measure: Callable[[Measured], float]
    low: float = float("-inf")
    high: float = float("inf")

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"{self.name} (at least {self.low:,g})"
        if self.low == float("-inf"):
            return f"{self.name} (at most {self.high:,g})"
        return f"{self.name} ({self.low:,g} to {self.high:,g})"


def rules_of(config: CleanConfig) -> list[Rule]:
    """The rules that the config turns on, in the order in which they are tried."""
    low, high = config.mean_word_length or (None, None)
    rules = [
        ("min_characters", C4, lambda m: len(m.text), config.min_characters, None),
        ("max_characters", GOPHER, lambda m: len(m.text), None, config.max_characters),
        ("mean_word_length", GOPHER, Measured.mean_word_length, low, high),
        ("min_alphabetic_word_share", GOPHER, Measured.alphabetic_word_share, config.min_alphabetic_word_share, None),
        ("max_symbol_word_ratio", GOPHER, Measured.symbol_word_ratio, None, config.max_symbol_word_ratio),
        ("max_bullet_line_share", GOPHER, Measured.bullet_line_share, None, config.max_bullet_line_share),
        ("max_ellipsis_line_share", GOPHER, Measured.ellipsis_line_share, None, config.max_ellipsis_line_share),
        ("max_repeated_line_share", GOPHER, Measured.repeated_line_share, None, config.max_repeated_line_share),
        (
            "max_repeated_line_character_share",
            GOPHER,
            Measured.repeated_line_character_share,
            None,
            config.max_repeated_line_character_share,
        ),
        ("min_stop_words", GOPHER, Measured.stop_words, config.min_stop_words, None),
        ("drop_lorem_ipsum", C4, Measured.lorem_ipsums, None, 0 if config.drop_lorem_ipsum else None),
    ]
    return [
        Rule(name, paper, measure, float("-inf") if low is None else low, float("inf") if high is None else high)
        for name, paper, measure, low, high in rules
        if low is not None or high is not None
    ]


def broken_rule(text: str, rules: list[Rule]) -> tuple[Rule, float] | None:
    """The first rule that a text breaks, with what was measured; None for a text that keeps them all."""
    measured = Measured(text)
    for rule in rules:
        value = rule.measure(measured)
        if not rule.low <= value <= rule.high:
            return rule, value
    return None
