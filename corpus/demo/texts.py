"""Documents, instruction pairs and preference pairs made of docstrings."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from corpus.demo.config import (
    DocstringDocuments,
    DocstringInstructions,
    DocstringLengths,
    DocstringPairs,
    DocstringPreferences,
    DocstringSignatures,
    DocstringStyle,
)
from corpus.demo.docstrings import Unparsed, group_of
from corpus.demo.parsing import read_docstrings
from corpus.demo.signatures import read_signatures
from corpus.demo.summaries import Summary, read_summaries
from corpus.documents.parts import Document, is_heldout, make_document
from corpus.documents.quarantine import Rejected
from corpus.pairs.files import Pair

ALL_DOCSTRINGS_MB = 60.0
"""About what all installed packages give."""
WINDOW = 16
"""A wrong summary comes from among this many of the nearest in length."""
RANGES = ((4, 6), (7, 9), (10, 14))
"""Fewest and most words of a description: few wide ranges, since to count to one number is beyond a small model."""


def documents(source: DocstringDocuments, name: str) -> Iterator[Document | Rejected]:
    """A document for each docstring, up to `source.limit_mb`; its group is that of its summary sentence.

    Args:
        name: what the corpus calls this source.
    """
    limit = float("inf") if source.limit_mb is None else source.limit_mb * 1e6
    taken = 0
    for item in read_docstrings(source.packages, source.exclude_packages):
        if isinstance(item, Unparsed):
            yield _rejected(item)
        elif len(item.text) >= source.min_characters:
            text = f"{item.signature}\n\n{item.text}" if source.signatures else item.text
            yield make_document(text, f"{name}/{item.source}", group_of(item.text), source.language)
            taken += len(text.encode())
            if taken >= limit:
                return


def instruction_pairs(source: DocstringInstructions) -> Iterator[Pair | Rejected]:
    """Yield pairs of a question about a function's purpose and its summary. A pair has the group of the docstring's
    document."""
    for item in read_summaries(source):
        if isinstance(item, Unparsed):
            yield _rejected(item)
        else:
            yield Pair({"prompt": item.prompt, "response": item.response}, item.source, item.group)


def verifiable_pairs(source: DocstringSignatures | DocstringLengths) -> Iterator[Pair | Rejected]:
    """Yield questions that a signature answers, or descriptions with a given number of words."""
    if isinstance(source, DocstringLengths):
        yield from _of_summaries(source, length_pair)
        return
    for item in read_signatures(source):
        yield _rejected(item) if isinstance(item, Unparsed) else item


def length_pair(summary: Summary) -> Pair | None:
    """A description in a given number of words, so that a rule can check the length of an answer; None
    where the summary's words fall in none of RANGES. The pair has the group of the docstring's document.

    Such instructions, which a program can check, are those of IFEval (Zhou et al. 2023) and of Tülu 3's reinforcement
    learning (Lambert et al. 2024). A small model learns within minutes to keep to some of them.
    """
    words = len(summary.response.split())
    bounds = next(((low, high) for low, high in RANGES if low <= words <= high), None)
    if bounds is None:
        return None
    low, high = bounds
    fields = {"prompt": f"Describe `{summary.signature}` in {low} to {high} words.", "response": summary.response}
    source = summary.source.replace("docstrings/", "lengths/", 1)
    return Pair(fields, source, summary.group, verify=f"words:{low}-{high}")


def preference_pairs(source: DocstringPreferences, heldout_share: float, seed: int) -> Iterator[Pair | Rejected]:
    """Yield a question about a function's purpose, its summary, and that of another one. A pair has the group of the
    prompt's docstring."""
    summaries = []
    for item in read_summaries(source):
        if isinstance(item, Unparsed):
            yield _rejected(item)
        else:
            summaries.append(item)
    for summary, other in zip(summaries, wrong_summaries(summaries, heldout_share, seed), strict=True):
        if other is not None:
            fields = {"prompt": summary.prompt, "chosen": summary.response, "rejected": other.response}
            yield Pair(fields, summary.source, summary.group)


def style_pairs(source: DocstringStyle) -> Iterator[Pair | Rejected]:
    """Yield a question about a function's purpose, its summary as a command, and the same as a description."""
    yield from _of_summaries(source, style_pair)


def _of_summaries(
    source: DocstringLengths | DocstringStyle, pair_of: Callable[[Summary], Pair | None]
) -> Iterator[Pair | Rejected]:
    """Yield the pair that `pair_of` returns for each summary, up to `source.limit` pairs; None leaves a summary out."""
    taken = 0
    for item in read_summaries(DocstringPairs(packages=source.packages, exclude_packages=source.exclude_packages)):
        if isinstance(item, Unparsed):
            yield _rejected(item)
        elif pair := pair_of(item):
            yield pair
            taken += 1
            if taken == source.limit:
                return


def _rejected(item: Unparsed) -> Rejected:
    return Rejected(item.source, item.line, item.reason)


def wrong_summaries(summaries: list[Summary], heldout_share: float, seed: int) -> list[Summary | None]:
    """Return for each summary another of the same package, the same side of the split and similar length.

    Each serves at most once as a wrong one, so neither a text by itself nor its length distinguishes right from wrong.
    None for a summary that is alone on its side of its package.
    """
    alike: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, summary in enumerate(summaries):
        alike[summary.package, is_heldout(summary.group, heldout_share)].append(index)
    wrong: list[Summary | None] = [None] * len(summaries)
    for (package, heldout), indices in sorted(alike.items()):
        generator = random.Random(f"{seed}:{package}:{heldout}")
        indices.sort(key=lambda index: (len(summaries[index].response), summaries[index].source))
        for window in _windows(indices):
            generator.shuffle(window)
            for index, other in zip(window, [*window[1:], window[0]], strict=True):
                if index != other:
                    wrong[index] = summaries[other]
    return wrong


def _windows(indices: list[int]) -> Iterator[list[int]]:
    """Neighbours in groups of WINDOW; a last one that would hold a single index joins the one before."""
    start = 0
    while start < len(indices):
        end = start + WINDOW
        if len(indices) - end <= 1:
            end = len(indices)
        yield indices[start:end]
        start = end


_WORDS = """
Accept Add Adjust Aggregate Align Allocate Allow Append Apply Assert Assign Attach Authenticate Build Calculate Call
Cancel Cast Check Choose Clean Clear Clip Clone Close Collect Combine Compare Compile Compose Compress Compute
Concatenate Configure Connect Construct Convert Copy Create Decode Decompress Decorate Define Delete Deploy Describe
Deserialize Detect Determine Disable Display Download Draw Drop Emit Enable Encode Encrypt Enforce Ensure Estimate
Evaluate Execute Expand Export Extend Extract Fetch Fill Filter Find Fit Flatten Flush Forward Generate Get Give
Group Handle Identify Import Increment Indicate Infer Initialize Insert Invoke Iterate Join Launch List Load Locate
Log Look Make Map Mark Match Merge Modify Move Normalize Obtain Open Parse Perform Plot Pop Prepare Print Process
Produce Provide Push Query Raise Read Receive Record Reduce Refresh Register Release Reload Remove Rename Render
Replace Report Request Reset Reshape Resize Resolve Restore Retrieve Return Run Save Scale Search Select Send
Serialize Set Show Skip Sort Split Start Stop Store Strip Submit Take Test Tokenize Train Transform Translate
Traverse Try Unregister Unpack Update Upload Use Validate Verify Wait Wrap Write Yield
"""
VERBS = frozenset(_WORDS.split())
"""Verbs that summaries begin with."""
_SIBILANT = re.compile(r"(s|x|z|ch|sh)$")


def style_pair(summary: Summary) -> Pair | None:
    """The pair of a function's summary, in the group of its docstring's document; None where it does not begin with
    one of VERBS in either form."""
    forms = both_moods(summary.response) if summary.kind == "function" else None
    if forms is None:
        return None
    command, description = forms
    fields = {"prompt": summary.prompt, "chosen": command, "rejected": description}
    return Pair(fields, summary.source.replace("docstrings/", "pep257/", 1), summary.group)


def both_moods(sentence: str) -> tuple[str, str] | None:
    """The sentence as a command and as a description; None where its first word is not a known verb.

    >>> both_moods("Returns the path.")
    ('Return the path.', 'Returns the path.')
    """
    first, space, rest = sentence.partition(" ")
    verb = first if first in VERBS else _COMMANDS.get(first)
    return (f"{verb}{space}{rest}", f"{described(verb)}{space}{rest}") if verb else None


def described(verb: str) -> str:
    """The third person of a verb: Get → Gets, Try → Tries, Match → Matches."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if _SIBILANT.search(verb) else f"{verb}s"


_COMMANDS = {described(verb): verb for verb in VERBS}
