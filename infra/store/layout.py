"""Layout of the folders and files under a store's root.

<root>/format                           the version of this layout
<root>/<stage>/<fingerprint>/           a finished artifact: payload, aux/, manifest.json
<root>/<stage>/<fingerprint>.<digest8>/ what a later build of the same address replaced
<root>/.work/<stage>/<fingerprint>/     unfinished work: artifact/ (to be renamed) and scratch/ (checkpoints, journal)
<root>/.state/                          hash book and leases, or where these are; can be thrown away when nothing runs
<root>/runs/<run id>/                   the journal and result of each pipeline run
<root>/mlflow, lineage, servers         the tracking store, its outbox, and the servers' state
<root>/promotions.json                  which registered models are promoted
<root>/comparisons/                     pages that `stemma compare` wrote
<root>/sweeps/<id>/                     trials and page of a `stemma sweep`
<root>/feedback/<round>/                answers that people judge, and what they said, see `stemma feedback`
<root>/tasks_mirror/                    data of benchmarks, put there by `stemma mirror`
<root>/exports/                         models that the page of the store exported
<root>/answers/                         answers of endpoints to `generate`; what is removed is asked for again

Of a root on an object store this is the cache, with remote.json and .remote/ besides; `infra.store.bucket.artifacts`
describes where the artifacts are.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from infra.errors import ConfigError, Problem
from infra.io.tables import unwritable
from infra.store.roots import RECORD, url_of

FORMAT = 1
MARKER = "format"
ANSWERS, EXPORTS = "answers", "exports"
RESERVED = frozenset(
    {"runs", "mlflow", "lineage", "servers", "comparisons", "sweeps", "feedback", "tasks_mirror", ANSWERS, EXPORTS}
)
MANIFEST = "manifest.json"
AUX = "aux"
MIRROR = ".remote"
RUN_TIMES, LEDGER = "times", "ledger.json"
"""In the folder of a run: the records of its stages' time, and what it cost once it ended."""
_KNOWN = RESERVED | {MARKER, RECORD, MIRROR, ".state", ".work"}
_KNOWN |= {"pins.json", ".pins.json", "promotions.json", ".promotions.json"}
"""Names that may exist in a root before its format file: `up` starts servers there before anything is built."""
_OF_THE_DISK = {"lost+found"}


class Layout:
    """The folders of one store. Nothing is written but by `create`: a root that is not there yet is an empty store.

    Raises ConfigError for a folder with anything else in it, and for a store of another format version.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.state = self.root / ".state"
        self.runs = self.root / "runs"
        self._check()

    @cached_property
    def url(self) -> str:
        """URL of the artifacts if they are on an object store; empty if they are in the root."""
        return url_of(self.root)

    def create(self) -> None:
        """Make the root a store unless it is one already. Raises StageError if it cannot be written."""
        marker = self.root / MARKER
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                # Other machines, or containers, that open it at once may have a process of the same number.
                hidden = self.root / f".{MARKER}.{os.getpid()}.{os.urandom(4).hex()}"
                hidden.write_text(f"{FORMAT}\n")
                hidden.replace(marker)
            if not os.access(self.root, os.W_OK):
                raise OSError(errno.EROFS, "read-only, or not this user's to write")
        except OSError as error:
            raise unwritable(error, marker) from error

    def artifact(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint

    def work(self, stage: str, fingerprint: str) -> Path:
        return self.root / ".work" / stage / fingerprint

    @property
    def answers(self) -> Path:
        """Answers of endpoints, for all builds."""
        return self.root / ANSWERS

    def unfinished(self, stage: str) -> list[Path]:
        """Return the work folders of a stage's unfinished builds."""
        folder = self.root / ".work" / stage
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def stages(self) -> list[str]:
        """Return the stage folders that contain artifacts."""
        return sorted(
            folder.name
            for folder in (self.root.iterdir() if self.root.is_dir() else ())
            if folder.is_dir() and not folder.name.startswith(".") and folder.name not in RESERVED | _OF_THE_DISK
        )

    def artifacts(self, stage: str) -> Iterator[Path]:
        """Return the finished artifacts of a stage, replaced ones included, by their manifests."""
        folder = self.root / stage
        if folder.is_dir():
            yield from sorted(child for child in folder.iterdir() if (child / MANIFEST).is_file())

    def _check(self) -> None:
        if "?" in str(self.root):
            raise _no_store(self.root, "the addresses of its servers' databases would end at the question mark")
        try:
            names = {path.name for path in self.root.iterdir()} - _OF_THE_DISK if self.root.exists() else set()
            actual = (self.root / MARKER).read_text().strip() if MARKER in names else ""
        except NotADirectoryError:
            raise _no_store(self.root, "expected a folder, but this is a file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise _no_store(self.root, f"cannot be read as a store: {error}") from None
        if MARKER not in names:
            strange = sorted(name for name in names - _KNOWN if not name.startswith((f".{MARKER}.", f".{RECORD}.")))
            if strange:
                examples = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
                raise _no_store(self.root, f"this folder is not a store, and not empty: it contains {examples}")
        elif actual != str(FORMAT):
            raise ConfigError(
                Problem(
                    "store_format",
                    str(self.root),
                    f"this store has format {actual[:20]!r}, this version of stemma reads format {FORMAT}",
                    "use the version that wrote it, or another --root",
                )
            )


def _no_store(root: Path, message: str) -> ConfigError:
    return ConfigError(
        Problem("not_a_store", str(root), message, "set --root to a store, or to an empty or new folder")
    )


PARTS = {
    ".work": "unfinished_gb",
    "mlflow": "mlflow_gb",
    "servers": "servers_gb",
    "runs": "runs_gb",
    ANSWERS: "answers_gb",
}
"""Folders of a store that contain no artifacts; all others do."""


def disk(root: Path) -> dict[str, float]:
    """GB (1e9 bytes) free and in all on a store's disk, and taken by its parts; a file with two names counts once."""
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    space = shutil.disk_usage(existing)
    sizes = dict.fromkeys(("artifacts_gb", *PARTS.values()), 0)
    inodes: set[tuple[int, int]] = set()
    for entry in os.scandir(root) if root.is_dir() else ():
        sizes[PARTS.get(entry.name, "artifacts_gb")] += _size(Path(entry.path), inodes)
    return {
        "free_gb": round(space.free / 1e9, 1),
        "total_gb": round(space.total / 1e9, 1),
        **{name: round(size / 1e9, 6) for name, size in sizes.items()},
    }


def _size(path: Path, inodes: set[tuple[int, int]]) -> int:
    """Return the bytes of a file, or of all files below a folder, without those seen before or removed meanwhile."""
    total = 0
    pending = [str(path)]
    while pending:
        current = pending.pop()
        try:
            if os.path.isdir(current) and not os.path.islink(current):
                pending += [entry.path for entry in os.scandir(current)]
                continue
            info = os.lstat(current)
        except FileNotFoundError:
            continue
        if (info.st_dev, info.st_ino) not in inodes:
            inodes.add((info.st_dev, info.st_ino))
            total += info.st_size
    return total
