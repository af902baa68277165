"""Functions compiled by numba, cached on disk between processes under a digest of their sources.

numba's own cache checks only the file of a function: after a change in another file, whose function or constant was
compiled into it, it would continue to run the old code. Here the key of a function's compiled form is a digest of its
file, of the constants that the file imports and, recursively, of the compiled functions that it imports.
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
    """Decorator that compiles a function at its first call, to run without the interpreter's lock.

    The compiled form is kept in $NUMBA_CACHE_DIR if that is set, else in __pycache__ next to the source, or in
    ~/.cache/stemma if the source's folder is not writable.

    Args:
        inline: True inlines the function into its callers.
    """
    if function is None:
        return partial(kernel, inline=inline)
    digest = _digest(function)
    earlier = numba.config.CACHE_DIR
    # numba reads this when a function is declared, not when it is compiled.
    numba.config.CACHE_DIR = str(_folder(Path(inspect.getfile(function)), earlier) / digest[:16])
    try:
        compiled = numba.njit(cache=True, nogil=True, inline="always" if inline else "never")(function)
    finally:
        numba.config.CACHE_DIR = earlier
    setattr(compiled, _DIGEST, digest)
    return compiled


def _digest(function: Callable[..., Any]) -> str:
    """Return the digest of a function's sources: its whole file, whose other functions it may call, and the constants
    and kernels that the file imports."""
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
    cache_folder = source.parent / "__pycache__"
    if os.access(cache_folder if cache_folder.exists() else source.parent, os.W_OK):
        return cache_folder / "kernels"
    return Path.home() / ".cache" / "stemma" / "kernels"
