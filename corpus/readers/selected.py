"""Files that the sources of a stage leave out, counted and reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from corpus.readers.config import FileSelection
from infra.run import Run


def left_out(sources: Sequence[object], section: str) -> Iterator[tuple[int, int, str]]:
    """Yield (index, number of files, note) of each source of files that leaves some out. Raises StageError as
    `FileSelection.selection` does."""
    for index, source in enumerate(sources):
        if isinstance(source, FileSelection) and (note := (selection := source.selection()).note):
            yield index, len(selection.side) + len(selection.other_splits), f"{section}.read.{index}: {note}"


def note_left_out(sources: Sequence[object], section: str, run: Run) -> list[int]:
    """The number of files that each source leaves out, with an event for each that leaves out any."""
    counts = [0] * len(sources)
    for index, count, note in left_out(sources, section):
        counts[index] = count
        run.event("files_left_out", note, source=f"{section}.read.{index}", files=count)
    return counts
