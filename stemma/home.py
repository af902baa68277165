"""The folder with the packages of the application: the repository, or `application/` of this package in a wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
IN_WHEEL = (_HERE / "application").is_dir()
HOME = _HERE / "application" if IN_WHEEL else _HERE.parent
PACKAGES = ("cli", "flows", "tasks", "training", "evaluation", "corpus", "infra")


def add_home() -> None:
    """Put the application's packages first on the path of imports.

    Raises ImportError if this process has imported another package of one of these names: only one can be in a process.
    """
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is None:
            continue
        folders = [str(Path(folder).resolve()) for folder in getattr(module, "__path__", ())]
        if str(HOME / name) not in folders:
            origin = getattr(module, "__file__", None) or ", ".join(folders) or "an unknown place"
            raise ImportError(
                f"this process has imported another package {name}, from {origin}; Stemma's own is {HOME / name}. Use "
                "stemma in another process, or the command `stemma`"
            )
    if str(HOME) not in sys.path:
        sys.path.insert(0, str(HOME))


def variables() -> dict[str, str]:
    """Environment variables of processes that run the application: where its packages are, and where its store is.

    The default store is `.stemma` in the repository. A wheel has no repository: it is `.stemma` in the working folder.
    """
    search_path = [str(HOME), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    needed = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(search_path))}
    if IN_WHEEL and not os.environ.get("STEMMA_ROOT"):
        needed["STEMMA_ROOT"] = str(Path.cwd() / ".stemma")
    return needed
