"""Record of the sequences of the shards that a model was trained on: written by pretraining, kept by every model made
from its model.

A pretraining may be shorter than the text, so that most of it is never seen; only text that was seen can be memorised.
The file names the shards by their text, so that the numbers are not mistaken for those of other shards. A training that
continues another names the shards of that one too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from infra.errors import stage_error
from infra.io.json import read_own_json

FILE = "trained_sequences.json"
_ENDS = 1 << 16


@dataclass(frozen=True)
class TrainedSequences:
    """The sequences that a model was pretrained on.

    shards: `split_fingerprint` of the training split that was read last.
    seen: for each of its sequences, in their order, True if the model was trained on it.
    others: the same of the training splits that were read before, by their fingerprints.
    """

    shards: str
    seen: NDArray[np.bool_]
    others: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def of(self, shards: str) -> NDArray[np.bool_] | None:
        """Return a mask of the sequences of the split with this fingerprint that were trained on; None for a split
        never read."""
        return {**self.others, self.shards: self.seen}.get(shards)

    def after(self, before: TrainedSequences | None) -> TrainedSequences:
        """Return the union with the sequences that were trained on before."""
        if before is None:
            return self
        masks = {**before.others, before.shards: before.seen}
        for shards, mask in {**self.others, self.shards: self.seen}.items():
            masks[shards] = masks[shards] | mask if shards in masks else mask
        return TrainedSequences(self.shards, masks.pop(self.shards), masks)

    def write(self, folder: Path) -> None:
        """Leave it in a model folder: a byte for every eight sequences, as base64 in JSON."""
        message: dict[str, Any] = _as_json(self.shards, self.seen)
        if self.others:
            message["others"] = [_as_json(shards, mask) for shards, mask in self.others.items()]
        (folder / FILE).write_text(json.dumps(message, indent=1) + "\n", encoding="utf8")

    @classmethod
    def read(cls, folder: Path) -> TrainedSequences | None:
        """Read the record of a model folder; None for a model without one. Raises StageError for a file that is
        damaged."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            message = read_own_json(path)
            return cls(*_from_json(message), dict(map(_from_json, message.get("others", ()))))
        except (ValueError, KeyError, TypeError) as error:
            raise stage_error(
                "bad_model",
                str(path),
                f"expected the output of pretraining: {error}",
                "remove the file from the folder",
            ) from error


def _as_json(shards: str, mask: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "shards": shards,
        "sequences": len(mask),
        "trained": int(mask.sum()),
        "seen": base64.b64encode(np.packbits(mask).tobytes()).decode(),
    }


def _from_json(message: Mapping[str, Any]) -> tuple[str, NDArray[np.bool_]]:
    bits = np.frombuffer(base64.b64decode(message["seen"], validate=True), np.uint8)
    return str(message["shards"]), np.unpackbits(bits, count=int(message["sequences"])).astype(bool)


def split_fingerprint(folder: Path, index: dict[str, Any] | None = None) -> str:
    """Name the text of an MDS folder: its index, and both ends of every shard.

    Args:
        index: its index.json, where that was read already.
    """
    index = index or read_own_json(folder / "index.json")
    digest = xxhash.xxh3_128(json.dumps(index, sort_keys=True).encode())
    for shard in index["shards"]:
        for part in ("raw_data", "zip_data"):
            path = folder / shard[part]["basename"] if shard.get(part) else folder
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(file.read(_ENDS))
                    file.seek(-min(_ENDS, path.stat().st_size), 2)
                    digest.update(file.read())
    return digest.hexdigest()
