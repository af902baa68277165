"""Names of sources in a config, which have to exist in the text. Importing it loads nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

from infra.errors import Problem


def unknown_source(path: str, name: str, known: Collection[str]) -> Iterator[Problem]:
    """Yield the problem of a name that none of the sources has;

    Args:
        path: of the config key that gives it.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.6)
        fix = f"did you mean {near[0]}?" if near else f"the sources: {', '.join(sorted(known)) or 'none'}"
        yield Problem("unknown_source", path, f"no source of the text has the name {name}", fix)
