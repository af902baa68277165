"""Recitation by number of copies trained on: k-extractable documents by number of copies (Carlini et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from evaluation.config import MemorisationConfig
from evaluation.generation.language_model import LoadedModel, token_log_likelihoods
from evaluation.safety.packed_documents import Split, recited_tokens, windows
from evaluation.statistics.intervals import wilson
from infra.run import Run


def recited_by_copies(
    lm: LoadedModel,
    config: MemorisationConfig,
    folder: Path,
    seen: NDArray[np.bool_],
    run: Run,
    *,
    seed: int,
    confidence: float,
) -> list[dict[str, Any]]:
    """Return a row for each number of copies (1, 2 to 3, 4 to 7 and so on) with the share of documents recited exactly.

    A copy is a document with the same first tokens, over the length of prefix and continuation.

    For each row, up to `config.sequences` distinct documents are asked, drawn under the seed.

    Args:
        folder: the MDS folder of the training split.
        seen: mask of its sequences that were trained on; all of them are read.
    """
    length = config.prefix_tokens + config.continuation_tokens
    texts = first_tokens(folder, seen, length, run)
    drawn = np.random.default_rng(seed)
    rows = []
    for bucket in sorted({copies.bit_length() for _, copies in texts}):
        candidates = [tokens for tokens, copies in texts if copies.bit_length() == bucket]
        chosen = drawn.permutation(len(candidates))[: config.sequences]
        scored = token_log_likelihoods(lm, [candidates[i].tolist() for i in chosen], run, "copies")
        recited = recited_tokens([hits for _, hits in scored], config.prefix_tokens)
        exact = int((recited == config.continuation_tokens).sum())
        rows.append(
            {
                "at_least": 2 ** (bucket - 1),
                "at_most": 2**bucket - 1,
                "documents": len(candidates),
                "sequences": len(chosen),
                "exact_match": wilson(exact, len(chosen), confidence).as_json(),
            }
        )
    return rows


def first_tokens(
    folder: Path, seen: NDArray[np.bool_], length: int, run: Run
) -> Sequence[tuple[NDArray[np.int64], int]]:
    """Return the distinct beginnings of the documents that were trained on, `length` tokens each, with the number of
    documents that begin with them, in the order of the shards.
    """
    copies: dict[int, int] = {}
    texts: dict[int, NDArray[np.int64]] = {}
    numbers = np.flatnonzero(seen)
    for done, (tokens, starts) in enumerate(Split(folder, run.work_dir).read(numbers)):
        if done % 1000 == 0:
            run.stop_if_cancelled()
            run.progress(done, len(numbers), "sequences", "copies")
        for start in windows(starts, len(tokens), length):
            text = tokens[start : start + length]
            key = xxhash.xxh3_64_intdigest(np.ascontiguousarray(text, np.int64).tobytes())
            copies[key] = copies.get(key, 0) + 1
            if key not in texts:
                texts[key] = np.array(text, np.int64)
    return [(texts[key], count) for key, count in copies.items()]
