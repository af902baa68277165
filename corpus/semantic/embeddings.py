"""Embeddings of all documents of a corpus in one file, written part by part and read in pieces."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corpus.documents.passes import Passes
from corpus.documents.selection import read_batches
from corpus.semantic.config import SemanticDedupeConfig
from corpus.semantic.encoder import Embeddings, TextEncoder
from infra.io.files import write_whole
from infra.io.json import read_own_json
from infra.process.pace import Pace

AT_ONCE = 256
"""Documents after which progress is reported and a cancellation is seen."""


@dataclass(frozen=True)
class EmbeddingFile:
    """Embeddings (rows, width) of length 1 on disk."""

    path: Path
    rows: int
    width: int

    def of(self, documents: NDArray[np.integer]) -> Embeddings:
        """Those of some documents, (n, width); the mapping of the file is closed again, with the pages it read."""
        mapping = np.memmap(self.path, np.float32, "r", shape=(self.rows, self.width)).view(np.ndarray)
        embeddings: Embeddings = mapping[documents]
        return embeddings


def embed_documents(config: SemanticDedupeConfig, passes: Passes) -> tuple[EmbeddingFile, int]:
    """Return the embeddings of all documents, and how many of these are longer than what is read of them.

    Those of a part are kept in the work folder once they are whole, so that a build that was interrupted goes on there.
    Raises StageError as `TextEncoder`.
    """
    run = passes.run
    folder = run.work_dir / "embeddings"
    folder.mkdir(exist_ok=True)
    file = folder / "embeddings.bin"
    encoder: TextEncoder | None = None
    cut = width = 0
    with Pace(run, "documents", sum(passes.rows)) as pace:
        for number, (part, rows, first) in enumerate(zip(passes.parts, passes.rows, passes.firsts, strict=True)):
            note = folder / f"{number:05}.json"
            if not note.exists():
                encoder = encoder or TextEncoder(config, run.launch.device)
                is_cut = _embed_part(part, first, file, encoder, pace, passes)
                write_whole(note, json.dumps({"cut": is_cut, "width": encoder.width}))
            else:
                pace.add(rows)
            record = read_own_json(note)
            cut, width = cut + record["cut"], record["width"]
    return EmbeddingFile(file, sum(passes.rows), width), cut


def _embed_part(part: Path, first: int, file: Path, encoder: TextEncoder, pace: Pace, passes: Passes) -> int:
    """Write the embeddings of a part, of which `first` is the number of the first document; return how many of its
    documents are cut."""
    cut = 0
    with file.open("r+b" if file.exists() else "w+b") as out:
        out.seek(4 * encoder.width * first)
        for batch in read_batches(part, AT_ONCE, ["text"]):
            texts = batch["text"].to_pylist()
            embeddings, is_cut = encoder(texts)
            out.write(embeddings.tobytes())
            cut += int(is_cut.sum())
            pace.add(len(texts), sum(map(len, texts)))
            passes.run.stop_if_cancelled()
        out.flush()
        os.fsync(out.fileno())  # the note that it is whole must not outlive a power cut that it does not
    return cut
