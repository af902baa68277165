"""Pairs on style: a function's summary as a command ("Return the path.") is chosen over the same summary as a
description ("Returns the path."), which is what PEP 257 asks for.

The two differ in one word, so that a reward model learns the style and nothing else from them.
"""

from __future__ import annotations

import re

from corpus.demo.summaries import Summary
from corpus.pairs.files import Pair

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
