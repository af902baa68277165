"""Minimal pairs from templates, as BLiMP's are made (Warstadt et al. 2020): so many that a small change can be told.

They are no part of the benchmark, whose pairs were written one by one (`tools/benchmark_data/minimal_pairs.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

Pair = tuple[str, str]

EACH = 64
"""Pairs of a phenomenon, drawn from all that its template gives."""
SEED = 17

NOUNS = (
    ("argument", "arguments"), ("attribute", "attributes"), ("client", "clients"), ("column", "columns"),
    ("command", "commands"), ("dictionary", "dictionaries"), ("directory", "directories"), ("function", "functions"),
    ("library", "libraries"), ("message", "messages"), ("method", "methods"), ("module", "modules"),
    ("package", "packages"), ("parser", "parsers"), ("process", "processes"), ("server", "servers"),
    ("table", "tables"), ("thread", "threads"), ("user", "users"), ("worker", "workers"),
)  # fmt: skip
"""One and several."""
ACTIONS = (
    ("accepts", "accept", "two names"), ("calls", "call", "the same function"), ("changes", "change", "the result"),
    ("checks", "check", "the type first"), ("contains", "contain", "a list"), ("needs", "need", "more memory"),
    ("reads", "read", "the whole file"), ("returns", "return", "an object"), ("shows", "show", "the default value"),
    ("stores", "store", "a copy"), ("supports", "support", "this option"), ("uses", "use", "the first value"),
)  # fmt: skip
"""A verb of one, of several, and what follows."""
STATES = ("available", "complete", "empty", "local", "optional", "private", "ready", "required", "small", "valid")
FORMS = (
    ("read", "reads", "reading"), ("create", "created", "creating"), ("remove", "removed", "removing"),
    ("compute", "computed", "computing"), ("check", "checked", "checking"), ("load", "loaded", "loading"),
    ("update", "updated", "updating"), ("open", "opened", "opening"), ("convert", "converted", "converting"),
    ("validate", "validated", "validating"),
)  # fmt: skip
"""A verb, a form that stands in its place nowhere, and the one in -ing."""
DONE = (
    ("removed", "remove"), ("created", "create"), ("written", "write"), ("given", "give"), ("loaded", "load"),
    ("ignored", "ignore"), ("called", "call"), ("updated", "update"), ("stored", "store"), ("copied", "copy"),
)  # fmt: skip
"""A participle and its verb."""
VOWELS = ("array", "error", "index", "integer", "iterator", "object", "option", "event", "element", "exception")
CONSONANTS = ("string", "message", "tuple", "list", "value", "file", "key", "name", "function", "number")
QUANTIFIERS = ("many", "several", "both", "few", "two", "three")
SINGLES = ("each", "every", "another", "a single", "one", "any other")
AUXILIARIES = ("must", "can", "will", "should", "may", "cannot")


def _agreement() -> Iterator[Pair]:
    for (one, several), (of_one, of_several, rest) in product(NOUNS, ACTIONS):
        yield f"The {one} {of_one} {rest}.", f"The {one} {of_several} {rest}."
        yield f"The {several} {of_several} {rest}.", f"The {several} {of_one} {rest}."


def _distant_agreement() -> Iterator[Pair]:
    for (one, several), (other, others), state in product(NOUNS, NOUNS, STATES):
        if one != other:
            yield f"The {several} of the {other} are {state}.", f"The {several} of the {other} is {state}."
            yield f"The {one} of the {others} is {state}.", f"The {one} of the {others} are {state}."


def _determiner_noun() -> Iterator[Pair]:
    for (one, several), state in product(NOUNS, STATES):
        yield f"These {several} are {state}.", f"This {several} are {state}."
        yield f"That {one} is {state}.", f"Those {one} is {state}."


def _article() -> Iterator[Pair]:
    openings = ("Return {}.", "Create {} from the text.", "It expects {} here.", "This is {}.", "Wait for {}.")
    for opening, (vowel, consonant) in product(openings, zip(VOWELS, CONSONANTS, strict=True)):
        yield opening.format(f"an {vowel}"), opening.format(f"a {vowel}")
        yield opening.format(f"a {consonant}"), opening.format(f"an {consonant}")


def _verb_form() -> Iterator[Pair]:
    for (one, _), (base, other, _), auxiliary in product(NOUNS, FORMS, AUXILIARIES):
        yield f"The {one} {auxiliary} {base} the data.", f"The {one} {auxiliary} {other} the data."


def _passive() -> Iterator[Pair]:
    for (one, several), (done, base) in product(NOUNS, DONE):
        yield f"The {one} is {done} at the end.", f"The {one} is {base} at the end."
        yield f"The {several} have been {done}.", f"The {several} have been {base}."


def _gerund() -> Iterator[Pair]:
    for (one, _), (base, _, gerund) in product(NOUNS, FORMS):
        yield f"Used for {gerund} the {one}.", f"Used for {base} the {one}."
        yield f"Try to {base} the {one}.", f"Try to {gerund} the {one}."


def _quantity() -> Iterator[Pair]:
    for (one, several), (quantity, single) in product(NOUNS, zip(QUANTIFIERS, SINGLES, strict=True)):
        yield f"It returns {quantity} {several}.", f"It returns {quantity} {one}."
        yield f"It returns {single} {one}.", f"It returns {single} {several}."


def _word_order() -> Iterator[Pair]:
    for (one, _), (_, base, _), state in product(NOUNS, ACTIONS, STATES):
        yield f"The {state} {one} does not {base} it.", f"The {one} {state} does not {base} it."


TEMPLATES: Mapping[str, Sequence[Pair]] = {
    "agreement": tuple(_agreement()),
    "distant_agreement": tuple(_distant_agreement()),
    "determiner_noun": tuple(_determiner_noun()),
    "article": tuple(_article()),
    "verb_form": tuple(_verb_form()),
    "passive": tuple(_passive()),
    "gerund": tuple(_gerund()),
    "quantity": tuple(_quantity()),
    "word_order": tuple(_word_order()),
}
"""By phenomenon, every pair that its template gives."""


def drawn() -> Iterator[tuple[str, Pair]]:
    """Phenomenon and pair, EACH of every template, always the same ones."""
    for phenomenon, pairs in TEMPLATES.items():
        for pair in random.Random(f"{SEED}:{phenomenon}").sample(pairs, EACH):
            yield phenomenon, pair
