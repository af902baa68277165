"""Documents in the packed sequences of an MDS folder, read again, and the tokens of them that a model recites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from infra.errors import stage_error
from infra.io.json import read_own_json

_LOOKS = 50
"""Most sequences examined per requested one: with short documents, few hold a whole window."""


def recited_tokens(hits: Sequence[Tensor], prefix_tokens: int) -> np.ndarray:
    """Return, for each sequence (N,), the number of tokens after the prefix that greedy decoding gets right before its
    first error.

    Greedy decoding follows the true text as long as each true token is the likeliest one given the true text before it.
    One forward pass over the sequences therefore gives the number without generating anything.

    Args:
        hits: for each sequence (T - 1,), True for each token after the first that is the likeliest one.
    """
    # The first entry of `hits` refers to token 1, so the first token after the prefix is at index prefix - 1.
    return np.array([int(hit[prefix_tokens - 1 :].int().cumprod(0).sum()) for hit in hits])


def read_documents(
    folder: Path, count: int, length: int, seed: int, work_dir: Path, among: NDArray[np.bool_] | None = None
) -> list[list[int]]:
    """Return `length` tokens of one document from each of up to `count` packed sequences of an MDS folder, drawn under
    the seed, in the order of their numbers.

    They begin where the document does in its sequence, with the token that ended the previous one, as in training. A
    sequence without a document of this length is skipped; at most 50 times `count` sequences are examined.

    Args:
        work_dir: where compressed shards are unpacked, one at a time.
        among: mask of the sequences that may be drawn; all by default.

    Raises StageError if the folder is not an MDS folder with a token column.
    """
    split = Split(folder, work_dir)
    drawn = np.random.default_rng(seed)
    numbers = drawn.permutation(np.flatnonzero(among) if among is not None else np.arange(len(split)))
    chosen: dict[int, list[int]] = {}
    for begin in range(0, min(len(numbers), _LOOKS * count), count):
        part = numbers[begin : begin + count]
        picks = drawn.random(len(part))
        texts = {}
        order = np.argsort(part)
        for index, (tokens, starts) in zip(order, split.read(part[order]), strict=True):
            if len(candidates := windows(starts, len(tokens), length)):
                start = candidates[int(picks[index] * len(candidates))]
                texts[int(index)] = tokens[start : start + length].tolist()
        for index in sorted(texts)[: count - len(chosen)]:
            chosen[int(part[index])] = texts[index]
        if len(chosen) == count:
            break
    return [chosen[number] for number in sorted(chosen)]


def windows(starts: NDArray[np.int64], total: int, length: int) -> NDArray[np.int64]:
    """Return the positions in a packed sequence of `total` tokens where documents with at least `length` tokens in it
    begin.

    Args:
        starts: positions of the documents' first tokens; each document begins with the token before, which ended
            the previous one.
    """
    begins = np.unique(np.maximum(starts.astype(np.int64) - 1, 0))
    return begins[np.diff([*begins, total]) >= length]


class Split:
    """An MDS folder read as files: a StreamingDataset would need shared memory and a process group to do the same."""

    def __init__(self, folder: Path, work_dir: Path) -> None:
        self._folder, self._work_dir = folder, work_dir
        try:
            self._shards = read_own_json(folder / "index.json")["shards"]
            self._ends = np.cumsum([shard["samples"] for shard in self._shards])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise stage_error("bad_shards", str(folder), f"expected a folder of MDS shards: {error}") from error

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[np.ndarray, NDArray[np.int64]]]:
        """Yield the tokens (T,) of each of these sequences, and the positions where its documents begin; `numbers` in
        ascending order.

        Raises StageError `bad_shards` for files that are missing or cannot be read.
        """
        from streaming.base.format import reader_from_json

        shards = np.searchsorted(self._ends, numbers, "right")
        for shard in np.unique(shards):
            message = self._shards[shard]
            path, unpacked = self._unpacked(message)
            try:
                reader = reader_from_json(str(path), "", message)
                for number in numbers[shards == shard]:
                    sample = reader[int(number - self._ends[shard] + message["samples"])]
                    tokens = sample.get("tokens")
                    if not isinstance(tokens, np.ndarray):
                        raise stage_error(
                            "bad_shards", str(self._folder), f"expected a column tokens, found {sorted(sample)}"
                        )
                    yield tokens, np.asarray(sample.get("starts", [0]), np.int64)
            except (OSError, KeyError, ValueError) as error:
                raise stage_error(
                    "bad_shards", str(self._folder), f"expected a folder of MDS shards: {error}"
                ) from error
            finally:
                if unpacked:
                    unpacked.unlink(missing_ok=True)

    def _unpacked(self, shard: dict[str, Any]) -> tuple[Path, Path | None]:
        """Return the folder that holds a shard in readable form, and the file in it that was unpacked, if any."""
        raw = shard["raw_data"]["basename"]
        if not shard.get("compression") or (self._folder / raw).exists():
            return self._folder, None
        from streaming.base.compression import decompress

        self._work_dir.mkdir(parents=True, exist_ok=True)
        packed = self._folder / shard["zip_data"]["basename"]
        try:
            (self._work_dir / raw).write_bytes(decompress(shard["compression"], packed.read_bytes()))
        except OSError as error:
            raise stage_error("bad_shards", str(packed), f"expected a compressed shard: {error}") from error
        return self._work_dir, self._work_dir / raw
