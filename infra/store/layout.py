"""Where things lie under a store's root.

<root>/format                           the version of this layout
<root>/<stage>/<fingerprint>/           a finished artifact: payload, aux/, manifest.json
<root>/<stage>/<fingerprint>.<digest8>/ what a later build of the same address replaced
<root>/.work/<stage>/<fingerprint>/     unfinished work: artifact/ (to be renamed) and scratch/ (checkpoints, journal)
<root>/.state/                          hash book and leases; can be thrown away when nothing runs
<root>/runs/<run id>/                   the journal and result of each pipeline run
<root>/mlflow, lineage, servers         the tracking store, its outbox, and the servers' state
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infra.errors import ConfigError, Problem

FORMAT = 1
RESERVED = frozenset({"runs", "mlflow", "lineage", "servers"})
MANIFEST = "manifest.json"
AUX = "aux"


class Layout:
    """The folders of one store; making one creates the root and refuses a root of another format version."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.state = self.root / ".state"
        self.runs = self.root / "runs"
        self._check_format()

    def artifact(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint

    def work(self, stage: str, fingerprint: str) -> Path:
        return self.root / ".work" / stage / fingerprint

    def unfinished(self, stage: str) -> list[Path]:
        """The work folders of a stage's builds that have not ended in an artifact."""
        folder = self.root / ".work" / stage
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def stages(self) -> list[str]:
        """The stage folders that hold artifacts."""
        return sorted(
            folder.name
            for folder in self.root.iterdir()
            if folder.is_dir() and not folder.name.startswith(".") and folder.name not in RESERVED
        )

    def artifacts(self, stage: str) -> Iterator[Path]:
        """The finished artifacts of a stage, replaced ones too; a folder without a manifest is none."""
        folder = self.root / stage
        if folder.is_dir():
            yield from sorted(child for child in folder.iterdir() if (child / MANIFEST).is_file())

    def _check_format(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        marker = self.root / "format"
        if not marker.exists():
            marker.write_text(f"{FORMAT}\n")
            return
        found = marker.read_text().strip()
        if found != str(FORMAT):
            raise ConfigError(
                Problem(
                    "store_format",
                    str(self.root),
                    f"this store has format {found}, this version of stemma reads format {FORMAT}",
                    "use the version that wrote it, or another --root",
                )
            )
