"""Functions that numba compiles, kept on disk between processes under what they were compiled from.

numba's own cache looks at the file of a function only: after a change in another file, whose function or constant was
compiled into it, it would go on running the old code. Here a function's compiled form lies under a digest of its
file, of the constants that the file imports and, in turn, of the compiled functions that it imports.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np

_DIGEST = "stemma_digest"
_CONSTANTS = (bool, int, float, str, bytes, tuple, np.generic)


def kernel(function: Callable[..., Any] | None = None, *, inline: bool = False) -> Any:
    """Decorator: compiles at the first call, without the interpreter's lock. inline: into its callers.

    The compiled form is kept in __pycache__ beside the source, in $NUMBA_CACHE_DIR where that is set, or else in
    ~/.cache/stemma where the source's folder cannot be written to.
    """
    if function is None:
        return partial(kernel, inline=inline)
    digest = _digest(function)
    earlier = numba.config.CACHE_DIR
    # Read when a function is declared, not when it is compiled.
    numba.config.CACHE_DIR = str(_folder(Path(inspect.getfile(function)), earlier) / digest[:16])
    try:
        compiled = numba.njit(cache=True, nogil=True, inline="always" if inline else "never")(function)
    finally:
        numba.config.CACHE_DIR = earlier
    setattr(compiled, _DIGEST, digest)
    return compiled


def _digest(function: Callable[..., Any]) -> str:
    """Names what a function is compiled from: its whole file, whose further functions it may call, and what that file
    imports."""
    parts = [Path(inspect.getfile(function)).read_text(encoding="utf8"), function.__name__]
    for name, value in sorted(function.__globals__.items()):
        if hasattr(value, _DIGEST):
            parts.append(f"{name}={getattr(value, _DIGEST)}")
        elif isinstance(value, _CONSTANTS) and not name.startswith("__"):
            parts.append(f"{name}={value!r}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _folder(source: Path, configured: str) -> Path:
    if configured:
        return Path(configured)
    beside = source.parent / "__pycache__"
    if os.access(beside if beside.exists() else source.parent, os.W_OK):
        return beside / "kernels"
    return Path.home() / ".cache" / "stemma" / "kernels"
