"""Tokens that may follow within a grammar: answers that are JSON by construction.

The tokens of a vocabulary are sorted by their texts, so that all tokens that begin alike are a range, which is left as
soon as the grammar has no way on. In a string almost every token may follow: where each of them leads is found once.

    sorted texts   …  "}"  "},"  "},{"  "}\\n"  …      a state that allows `}` and then the end: the first of them alone
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache
from string import ascii_letters, digits

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.generation.json_grammar import Grammar, InString, Stack, State, inside_string

NEEDED = frozenset(ascii_letters + digits + '{}[]",:-.+ \\')
"""Characters of which each is a token of its own in a vocabulary that writes every JSON."""
KEPT_MASKS = 256


class Vocabulary:
    """The texts of a tokenizer's tokens, sorted.

    Args:
        tokenizer: Of the model.
        shown: Special tokens that are text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Collection[int] = ()) -> None:
        hidden = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special} - set(shown)
        # Some tokenizers drop the space of a token that begins a text.
        before = tokenizer("a", add_special_tokens=False).input_ids[-1:]
        length = len(tokenizer.decode(before))
        self.texts = [
            ""
            if number in hidden
            else str(tokenizer.decode([*before, number], clean_up_tokenization_spaces=False))[length:]
            for number in range(len(tokenizer))
        ]
        order = sorted((text, number) for number, text in enumerate(self.texts) if text)
        self._sorted = [text for text, _ in order]
        self._numbers = torch.tensor([number for _, number in order])
        self._in_string = lru_cache(maxsize=1_000)(self._find_in_string)
        self._in_string("", 0, len(self._sorted), 0)  # takes long, and every JSON has strings

    @property
    def missing(self) -> str:
        """The characters that the vocabulary needs for JSON and has in longer tokens alone."""
        known = set(self._sorted)
        return "".join(sorted(NEEDED - known))

    def allowed(self, grammar: Grammar, stack: Stack) -> Tensor:
        """Return which tokens (V,) may follow where the symbols of a stack do."""
        of_sorted = torch.zeros(len(self._sorted), dtype=torch.bool)
        self._mark(of_sorted, grammar, stack, 0, len(self._sorted), 0)
        allowed = torch.zeros(len(self.texts), dtype=torch.bool)
        allowed[self._numbers[of_sorted]] = True
        return allowed

    def _mark(self, allowed: Tensor, grammar: Grammar, stack: Stack, low: int, high: int, depth: int) -> None:
        """Mark those of the sorted texts from `low` to `high`, which have the first `depth` characters in common, whose
        other characters may follow."""
        texts = self._sorted
        first = low
        while low < high and len(texts[low]) == depth:
            low += 1
        allowed[first:low] = True
        if low == high or not stack:
            return
        if isinstance(top := stack[-1], InString):
            inside, behind = self._in_string(top.escape, low, high, depth)
            allowed[low:high] |= inside
            after: State = frozenset(grammar.next((*stack[:-1], InString()), '"'))
            for letter, rests in behind.items():
                if not (state := grammar.advance(after, letter)):
                    continue
                for rest, positions in rests.items():
                    if grammar.advance(state, rest):
                        allowed[positions] = True
            return
        while low < high:
            letter = texts[low][depth]
            following = texts[low][:depth] + chr(ord(letter) + 1) if ord(letter) < 0x10FFFF else None
            end = high if following is None else bisect_left(texts, following, low, high)
            for further in grammar.next(stack, letter):
                self._mark(allowed, grammar, further, low, end, depth + 1)
            low = end

    def _find_in_string(
        self, escape: str, low: int, high: int, depth: int
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Return which of the texts from `low` to `high` stay in a string, and the positions of those that close it, by
        the first letter behind the quote and the other ones."""
        inside: list[bool] = []
        behind: dict[str, dict[str, list[int]]] = {}
        for position in range(low, high):
            unfinished, rest = inside_string(escape, self._sorted[position][depth:])
            inside.append(unfinished is not None)
            if rest is not None:
                behind.setdefault(rest[:1], {}).setdefault(rest[1:], []).append(position)
        return torch.tensor(inside), {
            letter: {rest: torch.tensor(positions) for rest, positions in rests.items()}
            for letter, rests in behind.items()
        }


class Constraint:
    """A grammar that answers keep to from their first token.

    Args:
        grammar: Of the whole answer.
        vocabulary: Of the model that answers.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.grammar, self.vocabulary = grammar, vocabulary
        self._of_stack = lru_cache(maxsize=KEPT_MASKS)(lambda stack: vocabulary.allowed(grammar, stack))

    def allowed(self, state: State) -> Tensor:
        """Return which tokens (V,) may follow."""
        masks = [self._of_stack(stack) for stack in state if stack]
        if len(masks) == 1:
            return masks[0]
        return torch.stack(masks).any(0) if masks else torch.zeros(len(self.vocabulary.texts), dtype=torch.bool)


class ConstrainedText:
    """The text of one answer, as far as the grammar is concerned."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._state = constraint.grammar.begin
        self._allowed = constraint.allowed(self._state)

    @property
    def is_complete(self) -> bool:
        """True once nothing may follow: a whole value that no character continues."""
        return self._state == {()}

    @property
    def is_stuck(self) -> bool:
        """True where the text is no whole value and no token continues it."""
        return () not in self._state and not bool(self._allowed.any())

    def restrict(self, logits: Tensor, stop_ids: Collection[int]) -> None:
        """Set the logits (V,) of tokens that may not follow to -inf, in place. stop_ids: may follow a whole value."""
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[: len(self._allowed)] = self._allowed[: len(logits)]
        if () in self._state:
            allowed[[number for number in stop_ids if number < len(logits)]] = True
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Add a token that was allowed."""
        self._state = self._constraint.grammar.advance(self._state, self._constraint.vocabulary.texts[token])
        self._allowed = self._constraint.allowed(self._state)
