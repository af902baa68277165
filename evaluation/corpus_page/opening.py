"""How the corpus report opens: how much text and how many tokens there are, in which language, and for what model."""

from __future__ import annotations

from evaluation.corpus_page.corpus import Corpus
from evaluation.page.parts import Opening
from evaluation.page.words import compact, count, language, percent, size

TOKENS_A_PARAMETER = 20
"""Hoffmann et al. 2022 (Chinchilla), section 3."""
READINGS = 4
"""Reading a text up to four times is almost as good as as much new text (Muennighoff et al. 2023, section 5)."""
NAMED = 3


def opening(corpus: Corpus) -> Opening | None:
    """None where no documents are among the stages."""
    if not corpus.chain:
        return None
    documents, text_bytes = corpus.totals(corpus.chain[-1])
    meta = corpus.json("shard", "meta.json")
    said = []
    if meta:
        tokens = meta["train_tokens"]
        said.append(
            f"{tokens:,} tokens to train on and {meta['validation_tokens']:,} to validate with, at "
            f"{meta['train_bytes'] / tokens:.2f} bytes a token."
        )
        once = tokens / TOKENS_A_PARAMETER
        said.append(
            f"That fits a model of about {compact(once)} parameters by Chinchilla's {TOKENS_A_PARAMETER} tokens a "
            f"parameter, or of {compact(READINGS * once)} where the text is read {READINGS} times, beyond which "
            "repeating helps little (Muennighoff et al. 2023)."
        )
    left = f"{count(documents, 'document')} with {size(text_bytes)} of text{_languages(corpus)}"
    read, read_bytes = corpus.totals(corpus.chain[0])
    of = f", {percent(text_bytes / read_bytes)} of the {size(read_bytes)} that were read" if read and read_bytes else ""
    said.append(f"They come from {left}{of}." if meta else f"{left}{of}.")
    return Opening(said)


def _languages(corpus: Corpus) -> str:
    found = list(corpus.languages.items())
    if not found:
        return " in a language that nobody named"
    named = [language(code) + ("" if share > 0.995 else f" ({percent(share)})") for code, share in found[:NAMED]]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f" in {', '.join(named)}{more}"
