"""Files under a second name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name; a copy where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
