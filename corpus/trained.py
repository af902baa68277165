"""Which sequences of the shards a model was trained on: written by pretraining, kept by every model made from its own.

A pretraining may be shorter than the text, so that most of it is never seen; only what was seen can be memorised. The
file names the shards by their text, so that nobody takes the numbers for those of other shards.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from infra.errors import stage_error

FILE = "trained_sequences.json"
_ENDS = 1 << 16


@dataclass(frozen=True)
class TrainedSequences:
    """What a pretraining saw of the training split.

    shards: `split_fingerprint` of that split.
    seen: for each of its sequences, in their order, whether the model was trained on it.
    """

    shards: str
    seen: NDArray[np.bool_]

    def write(self, folder: Path) -> None:
        """Leaves it in a model folder: a byte for every eight sequences, as base64 in JSON."""
        message = {
            "shards": self.shards,
            "sequences": len(self.seen),
            "trained": int(self.seen.sum()),
            "seen": base64.b64encode(np.packbits(self.seen).tobytes()).decode(),
        }
        (folder / FILE).write_text(json.dumps(message, indent=1) + "\n", encoding="utf8")

    @classmethod
    def read(cls, folder: Path) -> TrainedSequences | None:
        """That of a model folder; None for a model that does not say. Raises StageError for a file that is damaged."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            message = json.loads(path.read_text(encoding="utf8"))
            bits = np.frombuffer(base64.b64decode(message["seen"], validate=True), np.uint8)
            return cls(str(message["shards"]), np.unpackbits(bits, count=int(message["sequences"])).astype(bool))
        except (ValueError, KeyError, TypeError) as error:
            raise stage_error(
                "bad_model", str(path), f"expected what pretraining wrote: {error}", "take the file out of the folder"
            ) from error


def split_fingerprint(folder: Path, index: dict[str, Any] | None = None) -> str:
    """Names the text of an MDS folder: its index, and both ends of every shard.

    index: its index.json, where that was read already.
    """
    index = index or json.loads((folder / "index.json").read_text(encoding="utf8"))
    digest = xxhash.xxh3_128(json.dumps(index, sort_keys=True))
    for shard in index["shards"]:
        for part in ("raw_data", "zip_data"):
            path = folder / shard[part]["basename"] if shard.get(part) else folder
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(file.read(_ENDS))
                    file.seek(-min(_ENDS, path.stat().st_size), 2)
                    digest.update(file.read())
    return digest.hexdigest()
